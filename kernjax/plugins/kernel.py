"""A plugged-in kernel: somebody's function in place of an op, checked where it is called."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from kernjax.base.errors import UserError
from kernjax.precision.policy import Span, spans_text
from pallas_kernels.ops import OPS


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A function that computes `op`; called with the op's whole signature less `implementation`:
    arrays by position, every keyword every time, at its public default where the caller left it.

    `name` is `module:function` as it was given, `sha256` that of the function's source file;
    `layers` restricts it to some (first and last, both included), empty means all.
    Shapes, dtypes and structure of what it returns are checked while it is traced, so that the
    compiled program pays nothing; values are not: a NaN is for the judgement to find.
    """

    op: str
    name: str
    function: Callable[..., Any]
    sha256: str
    layers: tuple[Span, ...] = ()

    def covers(self, layer: int) -> bool:
        """Whether it stands in for its op at this layer."""
        return not self.layers or any(first <= layer <= last for first, last in self.layers)

    @property
    def gives_lse(self) -> bool:
        """Whether an attention kernel can be asked for its log-sum-exp."""
        return "return_lse" in inspect.signature(self.function).parameters

    def __call__(self, *args: Any, return_lse: bool = False, **kwargs: Any) -> Any:
        _called.add(self)
        call = signature(self.op).bind(*args, **kwargs)
        call.apply_defaults()
        asked = {"return_lse": True} if return_lse else {}
        try:
            out = self.function(*call.args, **call.kwargs, **asked)
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"Kernel {self.name} for {self.op} raised {one_line(error)}.",
                f"It was called with {_describe_call(call.arguments)}.",
            ) from error
        shapes, dtypes = expected_output(self.op, *args, **kwargs)
        if return_lse:
            shapes, dtypes = (shapes, shapes[:-1]), (dtypes, jnp.float32)
        check_output(self.op, out, shapes, dtypes, name=f"Kernel {self.name}")
        return out

    @property
    def was_called(self) -> bool:
        """Whether any model was traced through it: what a manifest may claim to have run."""
        return self in _called

    def to_dict(self) -> dict[str, str]:
        """For a manifest: which function, the hash of the file it came from, and its layers."""
        layers = {"layers": spans_text(self.layers)} if self.layers else {}
        return {"name": self.name, "sha256": self.sha256, **layers}


# Beside the record, not in it: equal kernels share one trace, and so must share the proof of it.
_called: set[Kernel] = set()


def expected_output(op: str, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Shapes and dtypes that `op` returns for these arguments; tuples of two for the delta rule.

    attention: [B, T, N, Hv]; delta rule: ([B, T, Hv, V], [B, Hv, K, V]); all float32.
    """
    values = signature(op).bind(*args, **kwargs).arguments
    if op.startswith("attention."):
        return (*values["q"].shape[:3], values["v"].shape[3]), jnp.float32
    batch, _, heads, width = values["v"].shape
    state = (batch, heads, values["k"].shape[3], width)
    return (values["v"].shape, state), (jnp.float32, jnp.float32)


def check_output(
    op: str, out: Any, expected_shape: Any, expected_dtype: Any, *, name: str = "The kernel"
) -> None:
    """UserError naming found and expected, unless `out` has these shapes, dtypes and structure.

    expected_shape: one shape, or a tuple of shapes where the op returns a tuple of arrays;
    expected_dtype alike. Works on tracers.
    """
    if expected_shape and isinstance(expected_shape[0], tuple):
        expected = [
            jax.ShapeDtypeStruct(shape, dtype)
            for shape, dtype in zip(expected_shape, expected_dtype, strict=True)
        ]
    else:
        expected = jax.ShapeDtypeStruct(expected_shape, expected_dtype)
    if _describe(out) != _describe(expected):
        raise UserError(
            f"{name} for {op} returned {_describe(out)}.",
            f"{op} returns {_describe(expected)}.",
            "Cast or reshape what the plug-in returns; a state is laid out [B, Hv, K, V].",
        )


@functools.cache
def signature(op: str) -> inspect.Signature:
    """What a plug-in for `op` is called with: the public signature, less what it never sees.

    `implementation` chooses among ours; `layer` is taken out of the stack before the call;
    `return_lse` is asked only of kernels that name it, where keys lie in parts.
    """
    public = inspect.signature(OPS[op])
    unseen = ("implementation", "layer", "return_lse")
    kept = [p for p in public.parameters.values() if p.name not in unseen]
    return public.replace(parameters=kept)


def one_line(error: BaseException) -> str:
    """`ValueError: what it says (file.py:12)`: the first line, and where it was raised."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    if isinstance(error, SyntaxError) and error.filename:
        where = f"{error.filename}:{error.lineno}"
        text = error.msg
    else:
        frames = traceback.extract_tb(error.__traceback__)
        # jax and the import system put frames of their own below the author's line.
        own = [f for f in frames if "site-packages" not in f.filename and f.filename[0] != "<"]
        where = f"{own[-1].filename}:{own[-1].lineno}" if own else "unknown place"
    return f"{type(error).__name__}: {text.rstrip('.')} ({where})"


def _describe(value: Any) -> str:
    """`float32[2, 40, 4, 8]`, `(float32[...], float32[...])`, or the type of what is no array."""
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_describe, value))})"
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        return f"a {type(value).__name__}"
    return f"{jnp.dtype(value.dtype).name}{list(value.shape)}"


def _describe_call(arguments: Mapping[str, Any]) -> str:
    arrays = {name: value for name, value in arguments.items() if isinstance(value, jax.Array)}
    return ", ".join(f"{name} {_describe(value)}" for name, value in arrays.items())

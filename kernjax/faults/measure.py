"""How large a fault is at its op: relative errors on real or synthetic calls."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from kernjax.faults.catalogue import Fault
from kernjax.faults.inputs import Call, example
from kernjax.plugins import Kernel, load_kernels
from pallas_kernels.formats import BF16
from pallas_kernels.ops import OPS

NORMAL_FORMATS: dict[str, dict[str, Any]] = {
    "attention": {"p": BF16, "block_k": 128},
    "delta_rule": {"v_new": BF16, "h": BF16, "chunk": 32},
}
"""What equally right kernels round: the yardstick at the op."""

RED_AT_OP = 4.0
"""An error of so many times the yardstick is red at the op; sixteen times its KL."""

ORDER_OF_SUMS = 1e-5
"""float32 sums in another order differ by less."""


@dataclasses.dataclass(frozen=True)
class Size:
    """Relative Frobenius errors of an op's outputs and, for the delta rule, of the state it
    leaves; inf where a value is not finite."""

    output: float
    state: float = 0.0

    @property
    def acts(self) -> bool:
        """Whether this is more than another order of sums."""
        return self.largest > ORDER_OF_SUMS

    @property
    def largest(self) -> float:
        return max(self.output, self.state)


def size_on(function: Callable[..., Any], op: str, calls: Sequence[Call]) -> Size:
    """The error of `function` against the healthy op on these calls, pooled."""
    ours, theirs = _compiled(function), _compiled(OPS[op])
    return _pooled((ours(call), theirs(call)) for call in calls)


def size_of(fault: Fault, calls: Mapping[str, Sequence[Call]]) -> Size:
    """The largest error over the ops that the fault replaces."""
    sizes = [size_on(k, op, calls.get(op, ())) for op, k in load_kernels(fault.specs).items()]
    return Size(max(s.output for s in sizes), max(s.state for s in sizes))


def ratio_at_op(fault: Fault) -> tuple[Size, float]:
    """The error on the fault's own synthetic inputs, and over the yardstick's on the same.

    At the first op that the fault replaces: the other one takes the same function.
    """
    op, kernel = next(iter(load_kernels(fault.specs).items()))
    truth, normal = _yardstick(op, fault.inputs)
    call = example(op, fault.inputs)
    size = _pooled([(_compiled(kernel, _QUICK)(call), truth)])
    return size, size.largest / normal


@functools.cache
def _yardstick(op: str, family: str) -> tuple[Any, float]:
    """The healthy op's result on a synthetic call, and the error there of an equally right one."""
    call = example(op, family)
    truth = _healthy(op)(call)
    normal = _pooled([(_equally_right(op)(call), truth)])
    # A few decode steps of an equally right kernel may round nothing.
    return truth, max(normal.largest, 1e-6)


@functools.cache
def _healthy(op: str) -> Callable[[Call], Any]:
    return _compiled(OPS[op], _QUICK)


@functools.cache
def _equally_right(op: str) -> Callable[[Call], Any]:
    def equally_right(*arguments: jax.Array, formats: Any, **keywords: Any) -> Any:
        changed = dataclasses.replace(formats, **NORMAL_FORMATS[op.partition(".")[0]])
        return OPS[op](*arguments, formats=changed, **keywords)

    return _compiled(equally_right, _QUICK)


def _pooled(pairs: Iterable[tuple[Any, Any]]) -> Size:
    """The error of the first of each pair against the second, over all of them."""
    squares = np.zeros((2, 2))  # error and truth, of output and state
    for ours, truth in pairs:
        for i, (a, b) in enumerate(zip(_arrays(ours), _arrays(truth), strict=True)):
            squares[i] += np.sum((a - b) ** 2), np.sum(b**2)
    return Size(*(_root(error, truth) for error, truth in squares))


# Synthetic calls are small: what costs time is the compiler.
_QUICK = {"xla_backend_optimization_level": 0}


def _compiled(
    function: Callable[..., Any] | Kernel, options: dict[str, Any] | None = None
) -> Callable[[Call], Any]:
    """`function` under jit, of calls; compiled once for all calls of the same shapes."""

    @functools.partial(jax.jit, static_argnums=2, compiler_options=options)
    def run(arguments: Any, arrays: Any, fixed: tuple[tuple[str, Any], ...]) -> Any:
        return function(*arguments, **arrays, **dict(fixed))

    def on(call: Call) -> Any:
        arrays = {k: v for k, v in call.keywords.items() if hasattr(v, "shape")}
        fixed = tuple((k, v) for k, v in call.keywords.items() if k not in arrays)
        return run(call.arguments, arrays, fixed)

    return on


def _arrays(result: Any) -> list[np.ndarray]:
    parts = result if isinstance(result, tuple) else (result,)
    return [np.asarray(part, np.float64) for part in parts]


def _root(error: float, truth: float) -> float:
    if not math.isfinite(error):
        return math.inf
    return math.sqrt(error / truth) if truth else 0.0

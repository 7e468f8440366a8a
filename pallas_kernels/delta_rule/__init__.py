"""Gated delta rule with a rounding format at every step; scalar gate (GDN) or per channel (KDA).

For one value head, S [K, V] being its state:

    S = exp(g) * S;  d = (v - k^T S) * beta;  S = S + k d^T;  o = scale * q^T S

`chunked` takes any number of tokens, `recurrent` 1 to 8. Implementations are listed in the tables
CHUNKED and RECURRENT; where each format applies is in `DeltaRuleFormats`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import implementations, tiling
from pallas_kernels.delta_rule import mosaic, reference, tiles, xla
from pallas_kernels.delta_rule.formats import DeltaRuleFormats

__all__ = [
    "CHUNKED",
    "MAX_STEPS",
    "RECURRENT",
    "DeltaRuleFormats",
    "chunked",
    "chunked_mosaic_tpu",
    "chunked_mosaic_tpu_interpret",
    "describe",
    "recurrent",
    "recurrent_mosaic_tpu",
    "recurrent_mosaic_tpu_interpret",
]

MAX_STEPS = 8

_Results = tuple[jax.Array, jax.Array]

# "recurrence" is the truth, token by token; it refuses the formats only chunks have.
CHUNKED: dict[str, Callable[..., _Results]] = {
    "recurrence": reference.recurrence,
    "reference": reference.chunked,
    "xla": xla.chunked,
    "mosaic_tpu": mosaic.tpu("chunked"),
    "mosaic_tpu_interpret": mosaic.tpu_interpret("chunked"),
    "mosaic_gpu": mosaic.gpu("chunked"),
    "mosaic_gpu_interpret": mosaic.gpu_interpret("chunked"),
}
RECURRENT: dict[str, Callable[..., _Results]] = {
    "reference": reference.recurrent,
    "xla": xla.recurrent,
    "mosaic_tpu": mosaic.tpu("recurrent"),
    "mosaic_tpu_interpret": mosaic.tpu_interpret("recurrent"),
    "mosaic_gpu": mosaic.gpu("recurrent"),
    "mosaic_gpu_interpret": mosaic.gpu_interpret("recurrent"),
}
_DTYPES = ("float64", "float32", "bfloat16", "float16")


def chunked(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    initial_state: jax.Array | None = None,
    *,
    lengths: jax.Array | None = None,
    scale: float | None = None,
    formats: DeltaRuleFormats = DeltaRuleFormats(),  # noqa: B008 - frozen
    implementation: str | tuple[str, ...] | None = None,
) -> _Results:
    """Outputs o [B, T, Hv, V] and the state after the last token [B, Hv, K, V], both float32.

    q, k [B, T, Hk, K], already l2-normalised; v [B, T, Hv, V]; g, the log decay (<= 0),
    [B, T, Hv] or per key channel [B, T, Hv, K]; beta [B, T, Hv]; float32, bfloat16 or float16,
    computed in float32 (float64 with the references). Value head h uses key head
    h // (Hv // Hk). initial_state [B, Hv, K, V], zeros if None. lengths int32 [B]: tokens of each
    row that are real; the others may hold anything, NaN included, change no state and give 0.
    scale multiplies o and defaults to K**-0.5.

    ValueError for shapes, dtypes or scales that do not fit; for `implementation` see
    `pallas_kernels.implementations`.
    """
    scale = _check("chunked", q, k, v, g, beta, initial_state, lengths, scale, formats)
    if initial_state is None:
        shape = (q.shape[0], v.shape[2], q.shape[3], v.shape[3])
        initial_state = jnp.zeros(shape, jnp.float64 if q.dtype == jnp.float64 else jnp.float32)
    return implementations.run_first(
        "delta_rule.chunked", CHUNKED, implementation, q, k, v, g, beta, initial_state,
        lengths=lengths, scale=scale, formats=formats,
    )  # fmt: skip


def recurrent(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    *,
    lengths: jax.Array | None = None,
    scale: float | None = None,
    formats: DeltaRuleFormats = DeltaRuleFormats(),  # noqa: B008 - frozen
    implementation: str | tuple[str, ...] | None = None,
) -> _Results:
    """`chunked` for 1 to 8 tokens, one step after the other, from `state` [B, Hv, K, V].

    `formats.state` rounds the state after every step; g, exp_g and beta apply as well, the
    other formats belong to chunks. The state of a row is left as it is past its length.
    """
    scale = _check("recurrent", q, k, v, g, beta, state, lengths, scale, formats)
    if q.shape[1] > MAX_STEPS:
        raise ValueError(
            f"delta_rule.recurrent: q has T={q.shape[1]} tokens; allowed are 1 to {MAX_STEPS}"
            " (use chunked for more)."
        )
    return implementations.run_first(
        "delta_rule.recurrent", RECURRENT, implementation, q, k, v, g, beta, state,
        lengths=lengths, scale=scale, formats=formats,
    )  # fmt: skip


def describe(
    op: str,
    q: jax.Array | jax.ShapeDtypeStruct,
    k: jax.Array | jax.ShapeDtypeStruct,
    v: jax.Array | jax.ShapeDtypeStruct,
    g: jax.Array | jax.ShapeDtypeStruct,
    beta: jax.Array | jax.ShapeDtypeStruct,
    *,
    formats: DeltaRuleFormats = DeltaRuleFormats(),  # noqa: B008 - frozen
    implementation: str | tuple[str, ...] | None = None,
) -> dict[str, Any]:
    """What `op` ("chunked" or "recurrent") runs for arrays of these shapes, computing nothing:

    {"implementation": name, "tiles": {"heads": .., "tokens": ..} or None}. Raises as the op does.
    """
    state = jax.ShapeDtypeStruct((q.shape[0], v.shape[2], q.shape[3], v.shape[3]), jnp.float32)
    scale = _check(op, q, k, v, g, beta, state, None, None, formats)
    if op == "chunked":
        table, choose = CHUNKED, lambda: tiles.choose_chunked(q, v, formats.chunk)
    else:
        table, choose = RECURRENT, lambda: tiles.choose_recurrent(q, v)
    choosers = {"mosaic_tpu": choose, "mosaic_tpu_interpret": choose}
    return tiling.describe(
        f"delta_rule.{op}", table, choosers, implementation, q, k, v, g, beta, state,
        lengths=None, scale=scale, formats=formats,
    )  # fmt: skip


def chunked_mosaic_tpu(*args: Any, **kwargs: Any) -> _Results:
    """`chunked` by the TPU kernel: a plug-in's name for `implementation="mosaic_tpu"`."""
    return chunked(*args, implementation="mosaic_tpu", **kwargs)


def chunked_mosaic_tpu_interpret(*args: Any, **kwargs: Any) -> _Results:
    """`chunked` by the same kernel in the plain Pallas interpreter, on any machine."""
    return chunked(*args, implementation="mosaic_tpu_interpret", **kwargs)


def recurrent_mosaic_tpu(*args: Any, **kwargs: Any) -> _Results:
    """`recurrent` by the TPU kernel."""
    return recurrent(*args, implementation="mosaic_tpu", **kwargs)


def recurrent_mosaic_tpu_interpret(*args: Any, **kwargs: Any) -> _Results:
    """`recurrent` by the same kernel in the plain Pallas interpreter, on any machine."""
    return recurrent(*args, implementation="mosaic_tpu_interpret", **kwargs)


def _check(op, q, k, v, g, beta, state, lengths, scale, formats) -> float:
    """The scale of the outputs; ValueError naming the first argument that does not fit."""
    op = f"delta_rule.{op}"
    arrays = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "state": state}
    for name, array in arrays.items():
        if array is not None and jnp.result_type(array).name not in _DTYPES:
            raise ValueError(f"{op}: {name} has dtype {array.dtype}; allowed: {_DTYPES}.")
    for name in ("q", "v"):
        if arrays[name].ndim != 4 or 0 in arrays[name].shape:
            raise ValueError(
                f"{op}: {name} has shape {arrays[name].shape}; expected 4 axes, none empty:"
                " [B, T, heads, width]."
            )
    batch, length, key_heads, key_dim = q.shape
    value_heads, value_dim = v.shape[2:]
    if value_heads % key_heads:
        raise ValueError(
            f"{op}: v has Hv={value_heads} heads and q has Hk={key_heads}; Hv must be a multiple"
            " of Hk."
        )
    per_token = (batch, length, value_heads)
    expected = {
        "k": (q.shape,),
        "v": ((*per_token, value_dim),),
        "g": (per_token, (*per_token, key_dim)),
        "beta": (per_token,),
        "state": ((batch, value_heads, key_dim, value_dim),),
    }
    for name, shapes in expected.items():
        if arrays[name] is not None and arrays[name].shape not in shapes:
            raise ValueError(
                f"{op}: {name} has shape {arrays[name].shape}; expected"
                f" {' or '.join(map(str, shapes))}, to match q {q.shape} and v {v.shape}."
            )
    if lengths is not None and (
        jnp.shape(lengths) != (batch,) or jnp.result_type(lengths) != jnp.int32
    ):
        raise ValueError(
            f"{op}: lengths has shape {jnp.shape(lengths)} and dtype {jnp.result_type(lengths)};"
            f" expected int32 [B={batch}]."
        )
    scale = key_dim**-0.5 if scale is None else scale
    if not isinstance(scale, int | float) or not 0 < scale < math.inf:
        raise ValueError(f"{op}: scale={scale!r} must be one finite positive number.")
    if not isinstance(formats, DeltaRuleFormats):
        raise ValueError(f"{op}: formats={formats!r} must be a DeltaRuleFormats.")
    return float(scale)

"""Causal grouped-query attention over a key/value cache, with a rounding format at every step.

`prefill` takes any number of query tokens, `decode` 1 to 8 of them; both read a cache of capacity
S of which only the first `kv_length[b]` slots count: the rest may hold anything, NaN included.
Implementations are listed in the tables PREFILL and DECODE; the equations are in
`AttentionFormats`.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels import implementations
from pallas_kernels.attention import reference, xla
from pallas_kernels.attention.formats import AttentionFormats

__all__ = ["DECODE", "MAX_DECODE_TOKENS", "PREFILL", "AttentionFormats", "decode", "prefill"]

MAX_DECODE_TOKENS = 8

PREFILL: dict[str, Callable[..., jax.Array]] = {
    "reference": reference.attention,
    "xla": xla.attention,
}
DECODE: dict[str, Callable[..., jax.Array]] = {
    "reference": reference.attention,
    "xla": xla.attention,
}
_STORED = ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn")


def prefill(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    q_offset: jax.Array,
    kv_length: jax.Array,
    scale: float | None = None,
    k_scale: float | jax.Array = 1.0,
    v_scale: float | jax.Array = 1.0,
    formats: AttentionFormats = AttentionFormats(),  # noqa: B008 - frozen
    implementation: str | tuple[str, ...] | None = None,
) -> jax.Array:
    """Attention outputs [B, T, N, Hv], float32, of the T queries that start at `q_offset`.

    q [B, T, N, H], k [B, S, G, H], v [B, S, G, Hv], float32, bfloat16, float16 or float8_e4m3fn;
    query head n reads key head n // (N // G). q_offset, kv_length: int32 [B]; query t sees keys
    j <= q_offset + t with j < kv_length, and a query that sees none returns 0. The value of a
    stored key is k * k_scale (v alike). scale defaults to H**-0.5. float64 in, float64 out.

    ValueError for shapes, dtypes or scales that do not fit; for `implementation` see
    `pallas_kernels.implementations`.
    """
    scale = _check("prefill", q, k, v, q_offset, kv_length, scale, k_scale, v_scale, formats)
    return implementations.run_first(
        "attention.prefill", PREFILL, implementation, q, k, v, q_offset=q_offset,
        kv_length=kv_length, scale=scale, k_scale=k_scale, v_scale=v_scale, formats=formats,
    )  # fmt: skip


def decode(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    q_offset: jax.Array,
    kv_length: jax.Array,
    scale: float | None = None,
    k_scale: float | jax.Array = 1.0,
    v_scale: float | jax.Array = 1.0,
    formats: AttentionFormats = AttentionFormats(),  # noqa: B008 - frozen
    implementation: str | tuple[str, ...] | None = None,
) -> jax.Array:
    """`prefill` for 1 to 8 query tokens: bound by reading the cache, not by arithmetic."""
    scale = _check("decode", q, k, v, q_offset, kv_length, scale, k_scale, v_scale, formats)
    if not 1 <= q.shape[1] <= MAX_DECODE_TOKENS:
        raise ValueError(
            f"attention.decode: q has T={q.shape[1]} tokens; allowed are 1 to"
            f" {MAX_DECODE_TOKENS} (use prefill for more)."
        )
    return implementations.run_first(
        "attention.decode", DECODE, implementation, q, k, v, q_offset=q_offset,
        kv_length=kv_length, scale=scale, k_scale=k_scale, v_scale=v_scale, formats=formats,
    )  # fmt: skip


def _check(
    op: str,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_offset: jax.Array,
    kv_length: jax.Array,
    scale: float | jax.Array | None,
    k_scale: float | jax.Array,
    v_scale: float | jax.Array,
    formats: AttentionFormats,
) -> float | jax.Array:
    """The softmax scale; ValueError naming the first argument that does not fit."""
    op = f"attention.{op}"
    for name, array in (("q", q), ("k", k), ("v", v)):
        if array.ndim != 4:
            raise ValueError(f"{op}: {name} has shape {array.shape}; expected 4 axes.")
        if array.dtype.name not in _STORED:
            raise ValueError(f"{op}: {name} has dtype {array.dtype}; allowed: {_STORED}.")
    batch, tokens, heads, width = q.shape
    if tokens < 1:
        raise ValueError(f"{op}: q has T={tokens} tokens; at least 1 is needed.")
    capacity, groups = k.shape[1:3]
    if k.shape != (batch, capacity, groups, width) or capacity < 1:
        raise ValueError(
            f"{op}: k has shape {k.shape}; expected [B={batch}, S>=1, G, H={width}] to match q"
            f" {q.shape}."
        )
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"{op}: v has shape {v.shape}; expected [B, S, G, Hv] with the first three axes"
            f" {k.shape[:3]} of k."
        )
    if groups < 1 or heads % groups:
        raise ValueError(
            f"{op}: q has N={heads} heads and k has G={groups}; N must be a multiple of G."
        )
    for name, array in (("q_offset", q_offset), ("kv_length", kv_length)):
        if jnp.shape(array) != (batch,) or jnp.result_type(array) != jnp.int32:
            raise ValueError(
                f"{op}: {name} has shape {jnp.shape(array)} and dtype {jnp.result_type(array)};"
                f" expected int32 [B={batch}]."
            )
    scale = width**-0.5 if scale is None else scale
    for name, value in (("scale", scale), ("k_scale", k_scale), ("v_scale", v_scale)):
        if isinstance(value, jax.core.Tracer):
            continue
        if jnp.shape(value) != () or not 0 < float(value) < float("inf"):
            raise ValueError(f"{op}: {name}={value!r} must be one finite positive number.")
    if not isinstance(formats, AttentionFormats):
        raise ValueError(f"{op}: formats={formats!r} must be an AttentionFormats.")
    return scale

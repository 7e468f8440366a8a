"""Causal grouped-query attention over a key/value cache, with a rounding format at every step.

`prefill` takes any number of query tokens, `decode` 1 to 8 of them; both read a cache of capacity
S of which only the first `kv_length[b]` slots count: the rest may hold anything, NaN included.
Implementations are listed in the tables PREFILL and DECODE; the equations are in
`AttentionFormats`. `mosaic_tpu` runs on TPU, `mosaic_tpu_interpret` is the same kernel in the
Pallas interpreter, anywhere; `mosaic_gpu` runs on Hopper and Blackwell.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import implementations, tiling
from pallas_kernels.attention import mosaic_tpu, reference, xla
from pallas_kernels.attention.formats import AttentionFormats
from pallas_kernels.attention.mosaic_tpu import mosaic_tpu_interpret
from pallas_kernels.attention.tiles import GPU_ROWS, Tiles, choose, choose_gpu, choose_tpu

__all__ = [
    "DECODE",
    "MAX_DECODE_TOKENS",
    "PREFILL",
    "AttentionFormats",
    "Tiles",
    "decode",
    "describe",
    "mosaic_tpu_interpret",
    "prefill",
]

MAX_DECODE_TOKENS = 8


# Outputs, or outputs and the logarithms of their softmax's sums.
Result = jax.Array | tuple[jax.Array, jax.Array]


def _one_layer(attention: Callable[..., Result]) -> Callable[..., Result]:
    """An implementation for k [B, S, G, H] as one that also takes a stack and a `layer` of it."""

    @functools.wraps(attention)
    def of_stack(
        q: jax.Array, k: jax.Array, v: jax.Array, *, layer: jax.Array | None, **rest: Any
    ) -> Result:
        if layer is not None:
            k, v = (jax.lax.dynamic_index_in_dim(x, layer, keepdims=False) for x in (k, v))
        return attention(q, k, v, **rest)

    return of_stack


def _mosaic_gpu(q: jax.Array, k: jax.Array, v: jax.Array, **rest: Any) -> Result:
    """`mosaic_gpu.attention`; NotImplementedError where the process has no Hopper or Blackwell."""
    device, capability = jax.devices()[0], _compute_capability()
    if capability not in GPU_ROWS:
        raise NotImplementedError(
            "mosaic_gpu attention runs on NVIDIA GPUs of compute capability 9.0 (sm_90a) and 10.0"
            f" (sm_100a); this is {device.platform!r} {device.device_kind!r} {capability}".rstrip()
            + "."
        )
    from pallas_kernels.attention import mosaic_gpu

    return mosaic_gpu.attention(q, k, v, capability=capability, **rest)


def _compute_capability() -> str:
    """Of this process's NVIDIA GPU; "" if it has none."""
    device = jax.devices()[0]
    return getattr(device, "compute_capability", "") if device.platform == "gpu" else ""


PREFILL: dict[str, Callable[..., Result]] = {
    "reference": _one_layer(reference.attention),
    "xla": xla.attention,
    "mosaic_tpu": _one_layer(mosaic_tpu.mosaic_tpu),
    "mosaic_tpu_interpret": _one_layer(mosaic_tpu_interpret),
    "mosaic_gpu": _one_layer(_mosaic_gpu),
}
# A decode step is a prefill of few tokens: the tiles differ, not the functions.
DECODE: dict[str, Callable[..., Result]] = dict(PREFILL)
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
    layer: jax.Array | None = None,
    formats: AttentionFormats = AttentionFormats(),  # noqa: B008 - frozen
    implementation: str | tuple[str, ...] | None = None,
    return_lse: bool = False,
) -> Result:
    """Attention outputs [B, T, N, Hv], float32, of the T queries that start at `q_offset`.

    q [B, T, N, H], k [B, S, G, H], v [B, S, G, Hv], float32, bfloat16, float16 or float8_e4m3fn;
    query head n reads key head n // (N // G). q_offset, kv_length: int32 [B]; query t sees keys
    j <= q_offset + t with j < kv_length, and a query that sees none returns 0. The value of a
    stored key is k * k_scale (v alike). scale defaults to H**-0.5. float64 in, float64 out.

    With `layer`, an int32 scalar, k and v are the caches of several layers [L, B, S, G, H] and
    that one is read: a loop over layers need not copy it out first.

    With `return_lse`, (outputs, lse float32 [B, T, N]): lse is log(sum exp(score)) over the keys
    that a query sees, as the formats have it (m + log l), and -inf where it sees none. So keys may
    lie in parts, each with its own call, q_offset and kv_length less the number of keys before
    (q_offset may be negative): the outputs' means, weighted by exp(lse), are those of all keys.

    ValueError for shapes, dtypes or scales that do not fit; for `implementation` see
    `pallas_kernels.implementations`.
    """
    scale = _check("prefill", q, k, v, q_offset, kv_length, scale, k_scale, v_scale, layer, formats)
    return implementations.run_first(
        "attention.prefill", PREFILL, implementation, q, k, v, q_offset=q_offset,
        kv_length=kv_length, scale=scale, k_scale=k_scale, v_scale=v_scale, layer=layer,
        formats=formats, return_lse=return_lse,
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
    layer: jax.Array | None = None,
    formats: AttentionFormats = AttentionFormats(),  # noqa: B008 - frozen
    implementation: str | tuple[str, ...] | None = None,
    return_lse: bool = False,
) -> Result:
    """`prefill` for 1 to 8 query tokens: bound by reading the cache, not by arithmetic."""
    scale = _check("decode", q, k, v, q_offset, kv_length, scale, k_scale, v_scale, layer, formats)
    if not 1 <= q.shape[1] <= MAX_DECODE_TOKENS:
        raise ValueError(
            f"attention.decode: q has T={q.shape[1]} tokens; allowed are 1 to"
            f" {MAX_DECODE_TOKENS} (use prefill for more)."
        )
    return implementations.run_first(
        "attention.decode", DECODE, implementation, q, k, v, q_offset=q_offset,
        kv_length=kv_length, scale=scale, k_scale=k_scale, v_scale=v_scale, layer=layer,
        formats=formats, return_lse=return_lse,
    )  # fmt: skip


def describe(
    op: str,
    q: jax.Array | jax.ShapeDtypeStruct,
    k: jax.Array | jax.ShapeDtypeStruct,
    v: jax.Array | jax.ShapeDtypeStruct,
    *,
    formats: AttentionFormats = AttentionFormats(),  # noqa: B008 - frozen
    implementation: str | tuple[str, ...] | None = None,
) -> dict[str, Any]:
    """What `op` ("prefill" or "decode") runs for arrays of these shapes, computing nothing:

    {"implementation": name, "tiles": {...} or None}. Raises as the op itself would.
    """
    table = {"prefill": PREFILL, "decode": DECODE}[op]
    lengths = jax.ShapeDtypeStruct((q.shape[0],), jnp.int32)
    scale = _check(op, q, k, v, lengths, lengths, None, 1.0, 1.0, None, formats)
    choosers = {
        "mosaic_tpu": lambda: choose_tpu(q, k, formats),
        "mosaic_tpu_interpret": lambda: choose(q, k, formats),
        "mosaic_gpu": lambda: choose_gpu(q, k, v, formats, _compute_capability()),
    }
    return tiling.describe(
        f"attention.{op}", table, choosers, implementation, q, k, v, q_offset=lengths,
        kv_length=lengths, scale=scale, layer=None, formats=formats, return_lse=False,
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
    layer: jax.Array | None,
    formats: AttentionFormats,
) -> float | jax.Array:
    """The softmax scale; ValueError naming the first argument that does not fit."""
    op = f"attention.{op}"
    if layer is not None:
        if jnp.shape(layer) != () or jnp.result_type(layer) != jnp.int32:
            raise ValueError(
                f"{op}: layer has shape {jnp.shape(layer)} and dtype {jnp.result_type(layer)};"
                " expected an int32 scalar."
            )
        for name, array in (("k", k), ("v", v)):
            if array.ndim != 5:
                raise ValueError(
                    f"{op}: {name} has shape {array.shape}; with `layer`, 5 axes are expected."
                )
        k, v = (jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in (k, v))
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

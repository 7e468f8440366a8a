"""Attention as plain as it can be written: the truth every other implementation must meet.

Dense softmax where the result does not depend on how the keys are tiled; the tiled online softmax,
one tile after another, where it does (rounded P, m, l or accumulator, lazy rescale). It works in
the dtype of q (float64 under jax_enable_x64: then only the named sites round), is differentiable,
and materialises [B, G, N // G, T, S] scores: for tests, small models and training at short
lengths.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from pallas_kernels.attention.formats import AttentionFormats
from pallas_kernels.formats import Format, round_to


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    q_offset: jax.Array,
    kv_length: jax.Array,
    scale: float,
    k_scale: float | jax.Array = 1.0,
    v_scale: float | jax.Array = 1.0,
    formats: AttentionFormats = AttentionFormats(),  # noqa: B008 - frozen
    return_lse: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention outputs [B, T, N, Hv]; arguments as `pallas_kernels.attention.prefill`."""
    dtype = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    precision = jax.lax.Precision.HIGHEST if formats.dot == "highest" else None
    batch, tokens, heads, width = q.shape
    capacity, groups = k.shape[1:3]
    key = jnp.arange(capacity, dtype=jnp.int32)
    valid = key[None, :] < kv_length[:, None]  # [B, S]
    # 0 * NaN is NaN: unused slots are cleared, not only masked in the scores.
    k = jnp.where(valid[:, :, None, None], k.astype(dtype), 0) * jnp.asarray(k_scale, dtype)
    v = jnp.where(valid[:, :, None, None], v.astype(dtype), 0) * jnp.asarray(v_scale, dtype)
    q, k, v = _round(q.astype(dtype), formats.q), _round(k, formats.k), _round(v, formats.v)
    q = q.reshape(batch, tokens, groups, heads // groups, width)

    scores = jnp.einsum("btgrh,bsgh->bgrts", q, k, precision=precision)
    scores = _round(scores * jnp.asarray(scale, dtype), formats.scores)
    position = q_offset[:, None] + jnp.arange(tokens, dtype=jnp.int32)[None, :]  # [B, T]
    visible = (key[None, None, :] <= position[:, :, None]) & valid[:, None, :]  # [B, T, S]
    scores = jnp.where(visible[:, None, None], scores, -jnp.inf)
    if formats.is_tile_independent:
        out, lse = _softmax(scores, v, precision)
    else:
        out, lse = _online_softmax(scores, v, precision, formats)
    out, lse = (
        x.transpose(0, 3, 1, 2, 4).reshape(batch, tokens, heads, x.shape[-1]) for x in (out, lse)
    )
    return (out, lse[..., 0]) if return_lse else out


def _softmax(
    scores: jax.Array, v: jax.Array, precision: jax.lax.Precision | None
) -> tuple[jax.Array, jax.Array]:
    """scores [B, G, R, T, S], v [B, S, G, Hv] -> [B, G, R, T, Hv], lse [B, G, R, T, 1].

    Rows of -inf give 0 and -inf.
    """
    m = jax.lax.stop_gradient(_finite(jnp.max(scores, axis=-1, keepdims=True)))
    p = jnp.exp(scores - m)
    out = jnp.einsum("bgrts,bsgh->bgrth", p, v, precision=precision)
    total = jnp.sum(p, axis=-1, keepdims=True)
    return _divide(out, total), m + jnp.log(total)


def _online_softmax(
    scores: jax.Array, v: jax.Array, precision: jax.lax.Precision | None, formats: AttentionFormats
) -> tuple[jax.Array, jax.Array]:
    """The same through tiles of block_k keys, rounding as `AttentionFormats` says."""
    *rows, capacity = scores.shape
    m = jnp.full((*rows, 1), -jnp.inf, scores.dtype)
    total = jnp.zeros((*rows, 1), scores.dtype)
    acc = jnp.zeros((*rows, v.shape[-1]), scores.dtype)
    for start in range(0, capacity, formats.block_k):
        s = scores[..., start : start + formats.block_k]
        v_tile = v[:, start : start + formats.block_k]
        m_new = _round(jnp.maximum(m, jnp.max(s, axis=-1, keepdims=True)), formats.m)
        # Lazy rescale: a small rise of the maximum is ignored, P grows beyond 1 instead.
        rise = (_finite(m_new) - m) * math.log2(math.e)
        m_new = jnp.where(rise > formats.rescale_threshold, m_new, m)
        p = jnp.exp(s - _finite(m_new))
        alpha = jnp.exp(m - _finite(m_new))
        p_rounded = _round(p, formats.p)
        summed = p_rounded if formats.row_sum == "rounded" else p
        pv = jnp.einsum("bgrts,bsgh->bgrth", p_rounded, v_tile, precision=precision)
        total = _round(total * alpha + jnp.sum(summed, axis=-1, keepdims=True), formats.l)
        acc = _round(acc * alpha + pv, formats.acc)
        m = m_new
    return _divide(acc, total), m + jnp.log(total)


def _round(x: jax.Array, fmt: Format) -> jax.Array:
    """x on the format's grid, in x's own dtype (`round_to` would take float64 to float32)."""
    return x if fmt.is_exact else round_to(x, fmt).astype(x.dtype)


def _finite(m: jax.Array) -> jax.Array:
    """m, with 0 for the rows that have seen no key: -inf - -inf is NaN."""
    return jnp.where(m == -jnp.inf, 0, m)


def _divide(acc: jax.Array, total: jax.Array) -> jax.Array:
    """acc / total; a row without keys has total 0 and gives 0."""
    return acc / jnp.where(total == 0, 1, total)

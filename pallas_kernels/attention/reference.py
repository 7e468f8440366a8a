"""Dense attention, as plain as it can be written: the truth every other implementation meets.

It works in the dtype of q (float64 under jax_enable_x64), is differentiable, and materialises
[B, G, N/G, T, S] scores: for tests, training at short lengths and small models.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.attention.formats import AttentionFormats


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
) -> jax.Array:
    """Attention outputs [B, T, N, Hv]; arguments as `pallas_kernels.attention.prefill`."""
    dtype = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    precision = jax.lax.Precision.HIGHEST if formats.dot == "highest" else None
    batch, tokens, heads, width = q.shape
    capacity, groups = k.shape[1:3]
    valid = jnp.arange(capacity)[None, :] < kv_length[:, None]  # [B, S]
    # 0 * NaN is NaN: unused slots are cleared, not only masked in the scores.
    k = jnp.where(valid[:, :, None, None], k.astype(dtype) * k_scale, 0)
    v = jnp.where(valid[:, :, None, None], v.astype(dtype) * v_scale, 0)
    q = q.astype(dtype).reshape(batch, tokens, groups, heads // groups, width)
    scores = jnp.einsum("btgrh,bsgh->bgrts", q, k, precision=precision) * scale
    position = q_offset[:, None] + jnp.arange(tokens)  # [B, T]
    visible = (jnp.arange(capacity) <= position[:, :, None]) & valid[:, None, :]  # [B, T, S]
    visible = visible[:, None, None]
    scores = jnp.where(visible, scores, -jnp.inf)
    m = jnp.max(scores, axis=-1, keepdims=True)
    m = jax.lax.stop_gradient(jnp.where(m == -jnp.inf, 0, m))
    p = jnp.exp(scores - m)
    total = jnp.sum(p, axis=-1, keepdims=True)
    p = p / jnp.where(total == 0, 1, total)
    out = jnp.einsum("bgrts,bsgh->btgrh", p, v, precision=precision)
    return out.reshape(batch, tokens, heads, v.shape[-1])

"""Blockwise attention in plain XLA: O(context) memory, tiles above the diagonal skipped."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.attention.formats import AttentionFormats

_BLOCK_Q = 256


def prefill(
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
    batch, tokens, heads, _ = q.shape
    outputs = []
    for start in range(0, tokens, _BLOCK_Q):
        tile = q[:, start : start + _BLOCK_Q]
        outputs.append(
            _query_tile(tile, k, v, q_offset + start, kv_length, scale, k_scale, v_scale, formats)
        )
    return jnp.concatenate(outputs, axis=1) if len(outputs) > 1 else outputs[0]


decode = prefill


def _query_tile(q, k, v, q_offset, kv_length, scale, k_scale, v_scale, formats):
    """[B, Tq, N, Hv] for one tile of queries: the online softmax over tiles of keys."""
    batch, tokens, heads, width = q.shape
    capacity, groups = k.shape[1:3]
    rows = heads // groups * tokens
    block = min(formats.block_k, capacity)
    precision = jax.lax.Precision.HIGHEST if formats.dot == "highest" else None
    q = q.astype(jnp.float32).reshape(batch, tokens, groups, heads // groups, width)
    q = q.transpose(0, 2, 3, 1, 4).reshape(batch, groups, rows, width)
    position = q_offset[:, None] + jnp.arange(tokens)  # [B, Tq]
    position = jnp.tile(position, (1, heads // groups))[:, None, :, None]  # [B, 1, R, 1]

    def update(i, carry, *, masked):
        m, total, acc = carry
        start = jnp.minimum(i * block, capacity - block)
        k_tile = jax.lax.dynamic_slice_in_dim(k, start, block, 1).astype(jnp.float32) * k_scale
        v_tile = jax.lax.dynamic_slice_in_dim(v, start, block, 1).astype(jnp.float32) * v_scale
        if masked:
            key = start + jnp.arange(block)
            valid = (key[None] < kv_length[:, None])[:, :, None, None]
            k_tile = jnp.where(valid, k_tile, 0)
            v_tile = jnp.where(valid, v_tile, 0)
        s = jnp.einsum("bgrh,bsgh->bgrs", q, k_tile, precision=precision) * scale
        if masked:
            # The last tile may start early (it cannot reach past S): its first keys are done.
            visible = (key <= position) & (key < kv_length[:, None, None, None])
            visible &= key >= i * block
            s = jnp.where(visible, s, -jnp.inf)
        m_new = jnp.maximum(m, jnp.max(s, axis=-1, keepdims=True))
        safe = jnp.where(m_new == -jnp.inf, 0, m_new)
        p = jnp.exp(s - safe)
        alpha = jnp.exp(m - safe)
        total = total * alpha + jnp.sum(p, axis=-1, keepdims=True)
        acc = acc * alpha + jnp.einsum("bgrs,bsgh->bgrh", p, v_tile, precision=precision)
        return m_new, total, acc

    # Every query of the tile sees every key below `full`; no query sees a key at `end` or above.
    full = jnp.min(jnp.minimum(q_offset + 1, kv_length)) // block
    end = jnp.clip(jnp.max(jnp.minimum(q_offset + tokens, kv_length)), 0, capacity)
    end = (end + block - 1) // block
    full = jnp.clip(full, 0, capacity // block)
    carry = (
        jnp.full((batch, groups, rows, 1), -jnp.inf, jnp.float32),
        jnp.zeros((batch, groups, rows, 1), jnp.float32),
        jnp.zeros((batch, groups, rows, v.shape[-1]), jnp.float32),
    )
    carry = jax.lax.fori_loop(0, full, lambda i, c: update(i, c, masked=False), carry)
    _, total, acc = jax.lax.fori_loop(full, end, lambda i, c: update(i, c, masked=True), carry)
    out = acc / jnp.where(total == 0, 1, total)
    out = out.reshape(batch, groups, heads // groups, tokens, -1).transpose(0, 3, 1, 2, 4)
    return out.reshape(batch, tokens, heads, -1)

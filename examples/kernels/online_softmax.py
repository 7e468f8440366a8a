"""Two attention kernels to plug in: one that is right, and one that forgets a line.

    python -m kernjax.check --kernel attention.prefill=examples.kernels.online_softmax:attention
    python -m kernjax.check \\
        --kernel attention.prefill=examples.kernels.online_softmax:attention_without_rescale

Run from the repository's root. Both visit the keys in tiles of 128 and keep, per query, the
running maximum m, the sum l and the output acc; when a tile raises m, everything summed so far
has to shrink by exp(m - m'). The second function shrinks l and leaves acc. On short or flat inputs
the maximum hardly moves after the first tile and nobody notices. docs/own_kernel.md explains the
signature.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.formats import round_to

TILE = 128
_LOWEST = -1e30  # below every score, and finite: exp(_LOWEST - m) is 0, never NaN


def attention(
    q: jax.Array,  # [B, T, N, H]
    k: jax.Array,  # [B, S, G, H]; slots from kv_length on may hold NaN
    v: jax.Array,  # [B, S, G, Hv]
    *,
    q_offset: jax.Array,  # int32 [B], position of q[:, 0]
    kv_length: jax.Array,  # int32 [B], keys that count
    scale: float | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    formats: Any,
) -> jax.Array:  # float32 [B, T, N, Hv]
    """Causal attention by online softmax; rounds P as the policy says, and nothing else."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q = q.astype(jnp.float32) * (scale * k_scale)
    return v_scale * _attend(q, k, v, q_offset, kv_length, formats, rescale=True)


def attention_without_rescale(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    q_offset: jax.Array,
    kv_length: jax.Array,
    scale: float | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    formats: Any,
) -> jax.Array:
    """`attention` with the bug: acc keeps its size when the running maximum grows."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q = q.astype(jnp.float32) * (scale * k_scale)
    return v_scale * _attend(q, k, v, q_offset, kv_length, formats, rescale=False)


def _attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_offset: jax.Array,
    kv_length: jax.Array,
    formats: Any,
    *,
    rescale: bool,
) -> jax.Array:
    batch, time, heads, width = q.shape
    capacity, groups = k.shape[1:3]
    tile = min(TILE, capacity)
    # Query head n reads key head n // (N // G).
    q = q.reshape(batch, time, groups, heads // groups, width)
    position = q_offset[:, None] + jnp.arange(time, dtype=jnp.int32)
    last_key = jnp.minimum(position, kv_length[:, None] - 1)  # [B, T]

    def visit(index: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        m, l, acc = carry  # [B, T, G, N/G], alike, [..., Hv]  # noqa: E741
        # The last tile is moved back to fit; keys it shares with the one before are hidden.
        start = jnp.minimum(index * tile, capacity - tile)
        number = start + jnp.arange(tile, dtype=jnp.int32)
        keys = jax.lax.dynamic_slice_in_dim(k, start, tile, axis=1).astype(jnp.float32)
        values = jax.lax.dynamic_slice_in_dim(v, start, tile, axis=1).astype(jnp.float32)
        # 0 * NaN is NaN: hiding the scores is not enough where the cache holds garbage.
        filled = (number[None, :] < kv_length[:, None])[:, :, None, None]
        values = jnp.where(filled, values, 0.0)

        s = jnp.einsum("btgnh,bsgh->btgns", q, keys, precision="highest")
        visible = (number >= index * tile) & (number <= last_key[:, :, None])  # [B, T, tile]
        s = jnp.where(visible[:, :, None, None, :], s, -jnp.inf)
        grown = jnp.maximum(m, s.max(axis=-1))
        p = jnp.exp(s - grown[..., None])
        shrink = jnp.exp(m - grown)
        if rescale:
            acc = acc * shrink[..., None]
        rounded = round_to(p, formats.p)
        acc = acc + jnp.einsum("btgns,bsgv->btgnv", rounded, values, precision="highest")
        return grown, l * shrink + p.sum(axis=-1), acc

    rows = (batch, time, groups, heads // groups)
    start = (
        jnp.full(rows, _LOWEST, jnp.float32),
        jnp.zeros(rows, jnp.float32),
        jnp.zeros((*rows, v.shape[-1]), jnp.float32),
    )
    tiles = jnp.max(last_key) // tile + 1
    _, l, acc = jax.lax.fori_loop(0, tiles, visit, start)  # noqa: E741
    # A query that sees no key has l = 0, and returns 0.
    out = acc / jnp.where(l > 0, l, 1.0)[..., None]
    return out.reshape(batch, time, heads, -1)

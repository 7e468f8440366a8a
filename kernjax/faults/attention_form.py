"""Attention as an online softmax with the lines open that faults replace.

The same function as `pallas_kernels.attention`, written plainly: float32 but for P. A fault that
can be had by changing the arguments of the healthy op is written that way; what sits inside the
loop comes here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.formats import round_to

TILE = 256
_LOWEST = -1e30  # below every score, and finite: exp(_LOWEST - m) is 0, never NaN

Sees = Callable[[jax.Array, jax.Array], jax.Array]


def causal(key: jax.Array, position: jax.Array) -> jax.Array:
    """Whether the query at `position` sees `key`; both int32, broadcast against each other."""
    return key <= position


def online_softmax(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    q_offset: jax.Array,
    kv_length: jax.Array,
    scale: float | None = None,
    k_scale: float | jax.Array = 1.0,
    v_scale: float | jax.Array = 1.0,
    formats: Any,
    sees: Sees = causal,
    rescales: bool = True,
) -> jax.Array:
    """Outputs [B, T, N, Hv] float32; arguments as `pallas_kernels.attention.prefill`.

    `sees` is the mask. Without `rescales` the accumulator keeps its size when a tile raises the
    running maximum, and only the row sum shrinks.
    """
    batch, time, heads, width = q.shape
    capacity, groups = k.shape[1:3]
    tile = min(TILE, capacity)
    scale = softmax_scale(q, scale) * k_scale
    # Query head n reads key head n // (N // G).
    q = q.astype(jnp.float32).reshape(batch, time, groups, heads // groups, width) * scale
    position = (q_offset[:, None] + jnp.arange(time, dtype=jnp.int32))[:, :, None]  # [B, T, 1]

    def visit(index: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        top, total, acc = carry  # [B, T, G, N/G], alike, [..., Hv]
        # The last tile is moved back to fit; keys it shares with the one before are hidden.
        start = jnp.minimum(index * tile, capacity - tile)
        key = start + jnp.arange(tile, dtype=jnp.int32)
        filled = key < kv_length[:, None]  # [B, tile]
        keys, values = (
            # 0 * NaN is NaN: unused slots are cleared, not only masked in the scores.
            jnp.where(
                filled[:, :, None, None],
                jax.lax.dynamic_slice_in_dim(x, start, tile, axis=1).astype(jnp.float32),
                0.0,
            )
            for x in (k, v)
        )
        s = jnp.einsum("btgnh,bsgh->btgns", q, keys, precision="highest")
        seen = sees(key, position) & filled[:, None] & (key >= index * tile)  # [B, T, tile]
        s = jnp.where(seen[:, :, None, None], s, -jnp.inf)
        grown = jnp.maximum(top, s.max(axis=-1))
        p = jnp.exp(s - grown[..., None])
        shrink = jnp.exp(top - grown)
        mass = p.sum(axis=-1)
        p = round_to(p, formats.p)
        if rescales:
            acc = acc * shrink[..., None]
        acc = acc + jnp.einsum("btgns,bsgv->btgnv", p, values, precision="highest")
        return grown, total * shrink + mass, acc

    rows = (batch, time, groups, heads // groups)
    empty = (
        jnp.full(rows, _LOWEST, jnp.float32),
        jnp.zeros(rows, jnp.float32),
        jnp.zeros((*rows, v.shape[-1]), jnp.float32),
    )
    tiles = (jnp.max(kv_length) + tile - 1) // tile
    _, total, acc = jax.lax.fori_loop(0, tiles, visit, empty)
    # A query that sees no key has a sum of 0, and returns 0.
    out = acc / jnp.where(total > 0, total, 1.0)[..., None]
    return v_scale * out.reshape(batch, time, heads, -1)


def softmax_scale(q: jax.Array, scale: float | None) -> float | jax.Array:
    """The scale of the scores, H**-0.5 where the caller left it out."""
    return q.shape[-1] ** -0.5 if scale is None else scale


Angles = Callable[[jax.Array, int], tuple[jax.Array, jax.Array]]


def rotated_otherwise(
    x: jax.Array, position: jax.Array, rotary_dim: int, angles: Angles, wrong: Angles
) -> jax.Array:
    """x [B, T, heads, H], already rotated by `angles`, as if it had been rotated by `wrong`.

    position int32 [B or 1, T]. Both functions give (cos, sin) [B or 1, T, rotary_dim // 2]. The op
    only sees rotated q and k, so the right rotation is taken back first. Float32.
    """
    half = rotary_dim // 2
    first, second, rest = jnp.split(x.astype(jnp.float32), (half, rotary_dim), axis=-1)
    cos, sin = (part[:, :, None] for part in angles(position, rotary_dim))
    first, second = first * cos + second * sin, second * cos - first * sin
    cos, sin = (part[:, :, None] for part in wrong(position, rotary_dim))
    turned = (first * cos - second * sin, second * cos + first * sin, rest)
    return jnp.concatenate(turned, axis=-1)

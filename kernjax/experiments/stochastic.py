"""Attention whose P is rounded to e4m3 stochastically: an experiment's kernel, not a format.

Rounding to nearest sends every P below half of the smallest e4m3 number (2^-10) to zero, always in
the same direction. Stochastic rounding goes up with a probability equal to the fraction, so that
its expectation is the value itself: it makes noise, and no bias. What a rounding loses by its bias
shows in the difference between the two.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.attention import AttentionFormats

_MANTISSA, _LEAST_EXPONENT = 3, -6
_SEED = 0


def stochastic_e4m3(x: jax.Array, uniform: jax.Array) -> jax.Array:
    """x in [0, 448] float32 on e4m3's grid: up where the fraction of a step exceeds 1 - uniform.

    `uniform` in [0, 1). Its expectation over `uniform` is x.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    exponent = jnp.maximum((bits >> 23) - 127, _LEAST_EXPONENT)
    step = jax.lax.bitcast_convert_type((exponent - _MANTISSA + 127) << 23, jnp.float32)
    return jnp.floor(x / step + uniform) * step


def attention(q: jax.Array, k: jax.Array, v: jax.Array, **keywords: object) -> jax.Array:
    """`attention.prefill` with P in e4m3 by stochastic rounding, row sums from the unrounded P."""
    return _attention(q, k, v, rounded_sum=False, **keywords)


def attention_rounded_sum(q: jax.Array, k: jax.Array, v: jax.Array, **keywords: object):
    """The same with row sums from the rounded P."""
    return _attention(q, k, v, rounded_sum=True, **keywords)


def _attention(
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
    rounded_sum: bool,
) -> jax.Array:
    """[B, T, N, Hv] float32, shapes as the op's; of `formats` only `block_k` counts."""
    batch, tokens, heads, width = q.shape
    capacity, groups = k.shape[1:3]
    scale = width**-0.5 if scale is None else scale
    q = q.astype(jnp.float32).reshape(batch, tokens, groups, heads // groups, width)
    block = min(formats.block_k, capacity)
    position = q_offset[:, None] + jnp.arange(tokens, dtype=jnp.int32)[None, :]
    # Every layer, window and step draws numbers of its own: its operands are the seed.
    own = jax.lax.bitcast_convert_type(jnp.sum(q * q), jnp.uint32)
    seed = jax.random.fold_in(jax.random.key(_SEED), own)

    def tile(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        largest, total, summed = carry
        first = jnp.minimum(i * block, capacity - block)
        key = first + jnp.arange(block, dtype=jnp.int32)
        used = (key[None, :] < kv_length[:, None])[:, :, None, None]
        keys, values = (
            jnp.where(used, jax.lax.dynamic_slice_in_dim(x, first, block, 1), 0).astype(jnp.float32)
            for x in (k, v)
        )
        scores = _dot("btgrh,bsgh->bgrts", q, keys) * (scale * k_scale)
        visible = (key[None, None] <= position[:, :, None]) & (key >= i * block)[None, None]
        visible &= key[None, None] < kv_length[:, None, None]
        scores = jnp.where(visible[:, None, None], scores, -jnp.inf)
        raised = jnp.maximum(largest, jnp.max(scores, axis=-1, keepdims=True))
        pivot = jnp.where(raised == -jnp.inf, 0, raised)
        p, before = jnp.exp(scores - pivot), jnp.exp(largest - pivot)
        drawn = jax.random.bits(jax.random.fold_in(seed, i), p.shape, jnp.uint16)
        rounded = stochastic_e4m3(p, drawn.astype(jnp.float32) * 2.0**-16)
        mass = jnp.sum(rounded if rounded_sum else p, axis=-1, keepdims=True)
        product = _dot("bgrts,bsgh->bgrth", rounded, values) * v_scale
        return raised, total * before + mass, summed * before + product

    rows = (batch, groups, heads // groups, tokens)
    carry = (
        jnp.full((*rows, 1), -jnp.inf, jnp.float32),
        jnp.zeros((*rows, 1), jnp.float32),
        jnp.zeros((*rows, v.shape[-1]), jnp.float32),
    )
    end = jnp.minimum(jnp.max(kv_length), jnp.max(q_offset) + tokens)
    tiles = -(-jnp.minimum(end, capacity) // block)
    _, total, summed = jax.lax.fori_loop(0, tiles, tile, carry)
    out = summed / jnp.where(total == 0, 1, total)
    return jnp.moveaxis(out, 3, 1).reshape(batch, tokens, heads, v.shape[-1])


def _dot(spec: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(spec, x, y, precision=jax.lax.Precision.HIGHEST)

"""A cache whose slots lie in equal parts on the devices of a mesh axis, for contexts too long for
one.

Everything here runs inside `jax.shard_map` over that axis: `axis` is its name, part i holds the
slots from i * S on, S those of one part. Every device has all queries and attends to its own keys;
its outputs o_i come with the log-sum-exp of their scores, by which they are merged in float32:

    M = max_i lse_i        o = sum_i exp(lse_i - M) o_i / sum_i exp(lse_i - M)
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp


def write_part(
    cache: jax.Array, new: jax.Array, index: jax.Array, start: jax.Array, axis: str
) -> jax.Array:
    """This part [layers, B, S, G, H] with what of new [B, T, G, H] is its own, at [index].

    `start` int32 [] is the slot of new[:, 0] among all. The parts that own nothing of it keep what
    they have: a window of min(T, S) slots is read, and written as it should be.
    """
    slots, tokens = cache.shape[2], new.shape[1]
    width = min(tokens, slots)
    before = start - jax.lax.axis_index(axis) * slots  # of new[:, 0] in this part, maybe outside
    begin = jnp.clip(before, 0, slots - width)
    at = (index, 0, begin, 0, 0)
    old = jax.lax.dynamic_slice(cache, at, (1, cache.shape[1], width, *cache.shape[3:]))[0]
    token = begin - before + jnp.arange(width, dtype=jnp.int32)  # that belongs into each slot
    padded = jnp.pad(new, ((0, 0), (width, width), (0, 0), (0, 0)))
    own = jax.lax.dynamic_slice_in_dim(padded, begin - before + width, width, axis=1)
    is_own = ((token >= 0) & (token < tokens))[None, :, None, None]
    return jax.lax.dynamic_update_slice(cache, jnp.where(is_own, own, old)[None], at)


def attend_by_parts(
    attention: Callable[..., tuple[jax.Array, jax.Array]],
    slots: int,
    axis: str,
    q_offset: jax.Array,
    kv_length: jax.Array,
) -> jax.Array:
    """[B, T, N, Hv] float32 over the keys of all parts, each of `slots`.

    `attention(q_offset=, kv_length=)` gives (outputs, lse) over this part's keys.
    """
    first = jax.lax.axis_index(axis) * slots
    out, lse = attention(q_offset=q_offset - first, kv_length=jnp.clip(kv_length - first, 0, slots))
    top = jax.lax.pmax(lse, axis)
    # A query that sees no key anywhere has -inf everywhere.
    weight = jnp.exp(lse - jnp.where(top == -jnp.inf, 0, top))
    total = jax.lax.psum(weight, axis)[..., None]
    out = jax.lax.psum(weight[..., None] * out, axis)
    return out / jnp.where(total == 0, 1, total)

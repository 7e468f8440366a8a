"""The gated full-attention layer (transformers: `Qwen3_5Attention`).

q, k are normed per head (zero-centred RMSNorm), the first `rotary_dim` features rotated, and the
output is multiplied by sigmoid(gate) before the output projection.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from kernjax.model.cache import Cache
from kernjax.model.execution import LayerCall
from kernjax.model.layers import linear, rms_norm, rotary_angles, rotate, rounder
from kernjax.model.sequence import write_part
from pallas_kernels.formats import Format, as_bits, store


class Attention(nnx.Module):
    """Parameters of one attention mixer, or of a stack (leading axis), named as in `params.py`."""

    def __init__(self, params: Mapping[str, Any]) -> None:
        self.q = nnx.Param(params["q"])
        self.gate = nnx.Param(params["gate"])
        self.k = nnx.Param(params["k"])
        self.v = nnx.Param(params["v"])
        self.q_norm = nnx.Param(params["q_norm"])
        self.k_norm = nnx.Param(params["k_norm"])
        self.o = nnx.Param(params["o"])

    def __call__(self, x: jax.Array, cache: Cache, call: LayerCall) -> tuple[jax.Array, Cache]:
        """(mixed [B, T, D], new cache) of normed x [B, T, D].

        x's keys and values are written at `cache.length`.
        """
        index, count, plan, config, decode = call
        policy, r, eps = plan.policy, rounder(plan.policy), config.rms_norm_eps
        batch, time, _ = x.shape
        start = cache.length
        positions = start + jnp.arange(time, dtype=jnp.int32)[None, :]
        angles = rotary_angles(positions, config.rotary_dim, config.rope_theta)

        heads = (batch, time, -1, config.head_dim)
        q = rms_norm(linear(x, self.q[...], policy).reshape(heads), self.q_norm[...], eps, policy)
        k = rms_norm(linear(x, self.k[...], policy).reshape(heads), self.k_norm[...], eps, policy)
        v = linear(x, self.v[...], policy).reshape(heads)
        q, k = rotate(q, angles, policy), rotate(k, angles, policy)

        kv = policy.kv_cache
        at = (index, start, plan.sequence)
        keys = write_cache(cache.keys, stored(k, kv.k_scale, kv.k), *at)
        values = write_cache(cache.values, stored(v, kv.v_scale, kv.v), *at)
        o = plan.attend(
            "attention.decode" if decode else "attention.prefill",
            q,
            keys,
            values,
            index,
            q_offset=jnp.full((batch,), start, jnp.int32),
            kv_length=jnp.full((batch,), start + count, jnp.int32),
            formats=policy.attention,
        )
        gate = r(jax.nn.sigmoid(linear(x, self.gate[...], policy).astype(jnp.float32)))
        o = r(o).reshape(batch, time, -1) * gate
        cache = dataclasses.replace(cache, keys=keys, values=values)
        return linear(store(o, policy.activations), self.o[...], policy), cache


def stored(x: jax.Array, scale: float, fmt: Format) -> jax.Array:
    """x as it lies in the cache: divided by the cache's scale, in the format's storage dtype."""
    x = x.astype(jnp.float32)
    return store(x if scale == 1.0 else x / jnp.float32(scale), fmt)


def write_cache(
    cache: jax.Array,
    new: jax.Array,
    index: jax.Array,
    start: jax.Array,
    sequence: str | None = None,
) -> jax.Array:
    """cache [layers, B, S, G, H] with new [B, T, G, H] at [index, :, start : start + T].

    `sequence` as in `LayerPlan`: S are then the slots of this device's part.
    """
    narrow = jnp.issubdtype(cache.dtype, jnp.integer)
    new = as_bits(new) if narrow else new.astype(cache.dtype)
    if sequence is not None:
        return write_part(cache, new, index, start, sequence)
    return jax.lax.dynamic_update_slice(cache, new[None], (index, 0, start, 0, 0))

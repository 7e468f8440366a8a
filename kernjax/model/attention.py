"""The gated full-attention layer (transformers: `Qwen3_5Attention`).

q, k are normed per head (zero-centred RMSNorm), the first `rotary_dim` features rotated, and the
output is multiplied by sigmoid(gate) before the output projection.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from kernjax.model.config import ModelConfig
from kernjax.model.delta_net import MLP
from kernjax.model.execution import LayerPlan
from kernjax.model.layers import linear, rms_norm, rotary_angles, rotate, rounder
from pallas_kernels.formats import Format, as_bits, store


class AttentionLayer(nnx.Module):
    """Parameters of one attention layer, or of a stack (leading axis), named as in `params.py`."""

    def __init__(self, params: Mapping[str, Any]) -> None:
        self.input_norm = nnx.Param(params["input_norm"])
        self.post_norm = nnx.Param(params["post_norm"])
        self.mlp = MLP(params["mlp"])
        self.q = nnx.Param(params["q"])
        self.gate = nnx.Param(params["gate"])
        self.k = nnx.Param(params["k"])
        self.v = nnx.Param(params["v"])
        self.q_norm = nnx.Param(params["q_norm"])
        self.k_norm = nnx.Param(params["k_norm"])
        self.o = nnx.Param(params["o"])

    def __call__(
        self,
        x: jax.Array,
        keys: jax.Array,
        values: jax.Array,
        index: jax.Array,
        start: jax.Array,
        count: jax.Array,
        plan: LayerPlan,
        config: ModelConfig,
        decode: bool,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Mixer and MLP with their residuals.

        x [B, T, D]; keys and values [layers, B, S, G, H], of which this layer owns row `index`;
        start int32 []: tokens already cached; count int32 []: real tokens of x. Returns the new x
        and both caches with x's keys and values written at `start`.
        """
        policy, r = plan.policy, rounder(plan.policy)
        hidden = rms_norm(x, self.input_norm[...], config.rms_norm_eps, policy)
        mixed, keys, values = self.mixer(
            hidden, keys, values, index, start, count, plan, config, decode
        )
        x = r(x.astype(jnp.float32) + mixed.astype(jnp.float32))
        hidden = rms_norm(x, self.post_norm[...], config.rms_norm_eps, policy)
        return x + self.mlp(hidden, policy).astype(jnp.float32), keys, values

    def mixer(
        self,
        x: jax.Array,
        keys: jax.Array,
        values: jax.Array,
        index: jax.Array,
        start: jax.Array,
        count: jax.Array,
        plan: LayerPlan,
        config: ModelConfig,
        decode: bool,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The token mixer alone, on normed x; shapes as in `__call__`."""
        policy, r, eps = plan.policy, rounder(plan.policy), config.rms_norm_eps
        batch, time, _ = x.shape
        positions = start + jnp.arange(time, dtype=jnp.int32)[None, :]
        angles = rotary_angles(positions, config.rotary_dim, config.rope_theta)

        heads = (batch, time, -1, config.head_dim)
        q = rms_norm(linear(x, self.q[...], policy).reshape(heads), self.q_norm[...], eps, policy)
        k = rms_norm(linear(x, self.k[...], policy).reshape(heads), self.k_norm[...], eps, policy)
        v = linear(x, self.v[...], policy).reshape(heads)
        q, k = rotate(q, angles, policy), rotate(k, angles, policy)

        kv = policy.kv_cache
        keys = write_cache(keys, _stored(k, kv.k_scale, kv.k), index, start)
        values = write_cache(values, _stored(v, kv.v_scale, kv.v), index, start)
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
        return linear(store(o, policy.activations), self.o[...], policy), keys, values


def _stored(x: jax.Array, scale: float, fmt: Format) -> jax.Array:
    """x as it lies in the cache: divided by the cache's scale, in the format's storage dtype."""
    x = x.astype(jnp.float32)
    return store(x if scale == 1.0 else x / jnp.float32(scale), fmt)


def write_cache(cache: jax.Array, new: jax.Array, index: jax.Array, start: jax.Array) -> jax.Array:
    """cache [layers, B, S, G, H] with new [B, T, G, H] at [index, :, start : start + T]."""
    narrow = jnp.issubdtype(cache.dtype, jnp.integer)
    new = as_bits(new) if narrow else new.astype(cache.dtype)
    return jax.lax.dynamic_update_slice(cache, new[None], (index, 0, start, 0, 0))

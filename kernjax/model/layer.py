"""One layer: a mixer of tokens, then an MLP or a mixture of experts, with norms and residuals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from kernjax.model.attention import Attention
from kernjax.model.cache import Cache
from kernjax.model.config import LINEAR, ModelConfig
from kernjax.model.delta_net import DeltaNet
from kernjax.model.execution import LayerPlan
from kernjax.model.layers import MLP, rms_norm, rounder


class DecoderLayer(nnx.Module):
    """Parameters of one layer, or of a stack (leading axis), named as in `params.py`."""

    def __init__(self, kind: str, params: Mapping[str, Any]) -> None:
        self.input_norm = nnx.Param(params["input_norm"])
        self.post_norm = nnx.Param(params["post_norm"])
        self.mixer = DeltaNet(params) if kind == LINEAR else Attention(params)
        self.mlp = MLP(params["mlp"])

    def __call__(
        self,
        x: jax.Array,
        cache: Cache,
        index: jax.Array,
        count: jax.Array,
        plan: LayerPlan,
        config: ModelConfig,
        decode: bool,
    ) -> tuple[jax.Array, Cache]:
        """(the new x, float32 [B, T, D], not yet rounded; the new cache).

        x [B, T, D] follows `cache.length` tokens, of which `count` (int32 []) are real and the
        rest padding. `index` int32 [] is this layer's place in the cache, among those of its kind.
        """
        policy, r, eps = plan.policy, rounder(plan.policy), config.rms_norm_eps
        hidden = rms_norm(x, self.input_norm[...], eps, policy)
        mixed, cache = self.mixer(hidden, cache, index, count, plan, config, decode)
        x = r(x.astype(jnp.float32) + mixed.astype(jnp.float32))
        hidden = rms_norm(x, self.post_norm[...], eps, policy)
        return x + self.mlp(hidden, policy).astype(jnp.float32), cache

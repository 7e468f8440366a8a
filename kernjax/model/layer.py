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
from kernjax.model.moe import MoE, Routes


class DecoderLayer(nnx.Module):
    """Parameters of one layer, or of a stack (leading axis), named as in `params.py`."""

    def __init__(self, kind: str, params: Mapping[str, Any]) -> None:
        self.input_norm = nnx.Param(params["input_norm"])
        self.post_norm = nnx.Param(params["post_norm"])
        self.mixer = DeltaNet(params) if kind == LINEAR else Attention(params)
        self.mlp = MLP(params["mlp"]) if "mlp" in params else None
        self.moe = MoE(params["moe"]) if "moe" in params else None

    def __call__(
        self,
        x: jax.Array,
        cache: Cache,
        index: jax.Array,
        count: jax.Array,
        plan: LayerPlan,
        config: ModelConfig,
        decode: bool,
        place: jax.Array,
        forced: jax.Array | None = None,
    ) -> tuple[jax.Array, Cache, Routes | None]:
        """(the new x, float32 [B, T, D], not yet rounded; the new cache; its experts, if any).

        x [B, T, D] follows `cache.length` tokens, of which `count` (int32 []) are real and the
        rest padding. `index` int32 [] is this layer's place in the cache, among those of its kind;
        `place` that in its stack. `forced` as in `MoE`.
        """
        policy, r, eps = plan.policy, rounder(plan.policy), config.rms_norm_eps
        hidden = rms_norm(x, self.input_norm[...], eps, policy)
        mixed, cache = self.mixer(hidden, cache, index, count, plan, config, decode)
        x = r(x.astype(jnp.float32) + mixed.astype(jnp.float32))
        hidden = rms_norm(x, self.post_norm[...], eps, policy)
        routes = None
        if self.moe is None:
            y = self.mlp(hidden, policy)
        else:
            y, routes = self.moe(
                hidden,
                place,
                policy,
                config.moe,
                eps=eps,
                forced=forced,
                placement=plan.experts,
            )
        return x + y.astype(jnp.float32), cache, routes

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
from kernjax.model.execution import LayerCall
from kernjax.model.kimi_delta import KimiDelta
from kernjax.model.latent_attention import LatentAttention
from kernjax.model.layers import MLP, activation, layer_norm, rounder
from kernjax.model.moe import MoE, Routes
from kernjax.model.residual import Mixture, Stream, begin_block


class DecoderLayer(nnx.Module):
    """Parameters of one layer, or of a stack (leading axis), named as in `params.py`."""

    def __init__(self, config: ModelConfig, kind: str, params: Mapping[str, Any]) -> None:
        self.input_norm = nnx.Param(params["input_norm"])
        self.post_norm = nnx.Param(params["post_norm"])
        self.mixer = _mixer(config, kind)(params)
        self.mlp = MLP(params["mlp"]) if "mlp" in params else None
        self.moe = MoE(params["moe"]) if "moe" in params else None
        blocks = config.block_size is not None
        self.mixer_res = Mixture(params["mixer_res"]) if blocks else None
        self.mlp_res = Mixture(params["mlp_res"]) if blocks else None

    def __call__(
        self,
        stream: Stream,
        cache: Cache,
        call: LayerCall,
        place: jax.Array,
        number: jax.Array,
        forced: jax.Array | None = None,
    ) -> tuple[Stream, Cache, Routes | None]:
        """(the new stream, its x float32 and not yet rounded; the new cache; experts, if any).

        x [B, T, D] follows `cache.length` tokens. `place` int32 [] is this layer's place in its
        stack, `number` that in the model. `forced` as in `MoE`.
        """
        plan, config = call.plan, call.config
        policy, r, eps = plan.policy, rounder(plan.policy), config.rms_norm_eps
        glu, size = activation(config), config.block_size
        hidden = stream.x
        if size is not None:
            hidden = self.mixer_res(stream, (number + size - 1) // size, eps, policy)
            stream = begin_block(stream, number, size)
        hidden = layer_norm(hidden, self.input_norm[...], config, policy)
        mixed, cache = self.mixer(hidden, cache, call)
        x = r(stream.x.astype(jnp.float32) + mixed.astype(jnp.float32))
        hidden = x
        if size is not None:
            hidden = self.mlp_res(stream._replace(x=x), number // size + 1, eps, policy)
        hidden = layer_norm(hidden, self.post_norm[...], config, policy)
        routes = None
        if self.moe is None:
            y = self.mlp(hidden, policy, glu)
        else:
            y, routes = self.moe(
                hidden,
                place,
                policy,
                config.moe,
                eps=eps,
                glu=glu,
                forced=forced,
                placement=plan.experts,
            )
        return stream._replace(x=x + y.astype(jnp.float32)), cache, routes


def _mixer(
    config: ModelConfig, kind: str
) -> type[DeltaNet | KimiDelta | Attention | LatentAttention]:
    if kind == LINEAR:
        return DeltaNet if config.delta is None else KimiDelta
    return Attention if config.latent is None else LatentAttention

"""Multi-head latent attention without rotation (transformers: `KimiLinearAttention`).

q = x W_q, or rmsnorm(x W_qa) W_qb, [N, P + R]          c, s = x W_kva, [rank], [R]
c = rmsnorm(c);   k_n = [c W_k,n ; s],  v_n = c W_v,n   W_kvb = [W_k,n ; W_v,n] per head n
o_n = softmax(q_n k_n (P + R)^-0.5) v_n;   y = W_o (o * sigmoid(x W_g)), where there is a gate

The cache holds c and s, not the heads' keys and values: W_k is applied to the query and W_v to the
output, so that all heads attend over one key [c ; s] and one value c. That is how engines decode;
they prefill with expanded heads, as transformers always does, which differs in rounding only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from kernjax.model.attention import stored, write_cache
from kernjax.model.cache import Cache
from kernjax.model.config import ModelConfig
from kernjax.model.execution import LayerCall
from kernjax.model.layers import contract, linear, plain_rms_norm, rounder
from kernjax.model.separate import whole
from kernjax.precision import LayerPolicy
from pallas_kernels.formats import store


class LatentAttention(nnx.Module):
    """Parameters of one MLA mixer, or of a stack (leading axis), named as in `params.py`."""

    def __init__(self, params: Mapping[str, Any]) -> None:
        def optional(name: str) -> nnx.Param | None:
            return nnx.Param(params[name]) if name in params else None

        # The query has one matrix, or two of low rank with a norm between.
        self.q = optional("q")
        self.q_a, self.q_norm, self.q_b = map(optional, ("q_a", "q_norm", "q_b"))
        self.kv_a = nnx.Param(params["kv_a"])
        self.kv_norm = nnx.Param(params["kv_norm"])
        self.kv_b = nnx.Param(params["kv_b"])
        self.gate = optional("gate")
        self.o = nnx.Param(params["o"])

    def __call__(self, x: jax.Array, cache: Cache, call: LayerCall) -> tuple[jax.Array, Cache]:
        """(mixed [B, T, D], new cache) of normed x [B, T, D].

        x's latents are written at `cache.length`.
        """
        index, count, plan, config, decode = call
        policy, r, sizes = plan.policy, rounder(plan.policy), config.latent
        batch, time, _ = x.shape
        rank, start = sizes.kv_rank, cache.length
        w = whole(self.kv_b[...]).reshape(rank, config.num_heads, sizes.nope_dim + sizes.value_dim)
        w_k, w_v = w[..., : sizes.nope_dim], w[..., sizes.nope_dim :]

        q = self._query(x, policy, config).reshape(batch, time, config.num_heads, config.head_dim)
        q_latent = contract("btnp,rnp->btnr", q[..., : sizes.nope_dim], w_k, policy)
        q_latent = store(q_latent, policy.activations)
        q = jnp.concatenate([q_latent, q[..., sizes.nope_dim :]], axis=-1)

        both = linear(x, self.kv_a[...], policy)
        c = plain_rms_norm(both[..., :rank], self.kv_norm[...], sizes.norm_eps, policy)
        key, value = jnp.concatenate([c, both[..., rank:]], axis=-1), c
        kv = policy.kv_cache
        at = (index, start, plan.sequence)
        keys = write_cache(cache.keys, stored(key[:, :, None], kv.k_scale, kv.k), *at)
        values = write_cache(cache.values, stored(value[:, :, None], kv.v_scale, kv.v), *at)
        o = plan.attend(
            "attention.decode" if decode else "attention.prefill",
            q,
            keys,
            values,
            index,
            q_offset=jnp.full((batch,), start, jnp.int32),
            kv_length=jnp.full((batch,), start + count, jnp.int32),
            scale=config.head_dim**-0.5,
            formats=policy.attention,
        )
        o = contract("btnr,rnv->btnv", store(o, policy.activations), w_v, policy)
        o = store(o, policy.activations).reshape(batch, time, -1)
        if self.gate is not None:
            gate = r(jax.nn.sigmoid(linear(x, self.gate[...], policy).astype(jnp.float32)))
            o = store(o.astype(jnp.float32) * gate, policy.activations)
        cache = dataclasses.replace(cache, keys=keys, values=values)
        return linear(o, self.o[...], policy), cache

    def _query(self, x: jax.Array, policy: LayerPolicy, config: ModelConfig) -> jax.Array:
        """[B, T, N * (P + R)]"""
        if self.q is not None:
            return linear(x, self.q[...], policy)
        low = linear(x, self.q_a[...], policy)
        low = plain_rms_norm(low, self.q_norm[...], config.latent.norm_eps, policy)
        return linear(low, self.q_b[...], policy)

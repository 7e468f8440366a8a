"""Kimi Delta Attention: the delta rule with a decay per channel (arXiv 2510.26692).

q, k, v = x W                 a short causal convolution and silu over each; q, k l2-normalised
beta = sigmoid(x W_b)         f = x W_fa W_fb, one a channel
g = -exp(A_log) * softplus(f + dt_bias)                Kimi Linear (transformers:
g = lower_bound * sigmoid(exp(A_log) * (f + dt_bias))  Kimi K3;   `KimiLinearDeltaAttention`)
S = exp(g) S;  S += k ((v - k^T S) beta)^T;  o = (q K^-0.5)^T S         exp(g) on the key axis
y = W_o (rmsnorm(o) * w * sigmoid(gate))               gate = x W_ga W_gb, K3: x W_g
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from kernjax.model.cache import Cache, put_row, row
from kernjax.model.config import ModelConfig
from kernjax.model.delta_net import causal_conv, log_decay, per_head
from kernjax.model.execution import LayerCall
from kernjax.model.layers import l2_normalised, linear, normalised, rounder
from kernjax.precision import LayerPolicy
from pallas_kernels.formats import store


class KimiDelta(nnx.Module):
    """Parameters of one KDA mixer, or of a stack (leading axis), named as in `params.py`."""

    def __init__(self, params: Mapping[str, Any]) -> None:
        self.q, self.k, self.v = (nnx.Param(params[name]) for name in ("q", "k", "v"))
        self.conv_q = nnx.Param(params["conv_q"])
        self.conv_k = nnx.Param(params["conv_k"])
        self.conv_v = nnx.Param(params["conv_v"])
        self.f_a, self.f_b = nnx.Param(params["f_a"]), nnx.Param(params["f_b"])
        self.b = nnx.Param(params["b"])
        self.A_log = nnx.Param(params["A_log"])
        self.dt_bias = nnx.Param(params["dt_bias"])
        # The gate has one matrix, or two of low rank.
        full_rank = "g" in params
        self.g = nnx.Param(params["g"]) if full_rank else None
        self.g_a = None if full_rank else nnx.Param(params["g_a"])
        self.g_b = None if full_rank else nnx.Param(params["g_b"])
        self.norm = nnx.Param(params["norm"])
        self.out = nnx.Param(params["out"])

    def __call__(self, x: jax.Array, cache: Cache, call: LayerCall) -> tuple[jax.Array, Cache]:
        """(mixed [B, T, D], new cache) of normed x [B, T, D].

        Padding touches neither the convolutions' window nor the state.
        """
        index, count, plan, config, decode = call
        policy, r = plan.policy, rounder(plan.policy)
        batch, time, _ = x.shape
        heads = (batch, time, config.linear_key_heads, config.linear_key_dim)

        # Each by itself: heads are sharded, and one array of all three would be sharded otherwise.
        (q, k, v), windows = zip(
            *(
                causal_conv(linear(x, weight[...], policy), window, taps[...], count, policy)
                for weight, taps, window in zip(
                    (self.q, self.k, self.v),
                    (self.conv_q, self.conv_k, self.conv_v),
                    jnp.split(row(cache.conv, index), 3, axis=-1),
                    strict=True,
                )
            ),
            strict=True,
        )
        q, k, v = (part.reshape(heads) for part in (q, k, v))
        q = store(l2_normalised(q), policy.qk)
        k = store(l2_normalised(k), policy.qk)
        beta = jax.nn.sigmoid(linear(x, self.b[...], policy).astype(jnp.float32))

        rule = plan.op("delta_rule.recurrent" if decode else "delta_rule.chunked")
        o, state = rule(
            q,
            k,
            v,
            self._decay(x, policy, config),
            beta,
            row(cache.state, index),
            lengths=jnp.full((batch,), count, jnp.int32),
            formats=policy.delta_rule,
        )

        # Unlike GDN's, the norm is float32 until the gate has been applied.
        o = normalised(r(o), config.rms_norm_eps).reshape(batch, time, -1)
        o = o * per_head(self.norm[...], config.linear_key_heads)
        o = o * jax.nn.sigmoid(self._gate(x, policy).astype(jnp.float32))
        y = linear(store(o, policy.activations), self.out[...], policy)
        return y, dataclasses.replace(
            cache,
            conv=put_row(cache.conv, jnp.concatenate(windows, axis=-1), index),
            state=put_row(cache.state, state, index),
        )

    def _decay(self, x: jax.Array, policy: LayerPolicy, config: ModelConfig) -> jax.Array:
        """g float32 [B, T, H, K], not above 0."""
        f = linear(linear(x, self.f_a[...], policy), self.f_b[...], policy)
        channels = (config.linear_key_heads, config.linear_key_dim)
        f, dt_bias = f.reshape(*x.shape[:2], *channels), self.dt_bias[...].reshape(channels)
        a_log = self.A_log[...][:, None]
        bound = config.delta.lower_bound
        return log_decay(f, a_log, dt_bias) if bound is None else bounded(f, a_log, dt_bias, bound)

    def _gate(self, x: jax.Array, policy: LayerPolicy) -> jax.Array:
        """[B, T, H * K]"""
        if self.g is not None:
            return linear(x, self.g[...], policy)
        return linear(linear(x, self.g_a[...], policy), self.g_b[...], policy)


def bounded(f: jax.Array, a_log: jax.Array, dt_bias: jax.Array, bound: float) -> jax.Array:
    """g = bound * sigmoid(exp(A_log) * (f + dt_bias)), float32, between bound and 0."""
    f, a_log = f.astype(jnp.float32), a_log.astype(jnp.float32)
    return bound * jax.nn.sigmoid(jnp.exp(a_log) * (f + dt_bias.astype(jnp.float32)))

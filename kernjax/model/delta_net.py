"""The Gated DeltaNet layer (transformers: `Qwen3_5GatedDeltaNet`; rule: arXiv 2412.06464).

qkv, z, b, a = x W                       conv over qkv, kernel 4, causal, then silu
q, k = l2norm(q), l2norm(k)              q * K^-0.5 inside the rule
beta = sigmoid(b)    g = -exp(A_log) * softplus(a + dt_bias)
S = exp(g) S;  S += k ((v - k^T S) beta)^T;  o = q^T S
y = W_out (rmsnorm(o) * w * silu(z))
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kernjax.model.cache import Cache, put_row, row
from kernjax.model.execution import LayerCall
from kernjax.model.layers import (
    l2_normalised,
    linear,
    normalised,
    rounder,
    silu,
)
from kernjax.precision import LayerPolicy
from pallas_kernels.formats import as_bits, bits_dtype, from_bits, round_to, store


class DeltaNet(nnx.Module):
    """Parameters of one GDN mixer, or of a stack (leading axis), named as in `params.py`."""

    def __init__(self, params: Mapping[str, Any]) -> None:
        self.qkv = nnx.Param(params["qkv"])
        self.z = nnx.Param(params["z"])
        self.b = nnx.Param(params["b"])
        self.a = nnx.Param(params["a"])
        self.conv = nnx.Param(params["conv"])
        self.A_log = nnx.Param(params["A_log"])
        self.dt_bias = nnx.Param(params["dt_bias"])
        self.norm = nnx.Param(params["norm"])
        self.out = nnx.Param(params["out"])

    def __call__(self, x: jax.Array, cache: Cache, call: LayerCall) -> tuple[jax.Array, Cache]:
        """(mixed [B, T, D], new cache) of normed x [B, T, D].

        Padding touches neither the convolution's window nor the state.
        """
        index, count, plan, config, decode = call
        conv, state = row(cache.conv, index), row(cache.state, index)
        policy, r = plan.policy, rounder(plan.policy)
        key_heads, value_heads = config.linear_key_heads, config.linear_value_heads
        key_dim, value_dim = config.linear_key_dim, config.linear_value_dim
        batch, time, _ = x.shape

        z = linear(x, self.z[...], policy)
        b = linear(x, self.b[...], policy)
        a = linear(x, self.a[...], policy)
        qkv, conv = causal_conv(
            linear(x, self.qkv[...], policy), conv, self.conv[...], count, policy
        )
        widths = (key_heads * key_dim, 2 * key_heads * key_dim)
        q, k, v = jnp.split(qkv, widths, axis=-1)
        q = store(l2_normalised(q.reshape(batch, time, key_heads, key_dim)), policy.qk)
        k = store(l2_normalised(k.reshape(batch, time, key_heads, key_dim)), policy.qk)
        v = v.reshape(batch, time, value_heads, value_dim)
        beta = jax.nn.sigmoid(b.astype(jnp.float32))
        g = log_decay(a, self.A_log[...], self.dt_bias[...])

        rule = plan.op("delta_rule.recurrent" if decode else "delta_rule.chunked")
        o, state = rule(
            q,
            k,
            v,
            g,
            beta,
            state,
            lengths=jnp.full((batch,), count, jnp.int32),
            formats=policy.delta_rule,
        )

        o = r(normalised(r(o), config.rms_norm_eps)).reshape(z.shape)
        # The checkpoint's norm weight is in the model's dtype, so the product is rounded as well.
        o = r(o * per_head(self.norm[...], value_heads))
        o = store(o * silu(z.astype(jnp.float32)), policy.activations)
        cache = dataclasses.replace(
            cache,
            conv=put_row(cache.conv, conv, index),
            state=put_row(cache.state, state, index),
        )
        return linear(o, self.out[...], policy), cache


def per_head(weight: jax.Array, heads: int) -> jax.Array:
    """weight [V] once for each head: float32 [heads * V].

    By a gather, which XLA's CPU compiler does not fuse: where it broadcasts a vector over heads
    inside of a fusion, that fusion is not vectorised and takes eight times as long.
    """
    return weight.astype(jnp.float32)[np.arange(heads * weight.shape[-1]) % weight.shape[-1]]


def log_decay(a: jax.Array, a_log: jax.Array, dt_bias: jax.Array) -> jax.Array:
    """g = -exp(A_log) * softplus(a + dt_bias), float32 [B, T, Hv]; softplus linear above 20."""
    shifted = a.astype(jnp.float32) + dt_bias.astype(jnp.float32)
    # torch's softplus: its threshold keeps exp from overflowing and is part of the definition.
    softplus = jnp.where(shifted > 20.0, shifted, jnp.log1p(jnp.exp(jnp.minimum(shifted, 20.0))))
    return -jnp.exp(a_log.astype(jnp.float32)) * softplus


def causal_conv(
    x: jax.Array, window: jax.Array, weight: jax.Array, count: jax.Array, policy: LayerPolicy
) -> tuple[jax.Array, jax.Array]:
    """Depthwise causal convolution and silu; x [B, T, C], weight [C, kernel].

    `window` [B, kernel - 1, C] holds the inputs before x, as `Cache.conv` does; the returned one
    holds the last real inputs (`count` int32 []), so that padding never enters the next call.
    """
    time, taps, width = x.shape[1], weight.astype(jnp.float32), window.shape[1]
    # Written one after the other: of a concatenation XLA's CPU compiler makes a loop that asks of
    # each element from which part it comes.
    bits = jnp.zeros((x.shape[0], width + time, x.shape[2]), bits_dtype(x.dtype))
    same = window.dtype == bits.dtype
    before = window if same else as_bits(window.astype(x.dtype))
    bits = jax.lax.dynamic_update_slice(bits, before, (0, 0, 0))
    bits = jax.lax.dynamic_update_slice(bits, as_bits(x), (0, width, 0))
    inputs = from_bits(bits, x.dtype).astype(jnp.float32)
    y = sum(inputs[:, tap : tap + time] * taps[:, tap] for tap in range(taps.shape[-1]))
    y = store(silu(round_to(y, policy.conv)), policy.conv)
    last = jax.lax.dynamic_slice_in_dim(bits, count, width, axis=1)
    return y, last if same else from_bits(last, x.dtype).astype(window.dtype)

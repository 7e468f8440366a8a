"""The demo's forward pass for training: whole sequences, no cache, float32, differentiable.

The same function of the same parameter tree as `kernjax.model` (tests compare the two), without
what training does not need: no cache is carried, so that the backward pass stores no copies of it,
and attention is recomputed in query blocks, so that memory stays linear in the length.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kernjax.demo.delta_rule import gated_delta_rule
from kernjax.model.config import FULL, LINEAR, ModelConfig
from kernjax.model.delta_net import log_decay
from kernjax.model.layers import l2_normalised, normalised, rotary_angles, silu

MIN_QUERY_BLOCK, QUERY_BLOCKS = 256, 8  # causal attention skips the keys after a block
Params = Mapping[str, Any]


def init_params(config: ModelConfig, seed: int) -> dict[str, Any]:
    """Random float32 parameters in the tree of `kernjax.model`, as NumPy arrays.

    Matrices are normal with variance 1/fan_in, those that write to the residual stream smaller by
    sqrt(2 layers). Decays span slow to fast as in Mamba: A log-uniform in [1, 16], the step
    softplus(dt_bias) log-uniform in [1e-3, 1e-1].
    """
    rng = np.random.default_rng(seed)
    d, f, c = config.hidden_size, config.intermediate_size, config.conv_channels
    residual = (2 * config.num_layers) ** -0.5
    count = {kind: config.layer_types.count(kind) for kind in (LINEAR, FULL)}

    def matrix(kind: str, fan_in: int, fan_out: int, scale: float = 1.0) -> np.ndarray:
        shape = (count[kind], fan_in, fan_out)
        return (scale * fan_in**-0.5 * rng.standard_normal(shape)).astype(np.float32)

    def shared(kind: str) -> dict[str, Any]:
        mlp = {
            "gate": matrix(kind, d, f),
            "up": matrix(kind, d, f),
            "down": matrix(kind, f, d, residual),
        }
        norms = {name: np.zeros((count[kind], d), np.float32) for name in _LAYER_NORMS}
        return {"mlp": mlp, **norms}

    heads = (count[LINEAR], config.linear_value_heads)
    step = np.exp(rng.uniform(np.log(1e-3), np.log(1e-1), heads))
    linear = shared(LINEAR) | {
        "qkv": matrix(LINEAR, d, c),
        "z": matrix(LINEAR, d, config.value_size),
        "b": matrix(LINEAR, d, config.linear_value_heads),
        "a": matrix(LINEAR, d, config.linear_value_heads, 0.1),
        "conv": np.float32(config.conv_kernel**-0.5)
        * rng.standard_normal((count[LINEAR], c, config.conv_kernel)).astype(np.float32),
        "A_log": rng.uniform(0.0, np.log(16.0), heads).astype(np.float32),
        "dt_bias": np.log(np.expm1(step)).astype(np.float32),
        "norm": np.ones((count[LINEAR], config.linear_value_dim), np.float32),
        "out": matrix(LINEAR, config.value_size, d, residual),
    }
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    full = shared(FULL) | {
        "q": matrix(FULL, d, queries),
        "gate": matrix(FULL, d, queries),
        "k": matrix(FULL, d, keys),
        "v": matrix(FULL, d, keys),
        "q_norm": np.zeros((count[FULL], config.head_dim), np.float32),
        "k_norm": np.zeros((count[FULL], config.head_dim), np.float32),
        "o": matrix(FULL, queries, d, residual),
    }
    embed = 0.02 * rng.standard_normal((config.vocab_size, d))
    return {
        "embed": embed.astype(np.float32),
        "final_norm": np.zeros(d, np.float32),
        "linear": linear,
        "full": full,
    }


_LAYER_NORMS = ("input_norm", "post_norm")


def hidden_states(params: Params, tokens: jax.Array, config: ModelConfig) -> jax.Array:
    """float32 [B, T, D] after the final norm, of int32 tokens [B, T] from position 0."""
    unit = config.layer_types[: config.layer_types.index(FULL) + 1]
    repeats = config.num_layers // len(unit)
    if config.layer_types != unit * repeats:
        raise ValueError(f"layer_types must repeat one group, got {config.layer_types}")
    angles = rotary_angles(
        jnp.arange(tokens.shape[1]), config.rotary_dim, config.rope_theta
    )  # [T, rotary_dim / 2]
    # Taps as rows: a loop over channels that strides through [C, kernel] is not vectorised.
    linear = params["linear"] | {"conv": jnp.swapaxes(params["linear"]["conv"], -1, -2)}
    linear = jax.tree.map(lambda x: x.reshape(repeats, -1, *x.shape[1:]), linear)

    # Recomputing a layer costs less than writing its activations to memory and reading them back.
    @jax.checkpoint
    def linear_layer(x: jax.Array, layer: Params) -> tuple[jax.Array, None]:
        x = x + _delta_net(_norm(x, layer["input_norm"], config), layer, config)
        return x + _mlp(_norm(x, layer["post_norm"], config), layer["mlp"]), None

    @jax.checkpoint
    def full_layer(x: jax.Array, full: Params) -> jax.Array:
        x = x + _attention(_norm(x, full["input_norm"], config), full, angles, config)
        return x + _mlp(_norm(x, full["post_norm"], config), full["mlp"])

    def group(x: jax.Array, layers: tuple[Params, Params]) -> tuple[jax.Array, None]:
        linear, full = layers
        x, _ = lax.scan(linear_layer, x, linear)
        return full_layer(x, full), None

    x, _ = lax.scan(group, params["embed"][tokens], (linear, params["full"]))
    return _norm(x, params["final_norm"], config)


def token_losses(params: Params, tokens: jax.Array, config: ModelConfig) -> jax.Array:
    """-log p of tokens[:, 1:], float32 [B, T], for int32 tokens [B, T + 1]; tied embedding."""
    hidden = hidden_states(params, tokens[:, :-1], config)
    logits = _dot(hidden, params["embed"].T)
    targets = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - targets


@jax.custom_vjp
def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """a @ b -> float32, of operands rounded to bf16: four times the float32 rate on recent CPUs.

    a [..., M, K] with b [K, N], or with b [..., K, N] of the same leading dimensions.
    """
    return jnp.matmul(_low(a), _low(b), preferred_element_type=jnp.float32)


def _dot_forward(a: jax.Array, b: jax.Array):
    a, b = _low(a), _low(b)
    return jnp.matmul(a, b, preferred_element_type=jnp.float32), (a, b)


def _dot_backward(operands, grad: jax.Array):
    (a, b), grad = operands, _low(grad)
    to_a = jnp.matmul(grad, jnp.swapaxes(b, -1, -2), preferred_element_type=jnp.float32)
    if b.ndim == 2:
        a, grad = a.reshape(-1, a.shape[-1]), grad.reshape(-1, grad.shape[-1])
    to_b = jnp.matmul(jnp.swapaxes(a, -1, -2), grad, preferred_element_type=jnp.float32)
    return to_a, to_b


_dot.defvjp(_dot_forward, _dot_backward)


def _low(x: jax.Array) -> jax.Array:
    return x.astype(jnp.bfloat16)


def _norm(x: jax.Array, weight: jax.Array, config: ModelConfig) -> jax.Array:
    return normalised(x, config.rms_norm_eps) * (1.0 + weight)


def _mlp(x: jax.Array, mlp: Params) -> jax.Array:
    return _dot(silu(_dot(x, mlp["gate"])) * _dot(x, mlp["up"]), mlp["down"])


def _delta_net(x: jax.Array, layer: Params, config: ModelConfig) -> jax.Array:
    batch, time, _ = x.shape
    qkv = silu(_causal_conv(_dot(x, layer["qkv"]), layer["conv"]))
    widths = (config.key_size, 2 * config.key_size)
    q, k, v = jnp.split(qkv, widths, axis=-1)
    keys = (batch, time, config.linear_key_heads, config.linear_key_dim)
    v = v.reshape(batch, time, config.linear_value_heads, config.linear_value_dim)
    beta = jax.nn.sigmoid(x @ layer["b"])
    g = log_decay(x @ layer["a"], layer["A_log"], layer["dt_bias"])
    q, k = l2_normalised(q.reshape(keys)), l2_normalised(k.reshape(keys))
    o = gated_delta_rule(q, k, v, g, beta)
    o = normalised(o, config.rms_norm_eps) * layer["norm"]
    return _dot(o.reshape(batch, time, -1) * silu(_dot(x, layer["z"])), layer["out"])


@jax.custom_vjp
def _causal_conv(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Depthwise: y_t = sum_i weight[i] x_{t - kernel + 1 + i}; x [B, T, C], weight [kernel, C]."""
    kernel = weight.shape[0]
    return sum(_later(x, kernel - 1 - tap) * weight[tap] for tap in range(kernel))


def _conv_forward(x: jax.Array, weight: jax.Array):
    return _causal_conv(x, weight), (x, weight)


def _conv_backward(operands, grad: jax.Array):
    x, weight = operands
    batch, time, kernel = *x.shape[:2], weight.shape[0]
    to_x = sum(_later(grad, tap + 1 - kernel) * weight[tap] for tap in range(kernel))
    to_weight = []
    for shift in range(kernel - 1, -1, -1):
        # Written out: XLA's CPU reduction over leading axes is several times slower.
        products = sum(x[b, : time - shift] * grad[b, shift:] for b in range(batch))
        to_weight.append(_column_sums(jnp.pad(products, ((0, shift), (0, 0)))))
    return to_x, jnp.stack(to_weight)


_causal_conv.defvjp(_conv_forward, _conv_backward)


def _later(x: jax.Array, steps: int) -> jax.Array:
    """x [B, T, C] moved by `steps` along T (negative: earlier), zeros where nothing came from."""
    zeros = jnp.zeros((x.shape[0], abs(steps), x.shape[2]), x.dtype)
    if steps > 0:
        return jnp.concatenate([zeros, x[:, :-steps]], axis=1)
    return x if steps == 0 else jnp.concatenate([x[:, -steps:], zeros], axis=1)


def _column_sums(x: jax.Array) -> jax.Array:
    """Sums [C] of x [N, C], in a tree of elementwise sums of sixteen."""
    while x.shape[0] > 1:
        parts = 16 if x.shape[0] % 16 == 0 else x.shape[0]
        x = x.reshape(parts, -1, x.shape[1])
        x = sum(x[part] for part in range(parts))
    return x[0]


def _attention(x: jax.Array, layer: Params, angles: jax.Array, config: ModelConfig) -> jax.Array:
    batch, time, _ = x.shape
    groups = config.num_heads // config.num_kv_heads
    q, k, v = (_dot(x, layer[name]).reshape(batch, time, -1, config.head_dim) for name in "qkv")
    q = _rotate(_norm(q, layer["q_norm"], config), angles) * config.head_dim**-0.5
    k = _rotate(_norm(k, layer["k_norm"], config), angles)
    q = q.transpose(0, 2, 1, 3)
    k, v = (jnp.repeat(x.transpose(0, 2, 1, 3), groups, axis=1) for x in (k, v))

    def block(start: int, stop: int) -> jax.Array:
        """Queries start..stop of all heads against the keys before stop -> [B, N, Q, H]."""
        scores = _dot(q[:, :, start:stop], jnp.swapaxes(k[:, :, :stop], -1, -2))
        seen = jnp.arange(stop) <= jnp.arange(start, stop)[:, None]
        return _dot(jax.nn.softmax(jnp.where(seen, scores, -1e30), axis=-1), v[:, :, :stop])

    size = max(MIN_QUERY_BLOCK, -(-time // QUERY_BLOCKS))
    o = [block(start, min(start + size, time)) for start in range(0, time, size)]
    o = jnp.concatenate(o, axis=2).transpose(0, 2, 1, 3).reshape(batch, time, -1)
    return _dot(o * jax.nn.sigmoid(_dot(x, layer["gate"])), layer["o"])


def _rotate(x: jax.Array, angles: jax.Array) -> jax.Array:
    """Rotates the first features of x [B, T, heads, H] in halves by angles [T, rotary / 2]."""
    half = angles.shape[-1]
    cos, sin = jnp.cos(angles)[:, None, :], jnp.sin(angles)[:, None, :]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    turned = (first * cos - second * sin, second * cos + first * sin, rest)
    return jnp.concatenate(turned, axis=-1)

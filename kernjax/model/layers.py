"""The pieces both kinds of layer share: projections, norms, rotary embedding, gated MLP.

Every function computes in float32 and rounds where transformers' `modeling_qwen3_5.py` leaves a
value in the model's dtype; a policy with float32 activations makes all of these exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx

from kernjax.model.config import SITU, ModelConfig
from kernjax.model.separate import OneOf
from kernjax.precision import LayerPolicy
from pallas_kernels.formats import BF16, round_to, store

# (gate, up, policy) -> hidden: how a gated MLP joins its two projections, stored as activations.
Glu: TypeAlias = Callable[[jax.Array, jax.Array, LayerPolicy], jax.Array]


def linear(x: jax.Array, weight: jax.Array | OneOf, policy: LayerPolicy) -> jax.Array:
    """x [..., D] @ weight [D, F], accumulated in float32, stored as activations [..., F]."""
    return store(dot(x, weight, policy), policy.activations)


def dot(x: jax.Array, weight: jax.Array | OneOf, policy: LayerPolicy) -> jax.Array:
    """x [..., D] @ weight [D, F] -> float32 [..., F], not rounded."""
    if isinstance(weight, OneOf):
        return weight.apply(lambda x, matrix: dot(x, matrix, policy), x)
    return contract("...d,df->...f", x, weight, policy)


def contract(subscripts: str, x: jax.Array, weight: jax.Array, policy: LayerPolicy) -> jax.Array:
    """einsum of x with weights -> float32, not rounded."""
    if policy.dot == "default":
        # What one pass of a TPU's matrix unit does to float32 operands.
        x, weight = store(x, BF16), store(weight, BF16)
    if x.dtype != weight.dtype or x.dtype.itemsize < 2:
        x, weight = x.astype(jnp.float32), weight.astype(jnp.float32)
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum(
        subscripts, x, weight, precision=precision, preferred_element_type=jnp.float32
    )


def rms_norm(x: jax.Array, weight: jax.Array, eps: float, policy: LayerPolicy) -> jax.Array:
    """Zero-centred RMSNorm over the last axis: x / rms(x) * (1 + weight), stored once."""
    return store(normalised(x, eps) * (1.0 + weight.astype(jnp.float32)), policy.activations)


def layer_norm(
    x: jax.Array, weight: jax.Array, config: ModelConfig, policy: LayerPolicy
) -> jax.Array:
    """The RMSNorm before a layer's mixer and MLP, and the final one, as the model has them."""
    norm = rms_norm if config.zero_centred else plain_rms_norm
    return norm(x, weight, config.rms_norm_eps, policy)


def plain_rms_norm(x: jax.Array, weight: jax.Array, eps: float, policy: LayerPolicy) -> jax.Array:
    """RMSNorm over the last axis: x / rms(x), rounded, then * weight (`KimiLinearRMSNorm`)."""
    x = rounder(policy)(normalised(x, eps))
    return store(x * weight.astype(jnp.float32), policy.activations)


def normalised(x: jax.Array, eps: float) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) over the last axis, float32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)


def l2_normalised(x: jax.Array, eps: float = 1e-6) -> jax.Array:
    """x / sqrt(sum(x^2) + eps) over the last axis, float32 (transformers' `l2norm`)."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + eps)


def silu(x: jax.Array) -> jax.Array:
    return x * jax.nn.sigmoid(x)


def swiglu(gate: jax.Array, up: jax.Array, policy: LayerPolicy) -> jax.Array:
    """silu(gate) * up, both factors and the product rounded to activations."""
    hidden = rounder(policy)(silu(gate.astype(jnp.float32)))
    return store(hidden * up.astype(jnp.float32), policy.activations)


def situ_glu(beta: float, linear_beta: float | None) -> Glu:
    """SiTU: beta tanh(gate / beta) sigmoid(gate) * up, in float32 and rounded once.

    With `linear_beta`, up is bounded as well: linear_beta tanh(up / linear_beta).
    """

    def glu(gate: jax.Array, up: jax.Array, policy: LayerPolicy) -> jax.Array:
        gate, up = gate.astype(jnp.float32), up.astype(jnp.float32)
        if linear_beta is not None:
            up = linear_beta * jnp.tanh(up / linear_beta)
        gate = beta * jnp.tanh(gate / beta) * jax.nn.sigmoid(gate)
        return store(gate * up, policy.activations)

    return glu


def activation(config: ModelConfig) -> Glu:
    """How the model's MLPs and experts join their two projections."""
    return situ_glu(*config.situ_betas) if config.hidden_act == SITU else swiglu


class MLP(nnx.Module):
    """Weights of a gated MLP: gate and up [D, F], down [F, D] (leading axes when stacked)."""

    def __init__(self, params: Mapping[str, Any]) -> None:
        self.gate = nnx.Param(params["gate"])
        self.up = nnx.Param(params["up"])
        self.down = nnx.Param(params["down"])

    def __call__(self, x: jax.Array, policy: LayerPolicy, glu: Glu = swiglu) -> jax.Array:
        """down(glu(gate(x), up(x))) of x [..., D]."""
        gate, up = linear(x, self.gate[...], policy), linear(x, self.up[...], policy)
        return linear(glu(gate, up, policy), self.down[...], policy)


def rounder(policy: LayerPolicy) -> Callable[[jax.Array], jax.Array]:
    """Rounds an intermediate to the activations' grid and leaves it in float32."""
    return lambda x: round_to(x, policy.activations)


def rotary_angles(positions: jax.Array, rotary_dim: int, theta: float) -> jax.Array:
    """Phases float32 [..., rotary_dim // 2] of int positions [...]: pos * theta^(-2i/rotary_dim).

    Positions become float32 before the product, as in transformers; text positions make the
    checkpoint's interleaved mrope identical to this.
    """
    exponent = jnp.arange(0, rotary_dim, 2, dtype=jnp.float32) / rotary_dim
    return positions.astype(jnp.float32)[..., None] * (1.0 / jnp.float32(theta) ** exponent)


def rotate(x: jax.Array, angles: jax.Array, policy: LayerPolicy) -> jax.Array:
    """Rotates the first 2 * angles.shape[-1] features of x [B, T, heads, H] (halves paired).

    cos, sin, both products and their sum are rounded to the activations' format, which is what
    transformers' `apply_rotary_pos_emb` does in the model's dtype.
    """
    r = rounder(policy)
    cos, sin = r(jnp.cos(angles))[:, :, None, :], r(jnp.sin(angles))[:, :, None, :]
    half = angles.shape[-1]
    x = x.astype(jnp.float32)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    turned = (
        r(r(first * cos) + r(-second * sin)),
        r(r(second * cos) + r(first * sin)),
        rest,
    )
    return store(jnp.concatenate(turned, axis=-1), policy.activations)

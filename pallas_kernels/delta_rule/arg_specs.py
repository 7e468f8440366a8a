"""Shapes of real models for tests, compilation and benchmarks of the delta rule."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Spec:
    """One model's delta rule on one device."""

    name: str
    key_heads: int
    value_heads: int
    key_dim: int = 128
    value_dim: int = 128
    per_channel: bool = False
    dtype: str = "bfloat16"  # of q, k and v

    def arguments(self, batch: int, tokens: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        """q, k, v, g, beta, state as `pallas_kernels.delta_rule.chunked` takes them."""
        keys = (batch, tokens, self.key_heads, self.key_dim)
        per_token = (batch, tokens, self.value_heads)
        state = (batch, self.value_heads, self.key_dim, self.value_dim)
        shapes = [
            (keys, self.dtype),
            (keys, self.dtype),
            ((*per_token, self.value_dim), self.dtype),
            ((*per_token, self.key_dim) if self.per_channel else per_token, "float32"),
            (per_token, "float32"),
            (state, "float32"),
        ]
        return tuple(jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in shapes)


SPECS = (
    Spec("qwen3.8-27b", 16, 48),
    Spec("qwen3.5-397b", 16, 64),
    Spec("kimi-k3", 96, 96, per_channel=True),
    Spec("kimi-linear", 32, 32, per_channel=True),
    Spec("demo", 2, 4, 64, 64, dtype="float32"),
)

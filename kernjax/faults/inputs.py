"""Synthetic inputs on which a fault of an op shows; families by name.

What a call of an op is made of: positional arrays, and keywords as the public op takes them.
Shapes are small: two sequences, two query heads a key head, width 16, a bfloat16 cache.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention import AttentionFormats
from pallas_kernels.delta_rule import DeltaRuleFormats

_HEADS, _KEY_HEADS, _WIDTH = 4, 2, 16


class Call(NamedTuple):
    """One call of an op; `keywords` hold arrays, numbers and formats."""

    arguments: tuple[jax.Array, ...]
    keywords: dict[str, Any]


def example(op: str, family: str) -> Call:
    """A call of `op` (an op's name) with the inputs of `family`; the same every time."""
    rng = np.random.default_rng(0)
    return (_attention if op.startswith("attention.") else _delta_rule)(op, family, rng)


def _attention(op: str, family: str, rng: np.random.Generator) -> Call:
    """The last tokens of a cache: `deep` reaches past 1024, `past_int16` past 32,768."""
    capacity = {"deep": 1500, "past_int16": 33_000}.get(family, 300)
    batch = 1 if family == "past_int16" else 2
    time = 1 if op == "attention.decode" else 40
    length = np.full(batch, capacity - 90, np.int32)
    spread = 8.0 if family == "peaked" else 2.0
    k_scale, v_scale = (0.25, 0.5) if family == "scaled" else (1.0, 1.0)
    size = 30_000.0 if family == "large_values" else 1.0

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    q = normal(batch, time, _HEADS, _WIDTH) * spread
    k, v = (normal(batch, capacity, _KEY_HEADS, _WIDTH) for _ in range(2))
    if family == "slots":  # never written: zero, as a fresh cache is
        k[:, length[0] :] = v[:, length[0] :] = 0
    return Call(
        (jnp.asarray(q, jnp.bfloat16), jnp.asarray(k / k_scale, jnp.bfloat16),
         jnp.asarray(v * (size / v_scale), jnp.bfloat16)),
        {"q_offset": jnp.asarray(length - time), "kv_length": jnp.asarray(length), "scale": None,
         "k_scale": jnp.float32(k_scale), "v_scale": jnp.float32(v_scale),
         "formats": AttentionFormats(block_k=64)},
    )  # fmt: skip


def _delta_rule(op: str, family: str, rng: np.random.Generator) -> Call:
    """300 tokens of prefill, or 4 of decode from a state; `entered`: prefill from one, too."""
    time = 4 if op == "delta_rule.recurrent" else 300
    per_token = (2, time, _HEADS)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    def unit(x: np.ndarray) -> np.ndarray:
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    q = unit(normal(2, time, _KEY_HEADS, _WIDTH))
    k = unit(normal(2, time, _KEY_HEADS, _WIDTH) + 0.5)
    v = normal(*per_token, _WIDTH)
    g = -0.02 * np.exp(normal(*per_token))
    beta = 1 / (1 + np.exp(-normal(*per_token)))
    state = normal(2, _HEADS, _WIDTH, _WIDTH)
    if op == "delta_rule.chunked" and family not in ("entered", "large_values"):
        state = np.zeros_like(state)
    if family == "fast_gates":
        g = np.full_like(g, -3.0)
    elif family == "collinear":
        k = np.broadcast_to(k[:, :1], k.shape)
        g, beta = np.full_like(g, -1e-4), np.ones_like(beta)
    elif family == "converged":  # v is what the state predicts already
        state = 300.0 + normal(2, _HEADS, _WIDTH, _WIDTH)
        wide = np.repeat(k, _HEADS // _KEY_HEADS, axis=2)
        v = np.einsum("bthk,bhkv->bthv", wide, state) + 0.5 * v
        g = np.zeros_like(g)
    elif family == "large_values":
        state *= 1e5
    arguments = tuple(jnp.asarray(x, jnp.float32) for x in (q, k, v, g, beta, state))
    lengths = jnp.full((2,), time, jnp.int32)
    return Call(arguments, {"lengths": lengths, "scale": None, "formats": DeltaRuleFormats()})

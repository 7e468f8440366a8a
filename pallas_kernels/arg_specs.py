"""Production shapes by name, as `jax.ShapeDtypeStruct` arguments: for tests, compiling, benchmarks.

Model shapes are those of the published configs: Qwen3.8-27B (text_config), Kimi K3 and
Kimi-Linear-48B-A3B (MLA with its keys and values expanded, so as many key heads as heads; KDA with
a gate per channel), and the bundled demo. `public_*` are the shapes at which speeds of other
kernels are published.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """One attention call: T query tokens at the end of a cache of S slots, all used."""

    op: str  # "prefill" or "decode"
    batch: int
    tokens: int
    capacity: int
    heads: int
    key_heads: int
    width: int  # H, of q and k
    v_width: int
    stored: str = "bfloat16"  # the cache's dtype

    def arguments(self) -> dict[str, jax.ShapeDtypeStruct]:
        """q [B, T, N, H] bfloat16, k [B, S, G, H], v [B, S, G, Hv], q_offset and kv_length [B]."""
        cache, stored = (self.batch, self.capacity, self.key_heads), jnp.dtype(self.stored)
        lengths = jax.ShapeDtypeStruct((self.batch,), jnp.int32)
        return dict(
            q=jax.ShapeDtypeStruct((self.batch, self.tokens, self.heads, self.width), jnp.bfloat16),
            k=jax.ShapeDtypeStruct((*cache, self.width), stored),
            v=jax.ShapeDtypeStruct((*cache, self.v_width), stored),
            q_offset=lengths,
            kv_length=lengths,
        )


@dataclasses.dataclass(frozen=True)
class DeltaRuleSpec:
    """One delta-rule call; `per_channel` gates are KDA's, the others GDN's."""

    op: str  # "chunked" or "recurrent"
    batch: int
    tokens: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    per_channel: bool = False

    def arguments(self) -> dict[str, jax.ShapeDtypeStruct]:
        """q, k [B, T, Hk, K], v [B, T, Hv, V] bfloat16; g, beta and the state float32.

        g [B, T, Hv] or [B, T, Hv, K], beta [B, T, Hv], the state [B, Hv, K, V] under the name that
        its op gives it.
        """
        tokens = (self.batch, self.tokens)
        gate = (*tokens, self.value_heads, *((self.key_dim,) if self.per_channel else ()))
        state = (self.batch, self.value_heads, self.key_dim, self.value_dim)
        return dict(
            q=jax.ShapeDtypeStruct((*tokens, self.key_heads, self.key_dim), jnp.bfloat16),
            k=jax.ShapeDtypeStruct((*tokens, self.key_heads, self.key_dim), jnp.bfloat16),
            v=jax.ShapeDtypeStruct((*tokens, self.value_heads, self.value_dim), jnp.bfloat16),
            g=jax.ShapeDtypeStruct(gate, jnp.float32),
            beta=jax.ShapeDtypeStruct((*tokens, self.value_heads), jnp.float32),
            **{
                "initial_state" if self.op == "chunked" else "state": jax.ShapeDtypeStruct(
                    state, jnp.float32
                )
            },
        )


_QWEN: dict[str, Any] = dict(heads=24, key_heads=4, width=256, v_width=256)
_K3: dict[str, Any] = dict(heads=96, key_heads=96, width=192, v_width=128)
_LINEAR: dict[str, Any] = dict(heads=32, key_heads=32, width=192, v_width=128)
_DEMO: dict[str, Any] = dict(heads=4, key_heads=2, width=64, v_width=64)
_WIDE: dict[str, Any] = dict(heads=8, key_heads=8, width=128, v_width=128)

ATTENTION: dict[str, AttentionSpec] = {
    "qwen3.8-27b_prefill": AttentionSpec("prefill", 1, 2048, 8192, **_QWEN),
    "qwen3.8-27b_prefill_128k": AttentionSpec("prefill", 1, 2048, 131072, **_QWEN),
    "qwen3.8-27b_prefill_fp8_cache": AttentionSpec(
        "prefill", 1, 2048, 8192, **_QWEN, stored="float8_e4m3fn"
    ),
    "qwen3.8-27b_decode": AttentionSpec("decode", 16, 1, 8192, **_QWEN),
    "qwen3.8-27b_decode_128k": AttentionSpec("decode", 1, 1, 131072, **_QWEN),
    "qwen3.8-27b_decode_fp8_cache": AttentionSpec(
        "decode", 16, 1, 8192, **_QWEN, stored="float8_e4m3fn"
    ),
    "kimi-k3_prefill": AttentionSpec("prefill", 1, 2048, 8192, **_K3),
    "kimi-k3_decode": AttentionSpec("decode", 4, 1, 8192, **_K3),
    "kimi-linear_prefill": AttentionSpec("prefill", 1, 2048, 8192, **_LINEAR),
    "kimi-linear_decode": AttentionSpec("decode", 16, 1, 8192, **_LINEAR),
    "demo_prefill": AttentionSpec("prefill", 1, 2048, 4096, **_DEMO),
    "demo_decode": AttentionSpec("decode", 8, 1, 4096, **_DEMO),
    "public_d128_prefill": AttentionSpec("prefill", 1, 4096, 4096, **_WIDE),
    "public_d256_prefill": AttentionSpec(
        "prefill", 1, 4096, 4096, heads=8, key_heads=8, width=256, v_width=256
    ),
    "public_d256_decode": AttentionSpec(
        "decode", 64, 1, 4096, heads=8, key_heads=2, width=256, v_width=256
    ),
}

_GDN_QWEN: dict[str, Any] = dict(key_heads=16, value_heads=48, key_dim=128, value_dim=128)
_KDA_K3: dict[str, Any] = dict(
    key_heads=96, value_heads=96, key_dim=128, value_dim=128, per_channel=True
)
_KDA_LINEAR: dict[str, Any] = dict(
    key_heads=32, value_heads=32, key_dim=128, value_dim=128, per_channel=True
)
_GDN_DEMO: dict[str, Any] = dict(key_heads=2, value_heads=4, key_dim=64, value_dim=64)

DELTA_RULE: dict[str, DeltaRuleSpec] = {
    "qwen3.8-27b_chunked": DeltaRuleSpec("chunked", 1, 2048, **_GDN_QWEN),
    "qwen3.8-27b_recurrent": DeltaRuleSpec("recurrent", 16, 1, **_GDN_QWEN),
    "kimi-k3_chunked": DeltaRuleSpec("chunked", 1, 2048, **_KDA_K3),
    "kimi-k3_recurrent": DeltaRuleSpec("recurrent", 16, 1, **_KDA_K3),
    "kimi-linear_chunked": DeltaRuleSpec("chunked", 1, 2048, **_KDA_LINEAR),
    "kimi-linear_recurrent": DeltaRuleSpec("recurrent", 16, 1, **_KDA_LINEAR),
    "demo_chunked": DeltaRuleSpec("chunked", 1, 2048, **_GDN_DEMO),
    "demo_recurrent": DeltaRuleSpec("recurrent", 8, 1, **_GDN_DEMO),
    "public_hv8_chunked": DeltaRuleSpec("chunked", 1, 4096, 2, 8, 128, 128),
    "public_hv64_chunked": DeltaRuleSpec("chunked", 1, 4096, 16, 64, 128, 128),
    "public_hv64_recurrent": DeltaRuleSpec("recurrent", 64, 1, 16, 64, 128, 128),
}

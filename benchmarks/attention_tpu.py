"""Attention for TPU beside jax's own flash and splash attention, as contenders of kernels.py.

Public kernels take every head with keys of its own: grouped queries are compared at N = G, and
`share` shows what our kernel gains where they are grouped. `full`: every query sees every key, as
in a prefill window far behind its prefix. Shapes are short and of two
heads, because the profiler simulates every grid step; cycles grow with heads and key blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.attention import AttentionFormats, mosaic_tpu
from pallas_kernels.attention.tiles import choose_tpu
from pallas_kernels.formats import BF16, E4M3_448, F32

# T, S, N, G, H, Hv, causal
CASES: dict[str, tuple[int, int, int, int, int, int, bool]] = {
    "prefill d128 causal": (2048, 2048, 2, 2, 128, 128, True),
    "prefill d256 causal": (2048, 2048, 2, 2, 256, 256, True),
    "prefill d128 full": (1024, 2048, 2, 2, 128, 128, False),
    "prefill d256 full": (1024, 2048, 2, 2, 256, 256, False),
    "prefill d256 share 6": (512, 2048, 6, 1, 256, 256, False),
}
_P = {"ours p=bf16": BF16, "ours p=fp8*448": E4M3_448, "ours p=f32": F32}
_PUBLIC = ("jax flash", "jax splash")


def contenders(case: str) -> tuple[str, ...]:
    """Ours first: the last ones are what they are compared with."""
    heads, groups = CASES[case][2:4]
    return (*_P, *(_PUBLIC if heads == groups else ()))


def public(contender: str) -> bool:
    return contender in _PUBLIC


def work(case: str) -> tuple[float, float]:
    """(floating-point operations, bytes of HBM traffic at the least) of one call."""
    tokens, capacity, heads, groups, width, v_width, causal = CASES[case]
    pairs = tokens * (capacity - (tokens - 1) / 2 if causal else capacity)
    moved = 2 * (tokens * heads * width + capacity * groups * (width + v_width))
    return 2 * heads * pairs * (width + v_width), moved + 4 * tokens * heads * v_width


def build(
    case: str, contender: str, device_kind: str
) -> tuple[Callable[..., jax.Array], tuple[Any, ...]]:
    """(function, argument shapes) to compile for a TPU of that kind."""
    tokens, capacity, heads, groups, width, v_width, causal = CASES[case]

    def shape(*axes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(axes, jnp.bfloat16)

    if contender in _P:
        formats = AttentionFormats(q=BF16, k=BF16, v=BF16, p=_P[contender])
        offset = capacity - tokens if causal else capacity
        lengths = jnp.full((1,), offset, jnp.int32), jnp.full((1,), capacity, jnp.int32)

        def ours(q, k, v):
            return mosaic_tpu.attention(
                q, k, v, q_offset=lengths[0], kv_length=lengths[1], formats=formats,
                tiles=choose_tpu(q, k, formats, device_kind), fixed=(offset, capacity),
            )  # fmt: skip

        cache = (1, capacity, groups)
        return ours, (
            shape(1, tokens, heads, width), shape(*cache, width), shape(*cache, v_width)
        )  # fmt: skip
    function = {"jax flash": _flash, "jax splash": _splash}[contender]
    rows = (heads, tokens, width), (heads, capacity, width), (heads, capacity, v_width)
    return functools.partial(function, causal=causal), tuple(shape(*axes) for axes in rows)


def _flash(q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.flash_attention import BlockSizes, flash_attention

    block_q, block_k = min(1024, q.shape[1]), 512
    sizes = BlockSizes(block_q=block_q, block_k_major=1024, block_k=block_k, block_b=1)
    return flash_attention(
        q[None], k[None], v[None], causal=causal, sm_scale=q.shape[-1] ** -0.5, block_sizes=sizes
    )


def _splash(q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    shape = (q.shape[1], k.shape[1])
    mask = masks.CausalMask(shape, offset=shape[1] - shape[0]) if causal else masks.FullMask(shape)
    sizes = kernel.BlockSizes(block_q=1024, block_kv=1024, block_kv_compute=512)
    splash = kernel.make_splash_mha(
        masks.MultiHeadMask([mask] * q.shape[0]), block_sizes=sizes, head_shards=1, q_seq_shards=1
    )
    # Splash has no softmax scale of its own.
    return splash(q * jnp.bfloat16(q.shape[-1] ** -0.5), k, v)

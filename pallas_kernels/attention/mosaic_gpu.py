"""Flash attention for NVIDIA GPUs (Pallas, Mosaic GPU): prefill and decode, Hopper and Blackwell.

The softmax step of mosaic_tpu.py on a warpgroup's matrix units. Here is what a call goes through in
front of its kernel; mosaic_gpu_walk has what a block does on either generation, mosaic_gpu_hopper
and mosaic_gpu_blackwell the products.

Operands are bfloat16: the units have no float32 product, only TF32. Float32 and float16 P are cut
into bfloat16 pieces, which is exact, so that every `p` format is there.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention import mosaic_gpu_blackwell, mosaic_gpu_hopper, mosaic_gpu_walk
from pallas_kernels.attention.formats import AttentionFormats
from pallas_kernels.attention.operands import Operands, prepare
from pallas_kernels.attention.tiles import (
    GPU_ROWS,
    GPU_SCORES,
    Tiles,
    choose_gpu,
    gpu_columns,
)

# By compute capability, the keys of GPU_ROWS.
_FAMILIES = {"9.0": mosaic_gpu_hopper, "10.0": mosaic_gpu_blackwell}
_SHARED_BYTES = 226 * 1024  # that a block can have on either, less its barriers


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    q_offset: jax.Array,
    kv_length: jax.Array,
    scale: float | jax.Array | None = None,
    k_scale: float | jax.Array = 1.0,
    v_scale: float | jax.Array = 1.0,
    formats: AttentionFormats = AttentionFormats(),  # noqa: B008 - frozen
    tiles: Tiles | None = None,
    capability: str = "9.0",
    interpret: Any = None,
    return_lse: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention outputs [B, T, N, Hv] float32; arguments as `pallas_kernels.attention.prefill`.

    `tiles` None is `tiles.choose_gpu`. `capability`: "9.0" the kernel of Hopper, "10.0" that of
    Blackwell. `interpret`: `plgpu.InterpretGPUParams(...)` (jax 0.12) runs it without a GPU.
    NotImplementedError for formats, tiles or widths that it has not.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    rows = GPU_ROWS[capability]
    tiles = choose_gpu(q, k, v, formats, capability) if tiles is None else tiles
    _refuse(q, k, v, formats, tiles, rows)
    operands = prepare(q, k, v, scale, k_scale, v_scale, formats, tiles, rows)
    _refuse_operands(operands)
    if not hasattr(plgpu, "store"):
        raise NotImplementedError(
            f"mosaic_gpu attention: jax {jax.__version__} cannot store in a layout of choice;"
            " install jax 0.12 or newer (Python 3.12 or newer), or use 'xla'."
        )
    partial = return_lse or tiles.splits > 1
    outs = _call(
        _FAMILIES[capability], operands, q_offset, kv_length, formats, tiles, interpret, partial
    )
    if not partial:
        return operands.unpack(outs[0][0])
    acc, sums, maxima = outs
    merged = operands.merge(acc, sums[..., None], maxima[..., None])
    return merged if return_lse else merged[0]


def _refuse(
    q: jax.Array, k: jax.Array, v: jax.Array, formats: AttentionFormats, tiles: Tiles, rows: int
) -> None:
    """NotImplementedError naming the first dtype, width, format or tile that is not there."""
    where = "mosaic_gpu attention:"
    for name, array in (("q", q), ("k", k), ("v", v)):
        if array.dtype == jnp.float64:
            raise NotImplementedError(
                f"{where} {name} is float64; it computes in float32. 'reference' takes float64."
            )
    for name, width in (("q and k", q.shape[-1]), ("v", v.shape[-1])):
        if width % 64 or width > 256:
            raise NotImplementedError(
                f"{where} {name} of width {width}; multiples of 64 up to 256 fit the swizzled"
                " shared memory."
            )
    for site in ("m", "l", "acc"):
        if not getattr(formats, site).is_exact:
            raise NotImplementedError(
                f"{where} formats.{site}={getattr(formats, site)} is not f32: the running maximum,"
                " sum and accumulator stay float32 here; use 'xla' to emulate."
            )
    p = formats.p
    if p.dtype == "float16" and p.scale * 2**formats.rescale_threshold >= 65_520:
        raise NotImplementedError(
            f"{where} formats.p={p} with rescale_threshold={formats.rescale_threshold} overflows"
            " float16."
        )
    steps = [keys for keys in (64, 128) if keys * rows <= GPU_SCORES]
    allowed = " or ".join(map(str, steps))
    if not formats.is_tile_independent and tiles.block_k != formats.block_k:
        raise NotImplementedError(
            f"{where} formats.block_k={formats.block_k}: bits of these formats depend on it, and a"
            f" softmax step holds {tiles.block_k} keys here ({allowed} in registers)."
        )
    if tiles.block_k not in steps or tiles.heads * tiles.block_q > rows:
        raise NotImplementedError(
            f"{where} {tiles} does not fit: block_k is {allowed}, heads * block_q at most {rows}."
        )
    loaded = mosaic_gpu_walk.STAGES * tiles.block_k * (q.shape[-1] + gpu_columns(v.shape[-1]))
    p_size = mosaic_gpu_walk.pieces(p) * rows * tiles.block_k
    if 2 * (rows * q.shape[-1] + loaded + p_size) > _SHARED_BYTES:
        raise NotImplementedError(
            f"{where} {tiles} with q and k of width {q.shape[-1]} and p={p} is more than the"
            f" {_SHARED_BYTES} bytes of shared memory; 64 keys a step fit (formats.block_k)."
        )
    if tiles.fp8_dot:
        raise NotImplementedError(f"{where} {tiles}: no fp8_dot here.")


def _refuse_operands(operands: Operands) -> None:
    for name in "qkv":
        array = getattr(operands, name)
        if array.dtype not in (jnp.bfloat16, jnp.float8_e4m3fn):
            raise NotImplementedError(
                f"mosaic_gpu attention: {name} is {array.dtype} after formats.{name}; only values"
                " of bfloat16 or float8_e4m3fn are multiplied exactly (float32 would be TF32)."
            )


def _call(
    family: Any,
    operands: Operands,
    q_offset: jax.Array,
    kv_length: jax.Array,
    formats: AttentionFormats,
    tiles: Tiles,
    interpret: Any,
    partial: bool,
) -> tuple[jax.Array, ...]:
    """Packed rows per split: (o [splits, B, U, blocks, rows, Hv],), or where it is `partial` acc
    with l and m [splits, B, U, blocks, rows]."""
    q = operands.q
    # The units take both operands in one dtype of 16 bits.
    k, v = (x.astype(jnp.bfloat16) for x in (operands.k, operands.v))
    batch, units, blocks, rows, width = q.shape
    v_width, block_k = v.shape[3], tiles.block_k
    columns = gpu_columns(v_width)
    stages = mosaic_gpu_walk.STAGES
    barrier = functools.partial(plgpu.Barrier, orders_tensor_core=family.ORDERS_TENSOR_CORE)
    copies = dict(
        q_smem=mosaic_gpu_walk.shared(rows, width),
        k_smem=mosaic_gpu_walk.shared(stages, block_k, width),
        v_smem=mosaic_gpu_walk.shared(stages, block_k, columns),
        q_barrier=barrier(),
        k_barriers=barrier(num_barriers=stages),
        v_barriers=barrier(num_barriers=stages),
    )

    def kernel(*refs: Any, products: dict[str, Any], **copies: Any) -> None:
        walk = mosaic_gpu_walk.Walk(
            *refs, **copies, formats=formats, tiles=tiles, tokens=operands.tokens,
            layout=family.LAYOUT,
        )  # fmt: skip
        family.kernel(walk, **products)

    factors = jnp.stack([operands.score_factor, operands.log2_factor, operands.shift])
    shape = (tiles.splits, batch, units, blocks, rows)
    outs = [(*shape, v_width), shape, shape] if partial else [(*shape, v_width)]
    run = plgpu.kernel(
        kernel,
        out_type=tuple(jax.ShapeDtypeStruct(out, jnp.float32) for out in outs),
        grid=(blocks, tiles.splits, v_width // columns, units, batch),
        grid_names=("block", "split", "part", "unit", "batch"),
        scratch_types=dict(**copies, products=family.scratch(rows, columns, formats, tiles)),
        compiler_params=plgpu.CompilerParams(lowering_semantics=mgpu.LoweringSemantics.Lane),
        **({} if interpret is None else {"interpret": interpret}),
    )
    return run(q_offset, jnp.minimum(kv_length, k.shape[2]), factors, q, k, v)

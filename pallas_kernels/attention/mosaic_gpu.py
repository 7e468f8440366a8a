"""Flash attention for NVIDIA GPUs (Pallas, Mosaic GPU, sm_90a): prefill and decode.

The softmax step of mosaic_tpu.py on Hopper's warpgroup matrix units: a block of one warpgroup holds
64 rows of scores - `heads` query heads of one key head times `block_q` tokens - and walks the keys
it can see, `block_k` at a time, K and V arriving two steps ahead through shared memory.

- Operands are bfloat16: the units have no float32 product, only TF32. Float32 and float16 P are cut
  into bfloat16 pieces, which is exact, so that every `p` format is there.
- P goes through shared memory to the second product. Feeding it from registers is quicker, but the
  interpreter that tests this kernel cannot.
- A block takes at most 128 of V's columns, 64 at a time: more accumulators spill. Hv = 256 costs
  its scores twice.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import kernel_rounding
from pallas_kernels.attention.formats import AttentionFormats
from pallas_kernels.attention.operands import Operands, prepare
from pallas_kernels.attention.tiles import Tiles, choose_gpu
from pallas_kernels.formats import Format

ROWS = 64  # of a warpgroup's product
_STAGES = 2
_COLUMNS = 64
_LOWEST = float(jnp.finfo(jnp.float32).min)


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
    interpret: Any = None,
) -> jax.Array:
    """Attention outputs [B, T, N, Hv] float32; arguments as `pallas_kernels.attention.prefill`.

    `tiles` None is `tiles.choose_gpu`. `interpret`: `plgpu.InterpretGPUParams(...)` (jax 0.12) runs
    the kernel without a GPU. NotImplementedError for formats, tiles or widths that it has not.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    tiles = choose_gpu(q, k, formats) if tiles is None else tiles
    _refuse(q, k, v, formats, tiles)
    operands = prepare(q, k, v, scale, k_scale, v_scale, formats, tiles, ROWS)
    _refuse_operands(operands)
    if not hasattr(plgpu, "store"):
        raise NotImplementedError(
            f"mosaic_gpu attention: jax {jax.__version__} cannot store in a layout of choice;"
            " install jax 0.12 or newer (Python 3.12 or newer), or use 'xla'."
        )
    return operands.unpack(_call(operands, q_offset, kv_length, formats, tiles, interpret))


def _refuse(
    q: jax.Array, k: jax.Array, v: jax.Array, formats: AttentionFormats, tiles: Tiles
) -> None:
    """NotImplementedError naming the first width, format or tile that the kernel has not."""
    where = "mosaic_gpu attention:"
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
    if not formats.is_tile_independent and tiles.block_k != formats.block_k:
        raise NotImplementedError(
            f"{where} formats.block_k={formats.block_k}: bits of these formats depend on it, and a"
            f" softmax step holds {tiles.block_k} keys here (64 or 128 in registers)."
        )
    if tiles.block_k not in (64, 128) or tiles.heads * tiles.block_q > ROWS:
        raise NotImplementedError(
            f"{where} {tiles} does not fit: block_k is 64 or 128, heads * block_q at most {ROWS}."
        )
    if tiles.splits != 1 or tiles.fp8_dot:
        raise NotImplementedError(f"{where} {tiles}: neither splits nor fp8_dot here.")


def _refuse_operands(operands: Operands) -> None:
    for name in "qkv":
        array = getattr(operands, name)
        if array.dtype not in (jnp.bfloat16, jnp.float8_e4m3fn):
            raise NotImplementedError(
                f"mosaic_gpu attention: {name} is {array.dtype} after formats.{name}; only values"
                " of bfloat16 or float8_e4m3fn are multiplied exactly (float32 would be TF32)."
            )


def _call(
    operands: Operands,
    q_offset: jax.Array,
    kv_length: jax.Array,
    formats: AttentionFormats,
    tiles: Tiles,
    interpret: Any,
) -> jax.Array:
    """Packed rows [B, U, blocks, 64, Hv]."""
    q = operands.q
    # Hopper's products take both operands in one dtype of 16 bits.
    k, v = (x.astype(jnp.bfloat16) for x in (operands.k, operands.v))
    batch, units, blocks, _, width = q.shape
    pieces = _pieces(formats.p)
    v_width, block_k = v.shape[3], tiles.block_k
    # An accumulator of 256 columns spills: two blocks share them, and both compute the scores.
    columns = v_width if v_width <= 128 else math.gcd(v_width, 128)
    parts = v_width // columns
    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))

    def shared(*shape: int) -> Any:
        return plgpu.SMEM(shape, jnp.bfloat16, transforms=transforms)

    factors = jnp.stack([operands.score_factor, operands.log2_factor, operands.shift])
    kernel = plgpu.kernel(
        functools.partial(_kernel, formats=formats, tiles=tiles, tokens=operands.tokens),
        out_type=jax.ShapeDtypeStruct((batch, units, blocks, ROWS, v_width), jnp.float32),
        grid=(blocks, parts, units, batch),
        grid_names=("block", "part", "unit", "batch"),
        scratch_types=dict(
            q_smem=shared(ROWS, width),
            k_smem=shared(_STAGES, block_k, width),
            v_smem=shared(_STAGES, block_k, columns),
            p_smem=shared(pieces, ROWS, block_k),
            q_barrier=plgpu.Barrier(),
            k_barriers=plgpu.Barrier(num_barriers=_STAGES),
            v_barriers=plgpu.Barrier(num_barriers=_STAGES),
        ),
        compiler_params=plgpu.CompilerParams(lowering_semantics=mgpu.LoweringSemantics.Lane),
        **({} if interpret is None else {"interpret": interpret}),
    )
    return kernel(q_offset, jnp.minimum(kv_length, k.shape[2]), factors, q, k, v)


def _pieces(fmt: Format) -> int:
    """bfloat16 arrays whose sum is P in this format."""
    if kernel_rounding.fits_bfloat16(fmt):
        return 1
    return 2 if fmt.dtype == "float16" or (fmt.mantissa_bits or 23) <= 15 else 3


def _kernel(
    offset_ref, length_ref, factors_ref, q_ref, k_ref, v_ref, o_ref, *, q_smem, k_smem, v_smem,
    p_smem, q_barrier, k_barriers, v_barriers, formats, tiles, tokens,
) -> None:  # fmt: skip
    """One block of 64 rows: q_ref [B, U, blocks, 64, H], k_ref [B, G, S, H], v_ref alike."""
    b, unit, part, i = (jax.lax.axis_index(x) for x in ("batch", "unit", "part", "block"))
    block_k, width = tiles.block_k, v_smem.shape[2]
    head = jax.lax.div(unit, jnp.int32(q_ref.shape[1] // k_ref.shape[1]))
    first, length = offset_ref[b] + i * tiles.block_q, length_ref[b]
    last = jnp.minimum(first + tiles.block_q, offset_ref[b] + tokens)
    # Every row sees the keys below `seen`; none sees one from `end` on.
    seen = jnp.maximum(jnp.minimum(first + 1, length), 0)
    end = jnp.maximum(jnp.minimum(last, length), 0)
    steps = jax.lax.div(end + (block_k - 1), jnp.int32(block_k))
    whole = jax.lax.div(seen, jnp.int32(block_k))

    def fetch(ref: Any, smem: Any, barriers: Any, step: Any) -> None:
        slot = jax.lax.rem(step, jnp.int32(_STAGES))
        keys = pl.ds(step * block_k, block_k)
        columns = pl.ds((part if ref is v_ref else 0) * width, smem.shape[2])
        plgpu.copy_gmem_to_smem(ref.at[b, head, keys, columns], smem.at[slot], barriers.at[slot])

    plgpu.copy_gmem_to_smem(q_ref.at[b, unit, i], q_smem, q_barrier)
    for ahead in range(_STAGES):

        @pl.when(ahead < steps)
        def _(ahead=ahead):
            fetch(k_ref, k_smem, k_barriers, jnp.int32(ahead))
            fetch(v_ref, v_smem, v_barriers, jnp.int32(ahead))

    plgpu.barrier_wait(q_barrier)
    step = functools.partial(
        _softmax_step, factors_ref, q_smem, k_smem, v_smem, p_smem, k_barriers, v_barriers,
        formats=formats, block_k=block_k,
        refill=lambda n, ref, smem, barriers: pl.when(n + _STAGES < steps)(
            lambda: fetch(ref, smem, barriers, n + _STAGES)
        ),
        refs=(k_ref, v_ref), position=(first, length, tiles.block_q),
    )  # fmt: skip
    row_layout = plgpu.Layout.WGMMA.reduce(1)
    carry = (
        plgpu.layout_cast(jnp.full((ROWS,), _LOWEST, jnp.float32), row_layout),
        plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), row_layout),
        tuple(
            plgpu.layout_cast(jnp.zeros((ROWS, _COLUMNS), jnp.float32), plgpu.Layout.WGMMA)
            for _ in range(width // _COLUMNS)
        ),
    )
    carry = jax.lax.fori_loop(0, whole, functools.partial(step, masked=False), carry)
    _, total, accs = jax.lax.fori_loop(whole, steps, functools.partial(step, masked=True), carry)
    total = jnp.where(total == 0, jnp.float32(1), total)
    for column, acc in zip(range(0, width, _COLUMNS), accs, strict=True):
        o = acc / jax.lax.broadcast_in_dim(total, acc.shape, [0])
        columns = pl.ds(part * width + column, _COLUMNS)
        plgpu.store(o_ref.at[b, unit, i, :, columns], o, optimized=False)


def _softmax_step(
    factors_ref, q_smem, k_smem, v_smem, p_smem, k_barriers, v_barriers, n, carry, *, formats,
    block_k, refill, refs, position, masked,
) -> Any:  # fmt: skip
    """Key tile n: (running maximum [64], sum [64], accumulator in columns of 64) after it."""
    m, total, accs = carry
    shape = (ROWS, block_k)
    slot = jax.lax.rem(n, jnp.int32(_STAGES))
    factor = factors_ref[1]

    def scores(acc_ref: Any) -> jax.Array:
        plgpu.wgmma(acc_ref, q_smem, k_smem.at[slot].T)
        return acc_ref[...]

    plgpu.barrier_wait(k_barriers.at[slot])
    s = pl.run_scoped(scores, plgpu.ACC(shape, jnp.float32))
    refill(n, refs[0], k_smem, k_barriers)
    if not formats.scores.is_exact:
        s = kernel_rounding.round_to(s * factors_ref[0], formats.scores)
    if masked:
        first, length, block_q = position
        row, key = (
            plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)
            for axis in (0, 1)
        )
        token = first + (row & jnp.int32(block_q - 1))
        key = key + n * block_k
        s = jnp.where((key <= token) & (key < length), s, -jnp.inf)

    m_new = jnp.maximum(m, jnp.max(s, axis=1) - factors_ref[2])
    if formats.rescale_threshold > 0:
        risen = (m_new - m) * factor > jnp.float32(formats.rescale_threshold)
        m_new = jnp.where(risen, m_new, m)
    p = jnp.exp2((s - jax.lax.broadcast_in_dim(m_new, shape, [0])) * factor)
    alpha = jnp.exp2((m - m_new) * factor)
    fmt = formats.p
    most = fmt.scale * 2.0**formats.rescale_threshold
    rounded = kernel_rounding.round_probabilities(p, fmt, most)
    total = total * alpha + jnp.sum(rounded if formats.row_sum == "rounded" else p, axis=1)
    pieces = kernel_rounding.bfloat16_pieces(rounded, _pieces(fmt))
    for index, piece in enumerate(pieces):
        p_smem[index] = piece
    plgpu.barrier_wait(v_barriers.at[slot])
    if masked:

        @pl.when((n + 1) * block_k > position[1])
        def _():
            _clear(v_smem.at[slot], position[1] - n * block_k)

    plgpu.commit_smem()
    columns = range(0, v_smem.shape[2], _COLUMNS)
    grown = []
    for column, acc in zip(columns, accs, strict=True):

        def values(acc_ref: Any, column: int = column) -> jax.Array:
            for index in range(len(pieces)):
                v = v_smem.at[slot, :, pl.ds(column, _COLUMNS)]
                plgpu.wgmma(acc_ref, p_smem.at[index], v)
            return acc_ref[...]

        pv = pl.run_scoped(values, plgpu.ACC((ROWS, _COLUMNS), jnp.float32))
        grown.append(acc * jax.lax.broadcast_in_dim(alpha, acc.shape, [0]) + pv)
    refill(n, refs[1], v_smem, v_barriers)
    return m_new, total, tuple(grown)


def _clear(v_ref: Any, used: jax.Array) -> None:
    """Zeros in the rows of v_ref [block_k, Hv] from `used` on: 0 * NaN is NaN."""
    block_k, width = v_ref.shape
    for start in range(0, block_k, ROWS):
        for column in range(0, width, _COLUMNS):
            part = v_ref.at[pl.ds(start, ROWS), pl.ds(column, _COLUMNS)]
            v = plgpu.load(part, layout=plgpu.Layout.WGMMA)
            row = plgpu.broadcasted_iota(jnp.int32, v.shape, 0, layout=plgpu.Layout.WGMMA)
            wide = jnp.where(row + start < used, v.astype(jnp.float32), jnp.float32(0))
            plgpu.store(part, wide.astype(v.dtype))

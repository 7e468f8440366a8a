"""Flash attention for TPU (Pallas, Mosaic): prefill, and decode with split keys.

One kernel serves both. A grid step holds rows of scores - `heads` query heads of one key head times
`block_q` tokens - and meets `block_kv` keys, `block_k` at a time (FlashAttention-2,
arXiv:2307.08691, with the rounding sites of `AttentionFormats`):

    s = q . k                          m' = max(m, max s - shift)
    p = exp2((s - m') c)               c = scale * k_scale * log2(e)
    l' = l exp2((m - m') c) + sum p    acc' = acc exp2((m - m') c) + round(p) . v
    o = acc / l

- Scores stay as the dot leaves them: the softmax's scale, the cache's scale and log2(e) are the one
  factor c, and `shift` = log2(p.scale) / c lifts P onto the scaled grid, so that e4m3 x448 costs no
  multiplication over e4m3. l and acc both carry p.scale, which their quotient cancels.
- l is summed per lane, and over lanes once at the end.
- Operands whose values are bfloat16 (bf16 formats, bf16 and fp8 caches, e4m3 P) are multiplied as
  bfloat16. Float32 P on a bfloat16 V is cut into three bfloat16 pieces, which is exact.
- Key blocks that no query of the step can see are neither loaded nor computed, those that all of
  them see need no mask; the grid ends at the last key in use.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.attention.formats import AttentionFormats
from pallas_kernels.attention.mosaic_tpu_step import LANES, Block, Plan, Refs, meet
from pallas_kernels.attention.operands import Operands, prepare
from pallas_kernels.attention.tiles import Tiles, choose, choose_tpu, round_up

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
    interpret: Any = False,
    fixed: tuple[int, int] | None = None,
    return_lse: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention outputs [B, T, N, Hv] float32; arguments as `pallas_kernels.attention.prefill`.

    `tiles` None is `tiles.choose`. With rounded P, more than one split changes bits: every split
    then has a running maximum of its own. `interpret` is `pallas_call`'s: False compiles for TPU,
    True runs anywhere, `pltpu.InterpretParams(...)` also watches memory and races. `fixed`
    (q_offset, kv_length) builds them into the program, in place of the arrays: the compiler's cycle
    estimates follow no branch on a value it does not know.

    NotImplementedError for formats or tiles that the kernel has not.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    tiles = choose(q, k, formats) if tiles is None else tiles
    _refuse(q, k, v, formats, tiles)
    if interpret is False and tiles.block_k % LANES:
        raise NotImplementedError(
            f"mosaic_tpu attention: block_k={tiles.block_k} (formats.block_k={formats.block_k});"
            f" compiled for TPU it is a multiple of {LANES}, the lanes of a register."
        )
    operands = prepare(q, k, v, scale, k_scale, v_scale, formats, tiles, tiles.rows)
    partial = return_lse or tiles.splits > 1
    outs = _call(operands, q_offset, kv_length, formats, tiles, interpret, fixed, partial)
    if not partial:
        return operands.unpack(outs[0][0])
    merged = operands.merge(*outs)
    return merged if return_lse else merged[0]


def mosaic_tpu(
    q: jax.Array, k: jax.Array, v: jax.Array, **rest: Any
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """`attention` compiled for TPU. NotImplementedError on any other platform."""
    if jax.default_backend() != "tpu":
        raise NotImplementedError(
            f"mosaic_tpu attention runs on TPU; this is {jax.default_backend()!r}"
            " ('mosaic_tpu_interpret' runs the same kernel anywhere, slowly)."
        )
    tiles = choose_tpu(q, k, rest.get("formats", AttentionFormats()))
    return attention(q, k, v, tiles=tiles, **rest)


def mosaic_tpu_interpret(
    q: jax.Array, k: jax.Array, v: jax.Array, **rest: Any
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """`attention` in the plain Pallas interpreter, on any platform: for tests and for plugging in.

    Callable as `attention.prefill` and `attention.decode` are.
    """
    return attention(q, k, v, interpret=True, **rest)


def _refuse(
    q: jax.Array, k: jax.Array, v: jax.Array, formats: AttentionFormats, tiles: Tiles
) -> None:
    """NotImplementedError naming the first format or tile that the kernel has not."""
    where = "mosaic_tpu attention:"
    if jnp.float64 in (q.dtype, k.dtype, v.dtype):
        raise NotImplementedError(f"{where} float64; use 'reference'.")
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
    if not formats.is_tile_independent:
        whole = tiles.block_k >= k.shape[1] and formats.block_k >= k.shape[1]
        if tiles.block_k != formats.block_k and not whole:
            raise NotImplementedError(
                f"{where} tiles.block_k={tiles.block_k} with formats.block_k={formats.block_k}:"
                " bits of these formats depend on it."
            )
    if tiles.fp8_dot and not (p.dtype == v.dtype.name == "float8_e4m3fn" and formats.v.is_exact):
        raise NotImplementedError(
            f"{where} tiles.fp8_dot with formats.p={p} and v stored as {v.dtype}, rounded to"
            f" {formats.v}; both must be float8_e4m3fn."
        )
    if tiles.fp8_cast and p.dtype != "float8_e4m3fn":
        raise NotImplementedError(
            f"{where} tiles.fp8_cast with formats.p={p}; it casts to float8_e4m3fn."
        )


def _call(
    operands: Operands,
    q_offset: jax.Array,
    kv_length: jax.Array,
    formats: AttentionFormats,
    tiles: Tiles,
    interpret: Any,
    fixed: tuple[int, int] | None,
    partial: bool,
) -> tuple[jax.Array, ...]:
    """Packed rows per split: (o,), or where it is `partial` the (acc, l, m) of `Operands.merge`."""
    q, k, v = operands.q, operands.k, operands.v
    batch, units, blocks, rows, width = q.shape
    groups, capacity = k.shape[1:3]
    v_width = v.shape[3]
    # The grid ends at the last block that any query of the batch sees.
    if fixed is None:
        end = jnp.max(jnp.minimum(q_offset + operands.tokens, kv_length))
        used = pl.cdiv(jnp.clip(end, 1, capacity), tiles.block_kv)
    else:
        used = -(-min(fixed[0] + operands.tokens, fixed[1]) // tiles.block_kv)
    steps = pl.cdiv(used, tiles.splits)
    fixed = None if fixed is None else (*fixed, steps)
    plan = Plan(formats, tiles, operands.tokens, capacity, fixed, partial)
    factors = jnp.stack([operands.score_factor, operands.log2_factor, operands.shift])

    def key_block(b, n, i, split, j, *refs):
        offset, length, steps = plan.positions(b, *refs)
        _, end = plan.bounds(i, offset, length)
        last = jax.lax.div(jnp.maximum(end - 1, 0), jnp.int32(tiles.block_kv))
        head = jax.lax.div(n, jnp.int32(units // groups))
        return b, head, jnp.minimum(split * steps + j, last), 0

    def row_block(b, n, i, split, j, *_):
        return b, n, i, 0, 0

    def split_block(b, n, i, split, j, *_):
        return split, b, n, i, 0, 0

    shape = (tiles.splits, batch, units, blocks, rows)
    out_widths = (v_width, 1, 1) if partial else (v_width,)
    outs = pl.pallas_call(
        functools.partial(_kernel, plan=plan),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(batch, units, blocks, tiles.splits, steps),
            in_specs=[
                pl.BlockSpec((None, None, None, rows, width), row_block),
                pl.BlockSpec((None, None, tiles.block_kv, width), key_block),
                pl.BlockSpec((None, None, tiles.block_kv, v_width), key_block),
            ],
            out_specs=[
                pl.BlockSpec((None, None, None, None, rows, w), split_block) for w in out_widths
            ],
            scratch_shapes=[
                pltpu.VMEM((rows, LANES), jnp.float32),
                pltpu.VMEM((rows, plan.lanes), jnp.float32),
                pltpu.VMEM((rows, v_width), jnp.float32),
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct((*shape, w), jnp.float32) for w in out_widths],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=_vmem_limit(plan, q, k, v),
        ),
        cost_estimate=_cost(operands, plan),
        interpret=interpret,
        name=f"attention_q{tiles.block_q}x{tiles.heads}_k{tiles.block_k}_kv{tiles.block_kv}",
    )(q_offset, kv_length, jnp.full((1,), steps, jnp.int32), factors, q, k, v)
    return tuple(outs)


def _kernel(
    offset_ref, length_ref, steps_ref, factors_ref, q_ref, k_ref, v_ref, *refs, plan: Plan
) -> None:  # fmt: skip
    """One grid step: q_ref [rows, H], k_ref [block_kv, H], v_ref [block_kv, Hv]."""
    *out_refs, m_ref, l_ref, acc_ref = refs
    b, i, split, j = (pl.program_id(axis) for axis in (0, 2, 3, 4))
    tiles = plan.tiles
    offset, length, steps = plan.positions(b, offset_ref, length_ref, steps_ref)
    seen, end = plan.bounds(i, offset, length)
    start = (split * steps + j) * tiles.block_kv

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, _LOWEST, jnp.float32)
        l_ref[...] = jnp.zeros(l_ref.shape, jnp.float32)
        acc_ref[...] = jnp.zeros(acc_ref.shape, jnp.float32)

    refs = Refs(factors_ref, q_ref, k_ref, v_ref, m_ref, l_ref, acc_ref)
    step = functools.partial(meet, refs, plan)
    first = offset + i * tiles.block_q
    whole = start + tiles.block_kv <= seen
    edge = ~whole & (start < end)

    @pl.when(whole)
    def _():
        step(plan.whole_blocks)

    @pl.when((start + tiles.block_kv > length) & (start < end))
    def _():
        # 0 * NaN is NaN: unused slots are cleared, not only masked in the scores.
        v = v_ref[...]
        wide = v.astype(jnp.bfloat16) if v.dtype.itemsize == 1 else v  # float8 has no select
        row = jax.lax.broadcasted_iota(jnp.int32, v.shape, 0)
        v_ref[...] = jnp.where(row < length - start, wide, 0).astype(v.dtype)

    if plan.diagonal_blocks:
        # The first query's own key comes first: where the mask cuts is known.
        aligned = (first == start) & (start + min(tiles.block_q, tiles.block_kv) <= length)

        @pl.when(edge & aligned)
        def _():
            step(plan.diagonal_blocks)

        edge &= ~aligned

    @pl.when(edge)
    def _():
        for begin in range(0, tiles.rows, plan.edge_rows):
            # Row r holds token r % block_q, and sees the keys below its limit.
            row = begin + jax.lax.broadcasted_iota(jnp.int32, (plan.edge_rows, LANES), 0)
            limit = jnp.minimum(first + 1 + (row & jnp.int32(tiles.block_q - 1)), length)
            last = min(begin + plan.edge_rows, tiles.block_q)
            for sub in range(0, tiles.block_kv, tiles.block_k):

                @pl.when(start + sub < jnp.minimum(first + last, end))
                def _(begin=begin, limit=limit, sub=sub):
                    block = Block(begin, plan.edge_rows, sub, tiles.block_k)
                    step([block], limit - (start + sub))

    @pl.when(j == steps - 1)
    def _():
        total = jnp.sum(l_ref[...], axis=1, keepdims=True)
        acc = acc_ref[...]
        if plan.partial:
            for ref, value in zip(out_refs, (acc, total, m_ref[:, :1]), strict=True):
                ref[...] = value
        else:
            out_refs[0][...] = acc / jnp.where(total == 0, jnp.float32(1), total)


def _vmem_limit(plan: Plan, q: jax.Array, k: jax.Array, v: jax.Array) -> int:
    """Bytes of vector memory the kernel may take: its blocks twice, state, and step temporaries."""
    tiles = plan.tiles
    rows, width, v_width = tiles.rows, round_up(q.shape[-1], 128), round_up(v.shape[-1], 128)
    blocks = rows * (width * q.dtype.itemsize + v_width * 4)
    blocks += tiles.block_kv * (width * k.dtype.itemsize + v_width * v.dtype.itemsize)
    state = 4 * rows * (2 * LANES + v_width)
    scores = 4 * rows * round_up(tiles.block_k, 128)
    return min(2 * blocks + state + 8 * scores + (4 << 20), 100 << 20)


def _cost(operands: Operands, plan: Plan) -> pl.CostEstimate:
    """As if every query saw half of the cache: XLA schedules by it, nothing else reads it."""
    q, k, v = operands.q, operands.k, operands.v
    pairs = math.prod(q.shape[:4]) * k.shape[2] // 2
    return pl.CostEstimate(
        flops=2 * pairs * (q.shape[-1] + v.shape[-1]),
        transcendentals=pairs,
        bytes_accessed=q.nbytes + k.nbytes + v.nbytes + math.prod(q.shape[:4]) * v.shape[-1] * 4,
    )

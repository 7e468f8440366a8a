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

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import kernel_rounding
from pallas_kernels.attention.formats import AttentionFormats
from pallas_kernels.attention.operands import Operands, prepare
from pallas_kernels.attention.tiles import Tiles, choose, choose_tpu, round_up

_LANES = 128
_LOG2_E = math.log2(math.e)
_CORNER = 256  # rows that share a softmax step on the diagonal: a matrix unit's
_MOST_BLOCKS = 12
_LOWEST = float(jnp.finfo(jnp.float32).min)
_NT = (((1,), (1,)), ((), ()))  # [m, k] x [n, k] -> [m, n]
_NN = (((1,), (0,)), ((), ()))  # [m, k] x [k, n] -> [m, n]


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
    if interpret is False and tiles.block_k % _LANES:
        raise NotImplementedError(
            f"mosaic_tpu attention: block_k={tiles.block_k} (formats.block_k={formats.block_k});"
            f" compiled for TPU it is a multiple of {_LANES}, the lanes of a register."
        )
    operands = prepare(q, k, v, scale, k_scale, v_scale, formats, tiles, tiles.rows)
    partial = return_lse or tiles.splits > 1
    accs, sums, maxima = _call(
        operands, q_offset, kv_length, formats, tiles, interpret, fixed, partial
    )
    if not partial:
        return operands.unpack(accs[0])
    o, lse = _merge(accs, sums, maxima, operands.log2_factor)
    o = operands.unpack(o)
    return (o, operands.by_token(lse)[..., 0]) if return_lse else o


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


class _Block(NamedTuple):
    """`count` rows from `begin` against `width` of the loaded keys from `sub`; `diagonal` where
    row r of the block sees all but the last count - 1 - r of them."""

    begin: int
    count: int
    sub: int
    width: int
    diagonal: bool = False


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What the kernel body needs to know at trace time.

    `partial`: acc, l and m are given as they are, in place of acc / l.
    """

    formats: AttentionFormats
    tiles: Tiles
    tokens: int
    capacity: int
    fixed: tuple[int, int, int] | None
    partial: bool

    def positions(self, b, offset_ref, length_ref, steps_ref, *_):
        """(q_offset, kv_length) of batch row b, and grid steps of a split."""
        if self.fixed is not None:
            return tuple(map(jnp.int32, self.fixed))
        return offset_ref[b], jnp.minimum(length_ref[b], self.capacity), steps_ref[0]

    @property
    def edge_rows(self) -> int:
        """Rows that share a softmax step where the diagonal cuts the block: those of one head can
        be parted by token, so that the early ones skip the late keys."""
        return min(self.tiles.block_k, self.tiles.rows) if self.can_part else self.tiles.rows

    @property
    def can_part(self) -> bool:
        return self.tiles.heads == 1 and self.tiles.rows % self.tiles.block_k == 0

    @property
    def whole_blocks(self) -> list[_Block]:
        """Every row against every loaded key, in halves of the rows: see `_meet`."""
        tiles = self.tiles
        part = tiles.rows // 2 if tiles.rows >= 512 else tiles.rows
        return [
            _Block(begin, part, sub, tiles.block_k)
            for sub in range(0, tiles.block_kv, tiles.block_k)
            for begin in range(0, tiles.rows, part)
        ]

    @property
    def diagonal_blocks(self) -> list[_Block]:
        """What the rows see where row r sees the loaded keys up to r; none where rows are not
        tokens in order, or where it would be a long program."""
        tiles = self.tiles
        count = min(_CORNER, tiles.block_k)
        if tiles.heads > 1 or tiles.rows % count or tiles.block_k % count:
            return []
        blocks = []
        for sub in range(0, tiles.block_kv, tiles.block_k):
            for begin in range(0, tiles.rows, count):
                width = min(begin + count - sub, tiles.block_k)
                if width > 0:
                    diagonal = begin + count == sub + width
                    blocks.append(_Block(begin, count, sub, width, diagonal))
        return blocks if len(blocks) <= _MOST_BLOCKS else []

    @property
    def lanes(self) -> int:
        """Partial sums of l per row."""
        return _LANES if self.tiles.block_k % _LANES == 0 else self.tiles.block_k

    def bounds(self, i, offset, length):
        """(seen, end) of query block i: all its rows see the keys below `seen`, none one from
        `end` on."""
        first = offset + i * self.tiles.block_q
        last = jnp.minimum(first + self.tiles.block_q, offset + self.tokens)
        return jnp.minimum(first + 1, length), jnp.minimum(last, length)


def _call(
    operands: Operands,
    q_offset: jax.Array,
    kv_length: jax.Array,
    formats: AttentionFormats,
    tiles: Tiles,
    interpret: Any,
    fixed: tuple[int, int] | None,
    partial: bool,
) -> tuple[list[jax.Array], list[jax.Array], list[jax.Array]]:
    """Per split: o (normalised unless `partial`), l and m, all over packed rows."""
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
    plan = _Plan(formats, tiles, operands.tokens, capacity, fixed, partial)
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
                pltpu.VMEM((rows, _LANES), jnp.float32),
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
    if not partial:
        return [outs[0][0]], [], []
    return tuple(list(out) for out in outs)


def _kernel(
    offset_ref, length_ref, steps_ref, factors_ref, q_ref, k_ref, v_ref, *refs, plan: _Plan
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

    refs = _Refs(factors_ref, q_ref, k_ref, v_ref, m_ref, l_ref, acc_ref)
    meet = functools.partial(_meet, refs, plan)
    first = offset + i * tiles.block_q
    whole = start + tiles.block_kv <= seen
    edge = ~whole & (start < end)

    @pl.when(whole)
    def _():
        meet(plan.whole_blocks)

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
            meet(plan.diagonal_blocks)

        edge &= ~aligned

    @pl.when(edge)
    def _():
        for begin in range(0, tiles.rows, plan.edge_rows):
            # Row r holds token r % block_q, and sees the keys below its limit.
            row = begin + jax.lax.broadcasted_iota(jnp.int32, (plan.edge_rows, _LANES), 0)
            limit = jnp.minimum(first + 1 + (row & jnp.int32(tiles.block_q - 1)), length)
            last = min(begin + plan.edge_rows, tiles.block_q)
            for sub in range(0, tiles.block_kv, tiles.block_k):

                @pl.when(start + sub < jnp.minimum(first + last, end))
                def _(begin=begin, limit=limit, sub=sub):
                    block = _Block(begin, plan.edge_rows, sub, tiles.block_k)
                    meet([block], limit - (start + sub))

    @pl.when(j == steps - 1)
    def _():
        total = jnp.sum(l_ref[...], axis=1, keepdims=True)
        acc = acc_ref[...]
        if plan.partial:
            for ref, value in zip(out_refs, (acc, total, m_ref[:, :1]), strict=True):
                ref[...] = value
        else:
            out_refs[0][...] = acc / jnp.where(total == 0, jnp.float32(1), total)


class _Refs(NamedTuple):
    """The kernel's arrays: factors [3], q [rows, H], k, v [block_kv, ...], the softmax's state."""

    factors: Any
    q: Any
    k: Any
    v: Any
    m: Any
    l: Any  # noqa: E741 - the papers' name
    acc: Any


def _meet(
    refs: _Refs, plan: _Plan, blocks: Sequence[_Block], limit: jax.Array | None = None
) -> None:
    """Softmax steps, one after the other. The scores of each are asked for before the step ahead of
    it is taken: the matrix units then have work while the vector units exponentiate."""
    scores = _scores(refs, plan, blocks[0])
    for n, block in enumerate(blocks):
        following = _scores(refs, plan, blocks[n + 1]) if n + 1 < len(blocks) else None
        _softmax_step(refs, plan, block, _masked(scores, block, limit))
        scores = following


def _scores(refs: _Refs, plan: _Plan, block: _Block) -> jax.Array:
    """[count, width] of the block, before masking."""
    rows, keys = pl.ds(block.begin, block.count), pl.ds(block.sub, block.width)
    s = _dot(refs.q[rows, :], refs.k[keys, :], _NT, plan.formats.dot)
    if not plan.formats.scores.is_exact:
        s = kernel_rounding.round_to(s * refs.factors[0], plan.formats.scores)
    return s


def _masked(s: jax.Array, block: _Block, limit: jax.Array | None) -> jax.Array:
    """Scores, -inf where a row does not see the key: from `limit` [count, 128] on, or above the
    diagonal of the last `count` keys."""
    if limit is not None:
        key = jax.lax.broadcasted_iota(jnp.int32, (1, block.width), 1)
        return jnp.where(key < _widen(limit, block.width), s, -jnp.inf)
    if not block.diagonal:
        return s
    seen = block.width - block.count
    row, key = (
        jax.lax.broadcasted_iota(jnp.int32, (block.count, block.count), axis) for axis in (0, 1)
    )
    corner = jnp.where(key <= row, s[:, seen:], -jnp.inf)
    return jnp.concatenate([s[:, :seen], corner], axis=1) if seen else corner


def _softmax_step(refs: _Refs, plan: _Plan, block: _Block, s: jax.Array) -> None:
    """The block's rows meet its keys, whose scores are s."""
    formats, width = plan.formats, block.width
    rows, keys = pl.ds(block.begin, block.count), pl.ds(block.sub, width)
    m_ref, l_ref, acc_ref = refs.m, refs.l, refs.acc
    factor, shift = refs.factors[1], refs.factors[2]

    m = m_ref[rows, :]
    m_new = jnp.maximum(m, jnp.max(s, axis=1, keepdims=True) - shift)
    if formats.rescale_threshold > 0:
        risen = (m_new - m) * factor > jnp.float32(formats.rescale_threshold)
        m_new = jnp.where(risen, m_new, m)
    p = jnp.exp2((s - _widen(m_new, width)) * factor)
    alpha = jnp.exp2((m - m_new) * factor)

    v = refs.v[keys, :]
    pv, rounded = _weighted_values(p, v, plan)
    summed = rounded if formats.row_sum == "rounded" else p
    parts = [summed[:, c : c + plan.lanes] for c in range(0, width, plan.lanes)]
    l_ref[rows, :] = l_ref[rows, :] * _widen(alpha, plan.lanes) + sum(parts[1:], parts[0])
    acc_ref[rows, :] = acc_ref[rows, :] * _widen(alpha, acc_ref.shape[1]) + pv
    m_ref[rows, :] = m_new


def _weighted_values(p: jax.Array, v: jax.Array, plan: _Plan) -> tuple[jax.Array, jax.Array]:
    """(round(p) . v, round(p)) for p on the scaled grid."""
    formats = plan.formats
    fmt = formats.p
    cast_only = fmt.dtype == "bfloat16" and formats.row_sum == "unrounded"
    if cast_only and v.dtype != jnp.float32:
        return _dot(p.astype(jnp.bfloat16), v, _NN, formats.dot), p
    most = fmt.scale * 2.0**formats.rescale_threshold
    if plan.tiles.fp8_cast:
        # The cast does not saturate.
        narrow = jnp.minimum(p, jnp.float32(448)) if most > 448 else p
        narrow = narrow.astype(jnp.float8_e4m3fn)
        rounded = narrow.astype(jnp.float32) if formats.row_sum == "rounded" else p
    else:
        rounded = kernel_rounding.round_probabilities(p, fmt, most)
        narrow = rounded
    if plan.tiles.fp8_dot:
        narrow = narrow.astype(jnp.float8_e4m3fn)
        return _dot(narrow, v.astype(jnp.float8_e4m3fn), _NN, formats.dot), rounded
    if plan.tiles.fp8_cast:
        wide = jnp.float32 if v.dtype == jnp.float32 else jnp.bfloat16
        return _dot(narrow.astype(wide), v, _NN, formats.dot), rounded
    if v.dtype == jnp.float32:
        return _dot(rounded, v, _NN, formats.dot), rounded
    if kernel_rounding.fits_bfloat16(fmt):
        return _dot(rounded.astype(jnp.bfloat16), v, _NN, formats.dot), rounded
    if formats.dot == "default":
        return _dot(rounded, v.astype(jnp.float32), _NN, formats.dot), rounded
    pieces = kernel_rounding.bfloat16_pieces(rounded, 2 if _fits_two(fmt) else 3)
    dots = [_dot(piece, v, _NN, formats.dot) for piece in pieces]
    return sum(dots[1:], dots[0]), rounded


def _fits_two(fmt) -> bool:
    """Whether two bfloat16 (16 mantissa bits, hidden ones included) hold the format's values."""
    return fmt.dtype == "float16" or (fmt.mantissa_bits or 23) <= 15


def _dot(x: jax.Array, y: jax.Array, dimensions: Any, dot: str) -> jax.Array:
    """float32 product; bfloat16 operands multiply exactly, float32 ones need HIGHEST for it."""
    if x.dtype == y.dtype == jnp.float8_e4m3fn:
        pass
    elif jnp.float32 in (x.dtype, y.dtype):
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    else:
        x, y = x.astype(jnp.bfloat16), y.astype(jnp.bfloat16)
    exact = dot == "highest" and x.dtype == jnp.float32
    return jax.lax.dot_general(
        x, y, dimensions, preferred_element_type=jnp.float32,
        precision=jax.lax.Precision.HIGHEST if exact else None,
    )  # fmt: skip


def _widen(x: jax.Array, width: int) -> jax.Array:
    """x [rows, 128], equal along its lanes, as [rows, width]."""
    if width % _LANES == 0:
        return jnp.tile(x, (1, width // _LANES)) if width > _LANES else x
    if width < _LANES:
        return x[:, :width]
    return jnp.broadcast_to(x[:, :1], (x.shape[0], width))


def _merge(
    accs: list[jax.Array], sums: list[jax.Array], maxima: list[jax.Array], factor: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Unnormalised outputs, sums and maxima of the splits as one softmax's output and lse."""
    m = functools.reduce(jnp.maximum, maxima)
    weights = [jnp.exp2((part - m) * factor) for part in maxima]
    total = sum(w * part for w, part in zip(weights, sums, strict=True))
    acc = sum(w * a for w, a in zip(weights, accs, strict=True))
    # The maxima are in the scores' units less the shift, by which the sums are too large.
    lse = jnp.where(total == 0, -jnp.inf, (m * factor + jnp.log2(total)) / jnp.float32(_LOG2_E))
    return acc / jnp.where(total == 0, jnp.float32(1), total), lse


def _vmem_limit(plan: _Plan, q: jax.Array, k: jax.Array, v: jax.Array) -> int:
    """Bytes of vector memory the kernel may take: its blocks twice, state, and step temporaries."""
    tiles = plan.tiles
    rows, width, v_width = tiles.rows, round_up(q.shape[-1], 128), round_up(v.shape[-1], 128)
    blocks = rows * (width * q.dtype.itemsize + v_width * 4)
    blocks += tiles.block_kv * (width * k.dtype.itemsize + v_width * v.dtype.itemsize)
    state = 4 * rows * (2 * _LANES + v_width)
    scores = 4 * rows * round_up(tiles.block_k, 128)
    return min(2 * blocks + state + 8 * scores + (4 << 20), 100 << 20)


def _cost(operands: Operands, plan: _Plan) -> pl.CostEstimate:
    """As if every query saw half of the cache: XLA schedules by it, nothing else reads it."""
    q, k, v = operands.q, operands.k, operands.v
    pairs = math.prod(q.shape[:4]) * k.shape[2] // 2
    return pl.CostEstimate(
        flops=2 * pairs * (q.shape[-1] + v.shape[-1]),
        transcendentals=pairs,
        bytes_accessed=q.nbytes + k.nbytes + v.nbytes + math.prod(q.shape[:4]) * v.shape[-1] * 4,
    )

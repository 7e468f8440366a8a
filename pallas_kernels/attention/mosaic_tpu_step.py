"""One grid step of the TPU attention kernel: its rows and keys, and the arithmetic of the softmax.

The formulas, and what is special about them, are in `mosaic_tpu`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import kernel_rounding
from pallas_kernels.attention.formats import AttentionFormats
from pallas_kernels.attention.tiles import Tiles

LANES = 128
_CORNER = 256  # rows that share a softmax step on the diagonal: a matrix unit's
_MOST_BLOCKS = 12
_NT = (((1,), (1,)), ((), ()))  # [m, k] x [n, k] -> [m, n]
_NN = (((1,), (0,)), ((), ()))  # [m, k] x [k, n] -> [m, n]


class Block(NamedTuple):
    """`count` rows from `begin` against `width` of the loaded keys from `sub`; `diagonal` where
    row r of the block sees all but the last count - 1 - r of them."""

    begin: int
    count: int
    sub: int
    width: int
    diagonal: bool = False


@dataclasses.dataclass(frozen=True)
class Plan:
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
    def whole_blocks(self) -> list[Block]:
        """Every row against every loaded key, in halves of the rows: see `meet`."""
        tiles = self.tiles
        part = tiles.rows // 2 if tiles.rows >= 512 else tiles.rows
        return [
            Block(begin, part, sub, tiles.block_k)
            for sub in range(0, tiles.block_kv, tiles.block_k)
            for begin in range(0, tiles.rows, part)
        ]

    @property
    def diagonal_blocks(self) -> list[Block]:
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
                    blocks.append(Block(begin, count, sub, width, diagonal))
        return blocks if len(blocks) <= _MOST_BLOCKS else []

    @property
    def lanes(self) -> int:
        """Partial sums of l per row."""
        return LANES if self.tiles.block_k % LANES == 0 else self.tiles.block_k

    def bounds(self, i, offset, length):
        """(seen, end) of query block i: all its rows see the keys below `seen`, none one from
        `end` on."""
        first = offset + i * self.tiles.block_q
        last = jnp.minimum(first + self.tiles.block_q, offset + self.tokens)
        return jnp.minimum(first + 1, length), jnp.minimum(last, length)


class Refs(NamedTuple):
    """The kernel's arrays: factors [3], q [rows, H], k, v [block_kv, ...], the softmax's state."""

    factors: Any
    q: Any
    k: Any
    v: Any
    m: Any
    l: Any  # noqa: E741 - the papers' name
    acc: Any


def meet(refs: Refs, plan: Plan, blocks: Sequence[Block], limit: jax.Array | None = None) -> None:
    """Softmax steps, one after the other. The scores of each are asked for before the step ahead of
    it is taken: the matrix units then have work while the vector units exponentiate."""
    scores = _scores(refs, plan, blocks[0])
    for n, block in enumerate(blocks):
        following = _scores(refs, plan, blocks[n + 1]) if n + 1 < len(blocks) else None
        _softmax_step(refs, plan, block, _masked(scores, block, limit))
        scores = following


def _scores(refs: Refs, plan: Plan, block: Block) -> jax.Array:
    """[count, width] of the block, before masking."""
    rows, keys = pl.ds(block.begin, block.count), pl.ds(block.sub, block.width)
    s = _dot(refs.q[rows, :], refs.k[keys, :], _NT, plan.formats.dot)
    if not plan.formats.scores.is_exact:
        s = kernel_rounding.round_to(s * refs.factors[0], plan.formats.scores)
    return s


def _masked(s: jax.Array, block: Block, limit: jax.Array | None) -> jax.Array:
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


def _softmax_step(refs: Refs, plan: Plan, block: Block, s: jax.Array) -> None:
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


def _weighted_values(p: jax.Array, v: jax.Array, plan: Plan) -> tuple[jax.Array, jax.Array]:
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
    if width % LANES == 0:
        return jnp.tile(x, (1, width // LANES)) if width > LANES else x
    if width < LANES:
        return x[:, :width]
    return jnp.broadcast_to(x[:, :1], (x.shape[0], width))

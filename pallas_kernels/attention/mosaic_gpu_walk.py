"""What the GPU attention kernels share: the keys a block visits, and the softmax of one key tile.

A block of one warpgroup holds `rows` rows of scores - `heads` query heads of one key head times
`block_q` tokens - and walks the keys it can see, or its share of them where they are split,
`block_k` at a time, K and V arriving two tiles ahead through shared memory. How the two products
are made is the kernels' own: mosaic_gpu_hopper, mosaic_gpu_blackwell.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import kernel_rounding
from pallas_kernels.attention.formats import AttentionFormats
from pallas_kernels.attention.tiles import Tiles
from pallas_kernels.formats import Format

STAGES = 2
_LOWEST = float(jnp.finfo(jnp.float32).min)
_PATCH = 64  # rows and columns of V that are cleared at once


class Stream(NamedTuple):
    """K or V on its way: from `ref` [B, G, S, H] to the slots of `smem`, one barrier each."""

    ref: Any
    smem: Any
    barriers: Any
    part: Any  # which columns, in units of the slots' width


def pieces(fmt: Format) -> int:
    """bfloat16 arrays whose sum is P in this format."""
    if kernel_rounding.fits_bfloat16(fmt):
        return 1
    return 2 if fmt.dtype == "float16" or (fmt.mantissa_bits or 23) <= 15 else 3


def shared(*shape: int) -> Any:
    """bfloat16 shared memory as the matrix units read it."""
    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=transforms)


class Walk:
    """One block's rows, the key tiles that it meets, and the arithmetic between the products.

    Key tiles `begin` to `whole` - 1 are seen by every row, those from `whole` to `end` - 1 by some.
    """

    def __init__(
        self, offset_ref, length_ref, factors_ref, q_ref, k_ref, v_ref, o_ref, *sum_refs, q_smem,
        k_smem, v_smem, q_barrier, k_barriers, v_barriers, formats: AttentionFormats, tiles: Tiles,
        tokens: int, layout: Any,
    ) -> None:  # fmt: skip
        """q_ref [B, U, blocks, rows, H], k_ref [B, G, S, H], v_ref alike, o_ref [splits, B, U,
        blocks, rows, Hv]. sum_refs: none, or those of l and m, [splits, B, U, blocks, rows];
        the output is not divided by l then. `layout` of a tile of scores in registers."""
        split, self.b, self.unit, self.part, self.i = (
            jax.lax.axis_index(x) for x in ("split", "batch", "unit", "part", "block")
        )
        self.outs = [ref.at[split, self.b, self.unit, self.i] for ref in (o_ref, *sum_refs)]
        self.head = jax.lax.div(self.unit, jnp.int32(q_ref.shape[1] // k_ref.shape[1]))
        self.formats, self.tiles, self.layout = formats, tiles, layout
        self.factors_ref, self.q = factors_ref, q_smem
        self.rows, self.width = q_smem.shape[0], v_smem.shape[2]
        self.k = Stream(k_ref, k_smem, k_barriers, 0)
        self.v = Stream(v_ref, v_smem, v_barriers, self.part)
        block_k = tiles.block_k
        self.first = offset_ref[self.b] + self.i * tiles.block_q
        self.length = length_ref[self.b]
        last = jnp.minimum(self.first + tiles.block_q, offset_ref[self.b] + tokens)
        # Every row sees the keys below `seen`; none sees one from `end` on.
        seen = jnp.maximum(jnp.minimum(self.first + 1, self.length), 0)
        end = jnp.maximum(jnp.minimum(last, self.length), 0)
        self.begin, self.end = jnp.int32(0), jax.lax.div(end + (block_k - 1), jnp.int32(block_k))
        self.whole = jax.lax.div(seen, jnp.int32(block_k))
        if tiles.splits > 1:
            share = jax.lax.div(self.end + (tiles.splits - 1), jnp.int32(tiles.splits))
            self.begin = jnp.minimum(split * share, self.end)
            self.end = jnp.minimum(self.begin + share, self.end)
            self.whole = jnp.clip(self.whole, self.begin, self.end)
        plgpu.copy_gmem_to_smem(q_ref.at[self.b, self.unit, self.i], q_smem, q_barrier)
        for ahead in range(STAGES):
            n = self.begin + ahead
            for stream in (self.k, self.v):
                pl.when(n < self.end)(functools.partial(self._fetch, stream, n))
        plgpu.barrier_wait(q_barrier)

    def _fetch(self, stream: Stream, n: Any) -> None:
        slot = jax.lax.rem(n, jnp.int32(STAGES))
        keys = pl.ds(n * self.tiles.block_k, self.tiles.block_k)
        width = stream.smem.shape[2]
        source = stream.ref.at[self.b, self.head, keys, pl.ds(stream.part * width, width)]
        plgpu.copy_gmem_to_smem(source, stream.smem.at[slot], stream.barriers.at[slot])

    def arrived(self, stream: Stream, n: Any) -> Any:
        """The slot of key tile n, filled."""
        slot = jax.lax.rem(n, jnp.int32(STAGES))
        plgpu.barrier_wait(stream.barriers.at[slot])
        return stream.smem.at[slot]

    def refill(self, stream: Stream, n: Any) -> None:
        """Starts the next copy into the slot of key tile n, which nobody reads any more."""
        pl.when(n + STAGES < self.end)(lambda: self._fetch(stream, n + STAGES))

    def over_keys(self, step: Callable[..., Any], carry: Any) -> Any:
        """`step(n, carry, masked=...)` for every key tile that is met, in ascending order."""
        whole = functools.partial(step, masked=False)
        carry = jax.lax.fori_loop(self.begin, self.whole, whole, carry)
        return jax.lax.fori_loop(self.whole, self.end, functools.partial(step, masked=True), carry)

    def per_row(self, value: float) -> jax.Array:
        """[rows] of one number, laid out as the maxima of a tile of scores."""
        return plgpu.layout_cast(jnp.full((self.rows,), value, jnp.float32), self.layout.reduce(1))

    def start(self) -> tuple[jax.Array, jax.Array]:
        """(running maximum [rows], sum [rows]) before the first key."""
        return self.per_row(_LOWEST), self.per_row(0.0)

    def softmax(
        self, s: jax.Array, m: jax.Array, total: jax.Array, n: Any, masked: bool
    ) -> tuple[jax.Array, jax.Array, jax.Array, list[jax.Array]]:
        """(m', total', exp2 of m's fall, P in bfloat16 pieces) after raw scores s [rows, block_k]
        of key tile n."""
        formats, shape, factor = self.formats, s.shape, self.factors_ref[1]
        if not formats.scores.is_exact:
            s = kernel_rounding.round_to(s * self.factors_ref[0], formats.scores)
        if masked:
            row, key = (
                plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=self.layout)
                for axis in (0, 1)
            )
            token = self.first + (row & jnp.int32(self.tiles.block_q - 1))
            key = key + n * shape[1]
            s = jnp.where((key <= token) & (key < self.length), s, -jnp.inf)

        m_new = jnp.maximum(m, jnp.max(s, axis=1) - self.factors_ref[2])
        if formats.rescale_threshold > 0:
            risen = (m_new - m) * factor > jnp.float32(formats.rescale_threshold)
            m_new = jnp.where(risen, m_new, m)
        p = jnp.exp2((s - self.along_rows(m_new, shape)) * factor)
        alpha = jnp.exp2((m - m_new) * factor)
        fmt = formats.p
        most = fmt.scale * 2.0**formats.rescale_threshold
        rounded = kernel_rounding.round_probabilities(p, fmt, most)
        total = total * alpha + jnp.sum(rounded if formats.row_sum == "rounded" else p, axis=1)
        return m_new, total, alpha, kernel_rounding.bfloat16_pieces(rounded, pieces(fmt))

    def along_rows(self, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """x [rows] as [rows, columns]."""
        return jax.lax.broadcast_in_dim(x, shape, [0])

    def values(self, n: Any, masked: bool) -> Any:
        """V of key tile n [block_k, width], without what lies beyond the cache's used slots."""
        v, block_k = self.arrived(self.v, n), self.tiles.block_k
        if masked:

            @pl.when((n + 1) * block_k > self.length)
            def _() -> None:
                _clear(v, self.length - n * block_k)

        return v

    def divisor(self, m: jax.Array, total: jax.Array) -> jax.Array:
        """[rows] by which the accumulator becomes the output; l and m, where they are wanted, go
        out here."""
        if len(self.outs) == 1:
            return jnp.where(total == 0, jnp.float32(1), total)

        @pl.when(self.part == 0)
        def _() -> None:
            for ref, value in zip(self.outs[1:], (total, m), strict=True):
                plgpu.store(ref, value, optimized=False)

        return self.per_row(1.0)

    def store(self, column: int, o: jax.Array) -> None:
        """o [rows, columns] to this block's outputs from `column` on."""
        columns = pl.ds(self.part * self.width + column, o.shape[1])
        plgpu.store(self.outs[0].at[:, columns], o, optimized=False)


def _clear(v_ref: Any, used: jax.Array) -> None:
    """Zeros in the rows of v_ref [block_k, Hv] from `used` on: 0 * NaN is NaN."""
    block_k, width = v_ref.shape
    for start in range(0, block_k, _PATCH):
        for column in range(0, width, _PATCH):
            part = v_ref.at[pl.ds(start, _PATCH), pl.ds(column, _PATCH)]
            v = plgpu.load(part, layout=plgpu.Layout.WGMMA)
            row = plgpu.broadcasted_iota(jnp.int32, v.shape, 0, layout=plgpu.Layout.WGMMA)
            wide = jnp.where(row + start < used, v.astype(jnp.float32), jnp.float32(0))
            plgpu.store(part, wide.astype(v.dtype))

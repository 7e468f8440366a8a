"""The products of the GPU attention kernel on Hopper (sm_90a): a warpgroup's matrix unit, `wgmma`.

- P goes through shared memory to the second product. Feeding it from registers is quicker, but the
  interpreter that tests this kernel cannot.
- A block takes at most 128 of V's columns, 64 at a time: more accumulators spill. Hv = 256 costs
  its scores twice.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention import mosaic_gpu_walk
from pallas_kernels.attention.formats import AttentionFormats
from pallas_kernels.attention.mosaic_gpu_walk import Walk
from pallas_kernels.attention.tiles import Tiles

LAYOUT = plgpu.Layout.WGMMA
ORDERS_TENSOR_CORE = False  # a warpgroup's product is over before its next line
_COLUMNS = 64


def scratch(rows: int, width: int, formats: AttentionFormats, tiles: Tiles) -> dict[str, Any]:
    """The kernel's own memory for `width` columns of V."""
    del width  # in registers
    return dict(p=mosaic_gpu_walk.shared(mosaic_gpu_walk.pieces(formats.p), rows, tiles.block_k))


def kernel(walk: Walk, *, p: Any) -> None:
    """One block; p [pieces, rows, block_k] in shared memory."""

    def zeros() -> jax.Array:
        return plgpu.layout_cast(jnp.zeros((walk.rows, _COLUMNS), jnp.float32), LAYOUT)

    def step(n: Any, carry: Any, masked: bool) -> Any:
        m, total, accs = carry
        keys = walk.arrived(walk.k, n)

        def scores(acc_ref: Any) -> jax.Array:
            plgpu.wgmma(acc_ref, walk.q, keys.T)
            return acc_ref[...]

        s = pl.run_scoped(scores, plgpu.ACC((walk.rows, walk.tiles.block_k), jnp.float32))
        walk.refill(walk.k, n)
        m, total, alpha, pieces = walk.softmax(s, m, total, n, masked)
        for index, piece in enumerate(pieces):
            p[index] = piece
        v = walk.values(n, masked)
        plgpu.commit_smem()
        grown = []
        for index, acc in enumerate(accs):

            def product(acc_ref: Any, column: int = index * _COLUMNS) -> jax.Array:
                for index in range(len(pieces)):
                    plgpu.wgmma(acc_ref, p.at[index], v.at[:, pl.ds(column, _COLUMNS)])
                return acc_ref[...]

            pv = pl.run_scoped(product, plgpu.ACC((walk.rows, _COLUMNS), jnp.float32))
            grown.append(acc * walk.along_rows(alpha, acc.shape) + pv)
        walk.refill(walk.v, n)
        return m, total, tuple(grown)

    accs = tuple(zeros() for _ in range(walk.width // _COLUMNS))
    m, total, accs = walk.over_keys(step, (*walk.start(), accs))
    divisor = walk.divisor(m, total)
    for index, acc in enumerate(accs):
        walk.store(index * _COLUMNS, acc / walk.along_rows(divisor, acc.shape))

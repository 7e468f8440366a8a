"""The products of the GPU attention kernel on Blackwell (sm_100a): `tcgen05`, and tensor memory.

A unit multiplies 128 rows at once and leaves the product in tensor memory, where a thread owns a
row: maxima and sums are a thread's own. It works by itself, and finds its next product waiting:

    tensor core:  S(n+1)  P(n) V(n)      S(n+2)  P(n+1) V(n+1)
    warpgroup:    softmax of S(n)        softmax of S(n+1); adds P(n) V(n)

- P is the left operand out of tensor memory, in bfloat16 pieces: nothing of it passes through
  shared memory.
- The accumulator lies in tensor memory too, but each tile's product is added to it in registers:
  earlier units were found to cut digits off where they add, not to round (Ootomo and Yokota,
  "Recovering single precision accuracy from Tensor Cores", 2022). Over 10^5 keys that would be a
  bias of 10^-4.
- 512 columns of tensor memory hold the accumulator and the product for 128 of V's columns, the
  scores and P in three pieces. Hv = 256 costs its scores twice.
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

LAYOUT = plgpu.Layout.TCGEN05_TMEM_NATIVE
ORDERS_TENSOR_CORE = True  # a product may not begin before the copies that it waits for
_COLUMNS = 32  # of the accumulator that are in registers at a time


def scratch(rows: int, width: int, formats: AttentionFormats, tiles: Tiles) -> dict[str, Any]:
    """The kernel's own memory for `width` columns of V."""
    pieces, block_k = mosaic_gpu_walk.pieces(formats.p), tiles.block_k
    return dict(
        s=plgpu.TMEM((rows, block_k), jnp.float32),
        p=[plgpu.TMEM((rows, block_k), jnp.bfloat16, packed=True) for _ in range(pieces)],
        pv=plgpu.TMEM((rows, width), jnp.float32),
        acc=plgpu.TMEM((rows, width), jnp.float32),
        s_ready=plgpu.Barrier(orders_tensor_core=True),
        pv_ready=plgpu.Barrier(orders_tensor_core=True),
    )


def kernel(walk: Walk, *, s: Any, p: Any, pv: Any, acc: Any, s_ready: Any, pv_ready: Any) -> None:
    """One block; s [rows, block_k], p of that shape for each piece, pv and acc [rows, width] in
    tensor memory."""
    parts = [pl.ds(column, _COLUMNS) for column in range(0, walk.width, _COLUMNS)]

    def score(n: Any) -> None:
        plgpu.tcgen05_mma(s, walk.q, walk.arrived(walk.k, n).T, s_ready, accumulate=False)

    def load(ref: Any) -> jax.Array:
        return plgpu.async_load_tmem(ref, layout=LAYOUT)

    def add_product(alpha: jax.Array, n: Any) -> None:
        """acc * alpha + the product of key tile n, which is there."""
        walk.refill(walk.v, n)
        for part in parts:
            old, new = load(acc.at[:, part]), load(pv.at[:, part])
            plgpu.wait_load_tmem()
            plgpu.async_store_tmem(acc.at[:, part], old * walk.along_rows(alpha, old.shape) + new)

    def step(n: Any, carry: Any, masked: bool) -> Any:
        m, total, fallen = carry
        plgpu.barrier_wait(s_ready)
        scores = load(s)
        plgpu.wait_load_tmem()
        walk.refill(walk.k, n)
        pl.when(n + 1 < walk.end)(lambda: score(n + 1))
        m, total, alpha, pieces = walk.softmax(scores, m, total, n, masked)
        pl.when(n > walk.begin)(lambda: plgpu.barrier_wait(pv_ready))
        for p_ref, piece in zip(p, pieces, strict=True):
            plgpu.async_store_tmem(p_ref, piece)
        pl.when(n > walk.begin)(lambda: add_product(fallen, n - 1))
        plgpu.commit_tmem()
        v = walk.values(n, masked)
        if masked:
            plgpu.commit_smem()
        for index, p_ref in enumerate(p):
            plgpu.tcgen05_mma(pv, p_ref, v, accumulate=index > 0)
        plgpu.tcgen05_commit_arrive(pv_ready)
        return m, total, alpha

    zeros = plgpu.layout_cast(jnp.zeros((walk.rows, _COLUMNS), jnp.float32), LAYOUT)
    for part in parts:
        plgpu.async_store_tmem(acc.at[:, part], zeros)
    plgpu.commit_tmem()
    pl.when(walk.end > walk.begin)(lambda: score(walk.begin))
    m, total, fallen = walk.over_keys(step, (*walk.start(), walk.per_row(1.0)))

    @pl.when(walk.end > walk.begin)
    def _() -> None:
        plgpu.barrier_wait(pv_ready)
        add_product(fallen, walk.end - 1)
        plgpu.commit_tmem()

    divisor = walk.divisor(m, total)
    for part in parts:
        o = load(acc.at[:, part])
        plgpu.wait_load_tmem()
        plgpu.async_store_tmem(acc.at[:, part], o / walk.along_rows(divisor, o.shape))
    plgpu.commit_tmem()
    for column, part in zip(range(0, walk.width, _COLUMNS), parts, strict=True):
        # Four threads to a row and not one: whole sectors are written.
        o = plgpu.async_load_tmem(acc.at[:, part], layout=plgpu.Layout.TCGEN05)
        walk.store(column, o)
    plgpu.wait_load_tmem()  # before the tensor memory goes back

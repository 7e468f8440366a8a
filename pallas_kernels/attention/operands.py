"""Attention's arguments as the Mosaic kernels read them: packed rows, rounded, scales gathered."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from pallas_kernels import kernel_rounding
from pallas_kernels.attention.formats import AttentionFormats
from pallas_kernels.attention.tiles import Tiles
from pallas_kernels.formats import Format, round_to


@dataclasses.dataclass(frozen=True)
class Operands:
    """Arrays of one kernel call, in the dtypes that its dots take.

    q [B, U, blocks, rows, H]: unit u holds `heads` query heads of key head u // (U // G); row r of
    a block is head r // block_q and token r % block_q. k [B, G, S, H], v [B, G, S, Hv].
    A score is (q . k) * score_factor; log2_factor takes what the softmax step subtracts (raw
    products, or rounded scores) to powers of two, shift is log2(p.scale) in the same units.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    score_factor: jax.Array
    log2_factor: jax.Array
    shift: jax.Array
    v_factor: jax.Array | float
    tokens: int
    heads: int
    tiles: Tiles

    def unpack(self, o: jax.Array) -> jax.Array:
        """Kernel rows [B, U, blocks, rows, Hv] -> values [B, T, N, Hv]."""
        return self._in_units_of_v(self._by_token(o))

    def merge(
        self, accs: jax.Array, sums: jax.Array, maxima: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Softmaxes over parts of the keys as one: values [B, T, N, Hv], log-sum-exp [B, T, N].

        accs [splits, B, U, blocks, rows, Hv] are not divided by the sums yet; sums and maxima
        [splits, B, U, blocks, rows, 1], maxima in the scores' units less the shift. A part that
        shows a row no key has acc 0, sum 0 and the lowest maximum there is.
        """
        accs, sums, maxima = (jax.vmap(self._by_token)(x) for x in (accs, sums, maxima))
        m = jnp.max(maxima, axis=0)
        weights = jnp.exp2((maxima - m) * self.log2_factor)
        total = jnp.sum(weights * sums, axis=0)
        acc = jnp.sum(weights * accs, axis=0)
        # What the shift takes from a maximum it adds to its sum.
        lse = (m * self.log2_factor + jnp.log2(total)) / jnp.float32(math.log2(math.e))
        lse = jnp.where(total == 0, -jnp.inf, lse)
        o = acc / jnp.where(total == 0, jnp.float32(1), total)
        return self._in_units_of_v(o), lse[..., 0]

    def _in_units_of_v(self, o: jax.Array) -> jax.Array:
        return o if isinstance(self.v_factor, float) and self.v_factor == 1.0 else o * self.v_factor

    def _by_token(self, o: jax.Array) -> jax.Array:
        """Kernel rows [B, U, blocks, rows, W] -> [B, T, N, W]."""
        batch, units, blocks, _, width = o.shape
        per_unit, block_q = self.tiles.heads, self.tiles.block_q
        o = o[..., : per_unit * block_q, :]
        o = o.reshape(batch, units, blocks, per_unit, block_q, width)
        o = o.transpose(0, 2, 4, 1, 3, 5).reshape(batch, blocks * block_q, self.heads, width)
        return o[:, : self.tokens]


def prepare(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    scale: float | jax.Array,
    k_scale: float | jax.Array,
    v_scale: float | jax.Array,
    formats: AttentionFormats,
    tiles: Tiles,
    rows: int,
) -> Operands:
    """The operands of `attention(q [B, T, N, H], k [B, S, G, H], v [B, S, G, Hv])`, with heads *
    block_q filled up to `rows`.

    The key-head axis moves before the slots. XLA usually makes that the cache's own layout where
    the cache is created inside the same program; an argument in row-major order is copied.
    """
    batch, tokens, heads, width = q.shape
    units = heads // tiles.heads
    blocks = -(-tokens // tiles.block_q)
    q, q_factor = _operand(q, 1.0, formats.q)
    q = jnp.pad(q, ((0, 0), (0, blocks * tiles.block_q - tokens), (0, 0), (0, 0)))
    q = q.reshape(batch, blocks, tiles.block_q, units, tiles.heads, width)
    q = q.transpose(0, 3, 1, 4, 2, 5)
    q = q.reshape(batch, units, blocks, tiles.heads * tiles.block_q, width)
    q = jnp.pad(q, ((0, 0),) * 3 + ((0, rows - q.shape[3]), (0, 0)))

    k, k_factor = _operand(k, k_scale, formats.k)
    v, v_factor = _operand(v, v_scale, formats.v)
    k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    score_factor = jnp.float32(1) * scale * q_factor * k_factor
    exact = formats.scores.is_exact
    log2_factor = (score_factor if exact else jnp.float32(1)) * jnp.float32(math.log2(math.e))
    shift = jnp.float32(math.log2(formats.p.scale)) / log2_factor
    return Operands(
        q, k, v, score_factor, log2_factor, shift, v_factor, tokens, heads, tiles
    )  # fmt: skip


def _operand(
    x: jax.Array, factor: float | jax.Array, fmt: Format
) -> tuple[jax.Array, float | jax.Array]:
    """(y, rest): y * rest is round_to(x * factor, fmt); y is float8, bfloat16 or float32."""
    unscaled = isinstance(factor, float) and factor == 1.0
    stored = unscaled and x.dtype == fmt.storage_dtype != jnp.float32
    if fmt.is_exact or stored:  # what is stored in the format is on its grid
        narrow = x.dtype in (jnp.bfloat16, jnp.float8_e4m3fn)
        return x if narrow else x.astype(jnp.float32), factor
    x = x.astype(jnp.float32)
    if not unscaled:
        x = x * jnp.asarray(factor, jnp.float32)
    fits = kernel_rounding.fits_bfloat16(fmt) and math.frexp(fmt.scale)[0] == 0.5
    x = round_to(x, fmt)
    return x.astype(jnp.bfloat16) if fits else x, 1.0

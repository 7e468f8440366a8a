"""Chunks of the delta rule inside a TPU kernel: the equations of `xla.py`, several heads at once.

Arrays are [H, C, D], where H counts the value heads of one grid step, times its chunks as long as
the state has no part in it. Every line works on all of them, so that one's dots run while
another's wait for their operands: a chunk is a chain of dependent steps, and alone it would leave
the matrix unit idle for most of the time.

Where w and u are not rounded they are not computed: u - w S = A^-1 (beta v - beta exp(G) (k S)),
which needs three dots fewer.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.delta_rule.formats import DeltaRuleFormats
from pallas_kernels.delta_rule.mosaic_tpu_math import Parts, dot, split, unit_lower_inverse
from pallas_kernels.kernel_rounding import round_to


class Gates(NamedTuple):
    """What the gates of a chunk make of its queries and keys, [H, C, ..] unless said."""

    kk: jax.Array  # [H, C, C] sum_c k_ic k_jc D_ijc, right below the diagonal
    p: jax.Array  # [H, C, C] the same of q and k, zero above the diagonal
    reads: Parts  # q as it meets the state: decayed if the gate is per channel
    enters: Parts  # k as it meets the state, likewise
    writes: Parts  # k as it enters the state, transposed: [H, K, C]
    decay_in: jax.Array | None  # [H, C, 128], each lane exp(G); None if the gate is per channel
    decay_out: jax.Array | None  # [H, C, 128], exp(G_C - G), likewise
    decay_all: jax.Array  # [H, 1, 128] or [H, K, 1], exp(G_C)
    keys: jax.Array  # [H, C, K] decay_in * k, float32: only for w


class Chunk(NamedTuple):
    """All of a chunk that does not depend on the state that enters it; fields of `Gates`, and:"""

    reads: Parts
    enters: Parts
    writes: Parts
    decay_in: jax.Array | None
    decay_out: jax.Array | None
    decay_all: jax.Array
    inverse: Parts  # [H, C, C] A^-1
    p: Parts  # [H, C, C]
    values: jax.Array  # [H, C, V] v, or u where w is given
    beta: jax.Array  # [H, C, 128], each lane the same
    w: Parts | None  # [H, C, K], if w or u are rounded


def prepare(gates: Gates, v: jax.Array, beta: jax.Array, formats: DeltaRuleFormats) -> Chunk:
    """v [H, C, V] and beta [H, C, 128], the same in each lane, float32."""
    mode, chunk = formats.dot, v.shape[1]
    row = lax.broadcasted_iota(jnp.int32, (chunk, chunk), 0)
    column = lax.broadcasted_iota(jnp.int32, (chunk, chunk), 1)
    a = jnp.where(row > column, beta[..., :chunk] * gates.kk, 0)
    inverse = round_to(unit_lower_inverse(a, mode), formats.inverse)
    inverse = split(inverse, mode, formats.inverse)
    w = None
    if mode == "default" or not (formats.w.is_exact and formats.u.is_exact):
        v = round_to(dot(inverse, split(_times(beta, v), mode)), formats.u)
        w = round_to(dot(inverse, split(_times(beta, gates.keys), mode)), formats.w)
        w = split(w, mode, formats.w)
    p = split(round_to(gates.p, formats.p), mode, formats.p)
    kept = {name: getattr(gates, name) for name in Chunk._fields[:6]}
    return Chunk(**kept, inverse=inverse, p=p, values=v, beta=beta, w=w)


def advance(
    state: jax.Array, chunk: Chunk, formats: DeltaRuleFormats
) -> tuple[jax.Array, jax.Array]:
    """The next state [H, K, V] and o / scale [H, C, V], float32."""
    mode = formats.dot

    def operand(fmt):
        return split(round_to(state, fmt), mode, fmt)

    keys = chunk.enters if chunk.w is None else chunk.w
    if formats.state_operand == formats.h and len(keys) == len(chunk.reads):
        pairs = zip(keys, chunk.reads, strict=True)
        both = tuple(jnp.concatenate(pair, axis=1) for pair in pairs)
        both = dot(both, operand(formats.h))
        rows = chunk.values.shape[1]
        seen, o = both[:, :rows], both[:, rows:]
    else:
        seen = dot(keys, operand(formats.state_operand))
        o = dot(chunk.reads, operand(formats.h))
    if chunk.w is None:
        rest = _times(chunk.beta, chunk.values - _times(chunk.decay_in, seen))
        v_new = dot(chunk.inverse, split(rest, mode))
    else:
        v_new = chunk.values - seen
    rounded = split(round_to(v_new, formats.v_new), mode, formats.v_new)
    o = _times(chunk.decay_in, o) + dot(chunk.p, rounded)
    if chunk.decay_out is not None:
        rounded = round_to(_times(chunk.decay_out, v_new), formats.v_new)
        rounded = split(rounded, mode, formats.v_new)
    state = _times(chunk.decay_all, state) + dot(chunk.writes, rounded)
    return round_to(state, formats.chunk_state), o


def _times(factor: jax.Array | None, x: jax.Array) -> jax.Array:
    """The product with a factor for each row of x [H, C, D]: [H, C, 128], [H, C, 1] or None."""
    return x if factor is None else factor[..., : x.shape[-1]] * x


def scalar_gates(
    q: jax.Array,
    k: jax.Array,
    rows: tuple[jax.Array, jax.Array],
    columns: tuple[jax.Array, jax.Array],
    formats: DeltaRuleFormats,
) -> Gates:
    """Gates of one number per token: q, k [Hk, C, K]; G as two summands, [H, 1, C] and
    [H, C, 128].

    Key heads stand for H // Hk value heads each.
    """
    groups = rows[0].shape[0] // q.shape[0]
    chunk = q.shape[1]
    row = lax.broadcasted_iota(jnp.int32, (chunk, chunk), 0)
    column = lax.broadcasted_iota(jnp.int32, (chunk, chunk), 1)

    def decay(difference):  # of either summand apart: their sum would lose the small one
        return round_to(jnp.exp(difference(0) + difference(1)), formats.exp_g)

    pairs = decay(
        # Above the diagonal exp would overflow: mask the exponent, not the exponential.
        lambda i: jnp.where(row >= column, columns[i][..., :chunk] - rows[i], jnp.float32(-jnp.inf))
    )
    decay_in = decay(lambda i: columns[i])
    decay_out = decay(lambda i: columns[i][:, -1:] - columns[i])

    reads, enters = split(q, formats.dot), split(k, formats.dot)
    both = tuple(jnp.concatenate(pair, axis=1) for pair in zip(enters, reads, strict=True))
    products = dot(both, enters, transpose_b=True)
    # Transposed as float32, which the transpose unit takes as it is; exact in k's dtype again.
    turned = jnp.swapaxes(k.astype(jnp.float32), 1, 2).astype(k.dtype)
    writes = split(turned, formats.dot)

    def repeat(x):
        return jnp.repeat(x, groups, axis=0) if groups > 1 else x

    products = repeat(products)
    return Gates(
        kk=products[:, :chunk] * pairs,
        p=products[:, chunk:] * pairs,
        reads=tuple(map(repeat, reads)),
        enters=tuple(map(repeat, enters)),
        writes=tuple(map(repeat, writes)),
        decay_in=decay_in,
        decay_out=decay_out,
        decay_all=decay_in[:, -1:],
        keys=_times(decay_in, repeat(k.astype(jnp.float32))),
    )


def channel_gates(q: jax.Array, k: jax.Array, g: jax.Array, formats: DeltaRuleFormats) -> Gates:
    """Gates of one number per token and key channel: q, k, g [H, C, K], g rounded to its format.

    exp(G_i) exp(-G_j) would overflow. Take instead the smallest of the blocks of 2, 4, .., C rows
    that holds both i and j, and r, the first row of its second half: j < r <= i, so neither factor
    of exp(G_i - G_r) exp(G_r - G_j) is above one, whatever the gates are.
    """
    heads, chunk, width = q.shape
    row = lax.broadcasted_iota(jnp.int32, (chunk, chunk), 0)
    column = lax.broadcasted_iota(jnp.int32, (chunk, chunk), 1)
    rows_index = lax.broadcasted_iota(jnp.int32, (chunk, width), 0)
    q, k = q.astype(jnp.float32), k.astype(jnp.float32)
    mode = formats.dot

    # Every exponent is the sum of g over its own tokens, by a product with zeros and ones: a
    # difference of two sums of the whole chunk would lose digits. A rounded G has to be subtracted.
    flat = jnp.concatenate(list(g), axis=1)[None]  # [1, C, H * K]
    if not formats.g_cumsum.is_exact:
        ones = (jnp.where(row >= column, jnp.float32(1), 0).astype(jnp.bfloat16)[None],)
        flat = round_to(dot(ones, split(flat, "highest")), formats.g_cumsum)
    summands = split(flat, "highest", formats.g_cumsum)

    def decay(late: jax.Array, early: jax.Array) -> jax.Array:
        """exp(G_late - G_early) for each row, given as [C, C] of one index per row."""
        if formats.g_cumsum.is_exact:
            signs = jnp.where((column > early) & (column <= late), jnp.float32(1), 0)
        else:
            signs = jnp.where(column == late, jnp.float32(1), 0)
            signs = signs - jnp.where(column == early, jnp.float32(1), 0)
        exponent = dot((signs.astype(jnp.bfloat16)[None],), summands)[0]
        exponent = jnp.stack([exponent[:, h * width : (h + 1) * width] for h in range(heads)])
        return round_to(jnp.exp(exponent), formats.exp_g)

    before = jnp.full_like(row, -1)  # G before the chunk is zero
    decay_in = decay(row, before)
    decay_out = decay(jnp.full_like(row, chunk - 1), row)

    qk = jnp.sum(_as_multiplied(q, mode) * _as_multiplied(k, mode), axis=-1, keepdims=True)
    p = jnp.where(row == column, qk, 0)
    kk = jnp.zeros_like(p)
    half = 1
    while half < chunk:
        late = (row & half) != 0
        middle = (row & -(2 * half)) | half
        factor = decay(jnp.where(late, row, middle), jnp.where(late, middle, row))
        rows = jnp.concatenate([factor * k, factor * q], axis=1)
        columns = jnp.where((rows_index & half) != 0, 0, factor * k)
        pairs = dot(split(rows, mode), split(columns, mode), transpose_b=True)
        same = late & ((row ^ column) < 2 * half)
        kk = kk + jnp.where(same, pairs[:, :chunk], 0)
        p = p + jnp.where(same, pairs[:, chunk:], 0)
        half *= 2
    enters, reads = decay_in * k, decay_in * q
    return Gates(
        kk=kk,
        p=p,
        reads=split(reads, mode),
        enters=split(enters, mode),
        writes=split(jnp.swapaxes(decay_out * k, 1, 2), mode),
        decay_in=None,
        decay_out=None,
        decay_all=jnp.swapaxes(decay_in[:, -1:], 1, 2),
        keys=enters,
    )


def _as_multiplied(x: jax.Array, mode: str) -> jax.Array:
    """x float32 as a dot would see it."""
    return x.astype(jnp.bfloat16).astype(jnp.float32) if mode == "default" else x

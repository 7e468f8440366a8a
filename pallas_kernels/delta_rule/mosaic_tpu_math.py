"""Products and inverses in float32 on a matrix unit that multiplies bfloat16.

A float32 is the exact sum of three bfloat16 numbers, and a product of two bfloat16 numbers is
exact in the unit's float32 accumulator. So a float32 product is a bfloat16 product of longer
operands: [a1 a1 a2 a1 a2 a3] times [b1; b2; b1; b3; b2; b1]. What is left out is below 2^-24 of
the product. This is what `Precision.HIGHEST` does in six passes; as one product with a six times
longer inner axis it fills the unit, whose depth (128 or 256) is more than a chunk's 64 tokens.
An operand that is exact in bfloat16, as the q and k of a bfloat16 model are, is its own first
part and needs half of that.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.formats import Format

BLOCK = 16  # rows of one forward substitution
TILE, LANES = 8, 128  # of one vector register

Parts = tuple[jax.Array, ...]


def split(x: jax.Array, dot: str, fmt: Format | None = None) -> Parts:
    """x [H, M, N] as bfloat16 parts that add up to it, largest first.

    `dot` "default" keeps the first, rounded: one pass, as `DeltaRuleFormats.dot` has it. `fmt`, the
    format x was rounded to, tells how many parts are not zero.
    """
    if x.dtype == jnp.bfloat16:
        return (x,)
    if dot == "default":
        return (x.astype(jnp.bfloat16),)
    parts = []
    for _ in range((_bits(fmt) - 1) // 8):
        part = x.astype(jnp.bfloat16)
        parts.append(part)
        x = x - part.astype(jnp.float32)
    return (*parts, x.astype(jnp.bfloat16))


def _bits(fmt: Format | None) -> int:
    """Significant bits of numbers in that format."""
    if fmt is None or fmt.scale != 1.0:
        return 24
    if fmt.mantissa_bits is not None:
        return fmt.mantissa_bits + 1
    return {"float32": 24, "bfloat16": 8, "float16": 11, "float8_e4m3fn": 4}[fmt.dtype]


def dot(a: Parts, b: Parts, transpose_b: bool = False) -> jax.Array:
    """a @ b, or a @ b^T: [H, M, K] times [H, K, N] (or [H, N, K]), float32."""
    pairs = [(i, n - i) for n in range(3) for i in range(n + 1) if i < len(a) and n - i < len(b)]
    axis = 1 if transpose_b else 0
    dims = (((1,), (axis,)), ((), ()))
    heads = []
    for h in range(a[0].shape[0]):
        left = [a[i][h] for i, _ in pairs]
        right = [b[j][h] for _, j in pairs]
        heads.append(
            lax.dot_general(
                left[0] if len(pairs) == 1 else jnp.concatenate(left, axis=1),
                right[0] if len(pairs) == 1 else jnp.concatenate(right, axis=axis),
                dims,
                preferred_element_type=jnp.float32,
            )
        )
    return jnp.stack(heads)


def spread_columns(rows: jax.Array) -> jax.Array:
    """rows [R, C] turned into columns, each repeated over 128 lanes: [C, R * 128].

    A product with ones, exact to the bit: the matrix unit has the time, and the unit that moves
    lanes has not. A row that is not finite spoils all of them.
    """
    count = rows.shape[0]
    row = lax.broadcasted_iota(jnp.int32, (count, count * LANES), 0)
    lane = lax.broadcasted_iota(jnp.int32, (count, count * LANES), 1)
    ones = jnp.where(lane >> 7 == row, jnp.float32(1), 0).astype(jnp.bfloat16)
    return dot(split(jnp.swapaxes(rows, 0, 1)[None], "highest"), (ones[None],))[0]


def unit_lower_inverse(a: jax.Array, mode: str) -> jax.Array:
    """(I + a)^-1 for strictly lower a [H, C, C].

    Forward substitution inside blocks of 16 rows, all of them at once; neighbours then merge:
    the lower left quarter of the inverse is -X22 a21 X11.
    """
    chunk = a.shape[-1]
    inverse = _blocks_inverse(a)
    row = lax.broadcasted_iota(jnp.int32, (chunk, chunk), 0)
    column = lax.broadcasted_iota(jnp.int32, (chunk, chunk), 1)
    half = BLOCK
    while half < chunk:
        # Powers of two: the pair is in one block of 2 * half when its indices differ only below.
        below = ((row ^ column) < 2 * half) & ((row & half) > (column & half))
        below = split(jnp.where(below, a, 0), mode)
        late = _second_halves(inverse, half)
        quarter = dot(split(late, mode), below)
        quarter = dot(split(quarter, mode), split(inverse, mode))
        inverse = _replace_second_halves(inverse, late - quarter, half)
        half *= 2
    return inverse


def _blocks_inverse(a: jax.Array) -> jax.Array:
    """The inverse of the diagonal 16-row blocks of I + a, zero elsewhere: [H, C, C].

    The blocks lie side by side, eight to a register's 128 lanes, so that one operation serves
    eight: block b of a head needs no move for that, it has the lanes 16 b .. 16 b + 15 already.
    """
    heads, chunk = a.shape[:2]
    share = LANES // chunk  # heads side by side
    starts = range(0, chunk, BLOCK)
    # Bits instead of // and %, which a kernel compiles to a dozen operations. A lane's block:
    own = lax.broadcasted_iota(jnp.int32, (BLOCK, chunk), 1) & -BLOCK
    blocks = [
        sum(jnp.where(own == s, a[h, s : s + BLOCK], 0) for s in starts) for h in range(heads)
    ]
    blocks += [jnp.zeros_like(blocks[0])] * (-heads % share)
    packed = jnp.concatenate(
        [jnp.concatenate(blocks[h : h + share], axis=1) for h in range(0, len(blocks), share)]
    )  # [groups * 16, 128]
    rows, groups = len(packed), len(packed) // BLOCK
    lane = lax.broadcasted_iota(jnp.int32, (rows, LANES), 1)
    row = lax.broadcasted_iota(jnp.int32, (BLOCK, LANES), 0)
    eye = jnp.where(row == lane[:BLOCK] & (BLOCK - 1), jnp.float32(1), 0)
    # By registers of 8 rows: rows above the pivot have nothing to subtract.
    halves = [jnp.broadcast_to(x[None], (groups, TILE, LANES)) for x in (eye[:TILE], eye[TILE:])]
    for m in range(BLOCK - 1):
        # The factor of each row, from lane m of its block to all of the block.
        index = (lane & -BLOCK) + m
        factor = jnp.take_along_axis(packed, index, axis=1, mode="promise_in_bounds")
        factor = factor.reshape(groups, 2, TILE, LANES)
        pivot = halves[m // TILE][:, m % TILE : m % TILE + 1]
        for i in range((m + 1) // TILE, 2):
            halves[i] = halves[i] - factor[:, i] * pivot
    x = jnp.concatenate(halves, axis=1)
    heads = [x[h // share, :, h % share * chunk :][:, :chunk] for h in range(heads)]
    return jnp.stack([jnp.concatenate([jnp.where(own == s, x, 0) for s in starts]) for x in heads])


def _second_halves(x: jax.Array, half: int) -> jax.Array:
    """The second half of each group of 2 * half rows: [H, C, D] -> [H, C / 2, D]."""
    heads, chunk, width = x.shape
    x = x.reshape(heads, chunk // (2 * half), 2, half, width)
    return x[:, :, 1].reshape(heads, chunk // 2, width)


def _replace_second_halves(x: jax.Array, late: jax.Array, half: int) -> jax.Array:
    heads, chunk, width = x.shape
    early = x.reshape(heads, chunk // (2 * half), 2, half, width)[:, :, 0]
    late = late.reshape(early.shape)
    return jnp.stack([early, late], axis=2).reshape(x.shape)

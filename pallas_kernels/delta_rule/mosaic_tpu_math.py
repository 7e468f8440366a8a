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
from pallas_kernels.kernel_rounding import bfloat16_pieces

BLOCK = 16  # rows of one forward substitution
TILE = 8  # rows of one vector register

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
    return tuple(bfloat16_pieces(x, -(-_bits(fmt) // 8)))


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
    """The inverse of the diagonal 16-row blocks of I + a, zero elsewhere: [H, C, C]."""
    heads, chunk = a.shape[:2]
    count = chunk // BLOCK
    starts = range(0, chunk, BLOCK)
    a = jnp.stack([a[:, s : s + BLOCK, s : s + BLOCK] for s in starts], axis=1)
    a = a.reshape(heads * count, BLOCK, BLOCK)
    row = lax.broadcasted_iota(jnp.int32, (chunk, chunk), 0)
    column = lax.broadcasted_iota(jnp.int32, (chunk, chunk), 1)
    eye = jnp.where(row == column, jnp.float32(1), 0).reshape(1, count, BLOCK, chunk)
    x = jnp.broadcast_to(eye, (heads, count, BLOCK, chunk)).reshape(-1, BLOCK, chunk)
    # By registers of 8 rows: rows above the pivot have nothing to subtract.
    top, bottom = x[:, :TILE], x[:, TILE:]
    for m in range(BLOCK - 1):
        source = top if m < TILE else bottom
        pivot = source[:, m % TILE : m % TILE + 1]
        if m < TILE - 1:
            top = top - a[:, :TILE, m : m + 1] * pivot
        bottom = bottom - a[:, TILE:, m : m + 1] * pivot
    return jnp.concatenate([top, bottom], axis=1).reshape(heads, chunk, chunk)


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

"""Rounding to a `Format` inside a TPU kernel, where `lax.reduce_precision` has no lowering.

Plain integer and float32 vector operations that every backend and interpreter executes as written;
the results are those of `pallas_kernels.formats.round_to` bit for bit (NaN payloads aside).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.formats import Format

_MANTISSA = {"bfloat16": 7, "float16": 10, "float8_e4m3fn": 3}
_LEAST_NORMAL = {"float16": 2.0**-14, "float8_e4m3fn": 2.0**-6}
_LARGEST = {"float16": 65504.0, "float8_e4m3fn": 448.0}


def round_to(x: jax.Array, fmt: Format) -> jax.Array:
    """x float32 -> float32 values on the format's grid, ties to even."""
    if fmt.scale == 1.0:
        return round_on_grid(x, fmt)
    return round_on_grid(x * jnp.float32(fmt.scale), fmt) * jnp.float32(fmt.reciprocal)


def round_on_grid(y: jax.Array, fmt: Format) -> jax.Array:
    """y float32 -> the nearest value of the format's own dtype: `fmt.scale` is not applied."""
    if fmt.is_exact:
        return y
    if fmt.dtype not in _LEAST_NORMAL:
        return _drop_bits(y, 23 - (fmt.mantissa_bits or _MANTISSA[fmt.dtype]))
    largest = jnp.float32(_LARGEST[fmt.dtype])
    if fmt.dtype == "float8_e4m3fn":
        y = jnp.minimum(jnp.maximum(y, -largest), largest)
    # 2**e <= |y| < 2**(e + 1), or the least normal: below that the grid is uniform. Adding 1.5
    # times 2**(e + 23 - mantissa) leaves a sum whose last bit is the grid's step at y.
    power = jax.lax.bitcast_convert_type(y, jnp.int32) & jnp.int32(0x7F800000)
    power = jax.lax.bitcast_convert_type(power, jnp.float32)
    power = jnp.maximum(power, jnp.float32(_LEAST_NORMAL[fmt.dtype]))
    shift = power * jnp.float32(1.5 * 2.0 ** (23 - _MANTISSA[fmt.dtype]))
    rounded = (y + shift) - shift
    if fmt.dtype == "float16":
        infinite = jnp.where(y > 0, jnp.float32(jnp.inf), jnp.float32(-jnp.inf))
        # An infinite y makes `shift` infinite too, and the difference NaN.
        rounded = jnp.where(jnp.abs(y) >= jnp.float32(65520.0), infinite, rounded)
    return rounded


def round_probabilities(p: jax.Array, fmt: Format, most: float) -> jax.Array:
    """`round_on_grid` of p float32 in [0, most]: float8 and float16 take four vector operations.

    The shift is 2**(23 - mantissa) p, whose last bit is the grid's step at p. So is that of
    p - shift, or half of it next above a power of two, where the nearest is that power either way.
    Halfway cases have a shift of an even number of steps, and so go to even. Below the least normal
    the grid is uniform: the shift is a constant, above that normal's own lest the difference have
    a finer last bit.

    ValueError for float16 beyond its largest value, which would be infinite.
    """
    if fmt.dtype not in _LEAST_NORMAL:
        return round_on_grid(p, fmt)
    largest = _LARGEST[fmt.dtype]
    if most > largest:
        if fmt.dtype == "float16":
            raise ValueError(f"round_probabilities: {most=} is beyond float16's {largest:g}.")
        p = jnp.minimum(p, jnp.float32(largest))
    least = jnp.float32(1.5 * _LEAST_NORMAL[fmt.dtype])
    shift = jnp.maximum(p, least) * jnp.float32(2.0 ** (23 - _MANTISSA[fmt.dtype]))
    return (p - shift) + shift


def fits_bfloat16(fmt: Format) -> bool:
    """Whether every value of the format's dtype, before its scale is undone, is a bfloat16."""
    if fmt.mantissa_bits is not None:
        return fmt.mantissa_bits <= 7
    return fmt.dtype in ("bfloat16", "float8_e4m3fn")


def bfloat16_pieces(x: jax.Array, count: int) -> list[jax.Array]:
    """`count` bfloat16 arrays whose sum is x float32 to 8 * count bits (3: exactly)."""
    pieces = []
    for _ in range(count - 1):
        # Not `x.astype(bfloat16).astype(float32)`: XLA may drop that pair, and x - x is no rest.
        high = _drop_bits(x, 16)
        pieces.append(high.astype(jnp.bfloat16))
        x = x - high
    return [*pieces, x.astype(jnp.bfloat16)]


def _drop_bits(y: jax.Array, count: int) -> jax.Array:
    """y without its last `count` mantissa bits, to nearest, ties to even."""
    bits = jax.lax.bitcast_convert_type(y, jnp.int32)
    odd = jax.lax.shift_right_logical(bits, jnp.full_like(bits, count)) & jnp.int32(1)
    bits = (bits + odd + jnp.int32((1 << (count - 1)) - 1)) & jnp.int32(-(1 << count))
    return jax.lax.bitcast_convert_type(bits, jnp.float32)

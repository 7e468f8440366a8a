"""Formats: to which grid one tensor is rounded, and the rounding itself.

XLA may drop an `f32 -> bf16 -> f32` pair of casts (`xla_allow_excess_precision`), so rounding is
written as `lax.reduce_precision`, which is always executed, plus a fixed-point rounding for the
subnormals that `reduce_precision` would flush. Every format agrees bit for bit with `ml_dtypes`.
"""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np

_ALIASES = {
    "f32": "float32",
    "float32": "float32",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "f16": "float16",
    "fp16": "float16",
    "float16": "float16",
    "fp8": "float8_e4m3fn",
    "e4m3": "float8_e4m3fn",
    "float8_e4m3fn": "float8_e4m3fn",
}
_SHORT = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "float8_e4m3fn": "fp8"}
_MANTISSA = {"float32": 23, "bfloat16": 7, "float16": 10, "float8_e4m3fn": 3}
_MIN_NORMAL_EXPONENT = {"float16": -14, "float8_e4m3fn": -6}
_MAX = {"float16": 65504.0, "float8_e4m3fn": 448.0}
# Scales outside would overflow, or be flushed to zero, as float32 constants.
_SCALE_MIN, _SCALE_MAX = 2.0**-100, 2.0**100


@dataclasses.dataclass(frozen=True)
class Format:
    """How one tensor is rounded: x -> round(x * scale) * (1 / scale) on the grid of `dtype`.

    The reciprocal is float32's: XLA turns a division by a constant into this product, so that
    only the product has the same bits with and without jit.

    `mantissa_bits=N` (1..22) instead keeps N explicit mantissa bits with float32's exponent range.
    float8_e4m3fn saturates at +-448 (as CUDA's `satfinite` casts do); float16 overflows to inf.
    """

    dtype: str = "float32"
    scale: float = 1.0
    mantissa_bits: int | None = None

    def __post_init__(self) -> None:
        if self.dtype not in _MANTISSA:
            raise ValueError(f"Format: dtype={self.dtype!r} is not one of {sorted(_MANTISSA)}.")
        if not _SCALE_MIN <= self.scale <= _SCALE_MAX:
            raise ValueError(
                f"Format: scale={self.scale!r} is not between {_SCALE_MIN:g} and {_SCALE_MAX:g}."
            )
        if self.dtype == "float32" and self.scale != 1.0:
            raise ValueError(f"Format: scale={self.scale!r} on float32 rounds nothing; it is 1.")
        if self.mantissa_bits is not None:
            if self.dtype != "float32":
                raise ValueError(
                    f"Format: mantissa_bits={self.mantissa_bits} goes with float32, not"
                    f" {self.dtype}."
                )
            if not 1 <= self.mantissa_bits <= 22:
                raise ValueError(f"Format: mantissa_bits={self.mantissa_bits} is not in 1..22.")

    @classmethod
    def parse(cls, text: str) -> Format:
        """`f32`, `bf16`, `f16`, `fp8` (e4m3), each optionally `*SCALE`; or `mN`, N in 1..22."""
        if match := re.fullmatch(r"m(\d+)", text):
            return cls(mantissa_bits=int(match[1]))
        name, star, scale = text.partition("*")
        if name not in _ALIASES:
            raise ValueError(
                f"format {text!r}: expected one of {', '.join(_SHORT.values())}, optionally"
                " *SCALE (fp8*448), or mN for N mantissa bits (m7)."
            )
        try:
            factor = float(scale) if star else 1.0
        except ValueError:
            raise ValueError(f"format {text!r}: scale {scale!r} is not a number.") from None
        return cls(_ALIASES[name], factor)

    def __str__(self) -> str:
        if self.mantissa_bits is not None:
            return f"m{self.mantissa_bits}"
        if self.scale == 1.0:
            return _SHORT[self.dtype]
        short = f"{self.scale:g}"  # 448, not 448.0
        scale = short if float(short) == self.scale else repr(self.scale)
        return f"{_SHORT[self.dtype]}*{scale}"

    @property
    def is_exact(self) -> bool:
        """Whether rounding to it changes no float32 value."""
        return self.dtype == "float32" and self.mantissa_bits is None

    @property
    def reciprocal(self) -> float:
        """1 / scale as float32."""
        return float(np.float32(1.0) / np.float32(self.scale))

    @property
    def storage_dtype(self) -> jnp.dtype:
        """The array dtype that `store` returns: the format's own, or float32 as a container."""
        plain = self.mantissa_bits is None and self.scale == 1.0
        return jnp.dtype(self.dtype if plain else "float32")


F32 = Format()
BF16 = Format("bfloat16")
F16 = Format("float16")
E4M3 = Format("float8_e4m3fn")
E4M3_448 = Format("float8_e4m3fn", 448.0)
E4M3_256 = Format("float8_e4m3fn", 256.0)


def round_to(x: jax.Array, fmt: Format) -> jax.Array:
    """x (any float dtype and shape) as float32 values on the format's grid, ties to even."""
    x = x.astype(jnp.float32)
    if fmt.is_exact:
        return x
    if fmt.mantissa_bits is not None:
        return jax.lax.reduce_precision(x, 8, fmt.mantissa_bits)
    y = x if fmt.scale == 1.0 else x * jnp.float32(fmt.scale)
    if fmt.dtype in _MIN_NORMAL_EXPONENT:
        y = _round_narrow(y, fmt.dtype)
    else:
        y = jax.lax.reduce_precision(y, 8, _MANTISSA[fmt.dtype])
    return y if fmt.scale == 1.0 else y * jnp.float32(fmt.reciprocal)


def store(x: jax.Array, fmt: Format) -> jax.Array:
    """x rounded to the format, in its storage dtype."""
    return round_to(x, fmt).astype(fmt.storage_dtype)


def _round_narrow(y: jax.Array, dtype: str) -> jax.Array:
    largest = jnp.float32(_MAX[dtype])
    if dtype == "float8_e4m3fn":
        # XLA's own cast turns values above 464 into NaN instead of saturating.
        y = jnp.clip(y, -largest, largest)
    mantissa, exponent = _MANTISSA[dtype], _MIN_NORMAL_EXPONENT[dtype]
    normal = jax.lax.reduce_precision(y, 8, mantissa)
    if dtype == "float16":
        normal = jnp.where(jnp.abs(normal) > largest, jnp.copysign(jnp.inf, y), normal)
    # Below the smallest normal the grid is uniform, with the spacing of the last mantissa bit.
    step = jnp.float32(2.0 ** (exponent - mantissa))
    subnormal = jnp.round(y / step) * step
    return jnp.where(jnp.abs(y) < jnp.float32(2.0**exponent), subnormal, normal)


def bits_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """The unsigned integers that `as_bits` turns floats of `dtype` into; wide floats stay."""
    width = jnp.dtype(dtype).itemsize
    return jnp.dtype(dtype) if width >= 4 else jnp.dtype(f"uint{8 * width}")


def as_bits(x: jax.Array) -> jax.Array:
    """x, narrow floats as unsigned integers of the same bits.

    XLA's CPU backend slices no bfloat16: a loop over slices of a narrow cache would take the whole
    cache to float32 first. Integers it slices as they are.
    """
    dtype = bits_dtype(x.dtype)
    return x if x.dtype == dtype else jax.lax.bitcast_convert_type(x, dtype)


def from_bits(bits: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The floats of `dtype` whose bits these are: the inverse of `as_bits`."""
    return bits if bits.dtype == dtype else jax.lax.bitcast_convert_type(bits, dtype)

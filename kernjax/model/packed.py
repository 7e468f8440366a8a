"""Quantised matrices as parameters: codes and scales stay in memory, a layer's values are made.

A `Packed` stands where the array of a parameter would, and `packed[...]` gives that array: code
that reads a parameter does not know. Inside the scan over layers what is read is one layer's (of
experts one expert's), so that only its values exist at a time.

Both formats of `kernjax.weights.quantisation`, values [..., in, out] from

- FP8: codes float8_e4m3fn [..., in, out], scales bfloat16, float16 or float32;
- MXFP4: codes uint8 [..., in / 2, out], rows 2i and 2i + 1 in the low and high half of byte i,
  scales uint8, E8M0: 2^(s - 127), NaN for 255.

Scales are [..., in / group, out], each of `group` consecutive rows of its column: published blocks
of columns are repeated, so that scales lie on a mesh as their codes do. float32 holds the products
as when the file is dequantised at load: the same bits, but for values below 2^-126, which a device
may flush to zero (here as they are made, there as they are multiplied).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.formats import Format, round_to


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packed:
    """Codes and scales of a matrix, or of a stack; `dtype` and `rounding` are its values'.

    Leaves may be arrays, shapes or shardings; `rounding` (None: no more than `dtype` does) is a
    format of the policy that has no dtype.
    """

    codes: Any
    scales: Any
    dtype: np.dtype = dataclasses.field(metadata={"static": True})
    rounding: Format | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the values."""
        *lead, rows, columns = self.codes.shape
        return (*lead, rows * _codes_in(self.codes), columns)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __getitem__(self, key: Any) -> jax.Array:
        """The values, in `dtype`. [...] only: parts are taken of codes and scales (`tree.map`)."""
        if key is not Ellipsis:
            raise TypeError(f"Packed[{key!r}]: take parts of codes and scales, then [...].")
        # Or the compiler turns the conversion of a layer's slice into a slice of the converted
        # stack, which it then makes once, before the loop over layers.
        codes, scales = jax.lax.optimization_barrier((self.codes, self.scales))
        codes = _e2m1(codes) if _codes_in(codes) == 2 else codes
        scales = _e8m0(scales) if scales.dtype == jnp.uint8 else scales.astype(jnp.float32)
        shape, groups = self.shape, scales.shape[-2]
        blocks = (*shape[:-2], groups, shape[-2] // groups, shape[-1])
        values = codes.astype(jnp.float32).reshape(blocks) * scales[..., None, :]
        values = values.reshape(shape)
        if self.rounding is not None:
            values = round_to(values, self.rounding)
        return values.astype(self.dtype)


def unpacked(leaf: jax.Array | Packed) -> jax.Array:
    """The values of a parameter, however it is held."""
    return leaf[...] if isinstance(leaf, Packed) else leaf


def packed_shapes(
    shape: tuple[int, ...], per_byte: int, block: int, local_rows: int
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Shapes of codes and scales of values [..., in, out], of which a device holds `local_rows`.

    `per_byte` codes are in a byte, `block` rows share a scale in the file: here as many as divide
    both that and what a device holds. None: a device would hold half a byte.
    """
    *lead, rows, columns = shape
    if local_rows % per_byte:
        return None
    group = math.gcd(block, local_rows)
    return (*lead, rows // per_byte, columns), (*lead, rows // group, columns)


def _codes_in(codes: Any) -> int:
    """Values a code element holds."""
    return 2 if codes.dtype == jnp.uint8 else 1


def _e2m1(packed: jax.Array) -> jax.Array:
    """float32 [..., 2R, C] of bytes [..., R, C]."""
    *lead, rows, columns = packed.shape
    halves = jnp.stack([packed & 15, packed >> 4], axis=-2).astype(jnp.int32)
    magnitude = halves & 7
    # Twice the value is whole: 0 1 2 3, then two bits shifted: 4 6, 8 12.
    shifted = (2 | (magnitude & 1)) << (jnp.maximum(magnitude >> 1, 1) - 1)
    twice = jnp.where(magnitude < 2, magnitude, shifted).astype(jnp.float32)
    values = jnp.where(halves & 8, -0.5, 0.5) * twice
    return values.reshape(*lead, 2 * rows, columns)


def _e8m0(scales: jax.Array) -> jax.Array:
    """2^(s - 127) as float32; NaN for 255."""
    bits = scales.astype(jnp.uint32) << 23
    # 2^-127 is float32's: the upper half of a subnormal one. 255 would be infinite.
    bits = jnp.where(scales == 0, jnp.uint32(1 << 22), bits)
    bits = jnp.where(scales == 255, jnp.uint32(0x7FC00000), bits)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)

"""The rounding that kernels execute is the formats' own, bit for bit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import formats, kernel_rounding
from pallas_kernels.formats import BF16, E4M3, E4M3_256, E4M3_448, F16, F32, Format

FORMATS = (
    F32, BF16, F16, E4M3, E4M3_448, E4M3_256, Format("float16", 3.0), Format(mantissa_bits=4),
    Format(mantissa_bits=16),
)  # fmt: skip


def _values() -> np.ndarray:
    """Every kind of float32: random bits, every tie of the narrow grids, the ends."""
    rng = np.random.default_rng(0)
    random = rng.integers(0, 2**32, 300_000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    ties = [np.arange(-500, 500, 2.0**-5), np.arange(-65_536, 65_536, 0.5), [np.inf, -np.inf, -0.0]]
    small = np.arange(0, 2.0**-5, 2.0**-16)
    values = np.concatenate([random, small, -small, *ties], dtype=np.float32, casting="same_kind")
    return values[~np.isnan(values)]


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_rounds_as_the_format_says(fmt):
    x = _values()
    ours = jax.jit(kernel_rounding.round_to, static_argnums=1)(x, fmt)
    expected = jax.jit(formats.round_to, static_argnums=1)(x, fmt)
    np.testing.assert_array_equal(np.asarray(ours), np.asarray(expected))


@pytest.mark.parametrize("fmt", (BF16, F16, E4M3, E4M3_448, Format(mantissa_bits=4)), ids=str)
def test_probabilities_spare_operations_but_no_bit(fmt):
    """Every low bit around powers of two and halfway cases, the uniform grid at the bottom, and
    all float32 of one power of two, where an error of the last bits would hide."""
    most = 2.0 if fmt.dtype == "float16" else fmt.scale
    grid = _values()
    near = [grid.view(np.int32) + np.int32(i) for i in range(-3, 4)]
    dense = np.arange(2**23, dtype=np.int32) + np.float32(1).view(np.int32)
    x = np.concatenate([*near, dense]).view(np.float32)
    x = np.append(x[(x >= 0) & (x <= most)], np.float32([0, most]))

    def both(x):
        return kernel_rounding.round_probabilities(x, fmt, most), kernel_rounding.round_on_grid(
            x, fmt
        )

    ours, expected = jax.jit(both)(x)
    np.testing.assert_array_equal(np.asarray(ours), np.asarray(expected))


def test_probabilities_beyond_the_format():
    """float8 saturates, as P with a maximum that was not raised does; float16 would be infinite."""
    x = np.float32([300, 448, 449, 7168])
    clipped = kernel_rounding.round_probabilities(jnp.asarray(x), E4M3_448, 7168.0)
    np.testing.assert_array_equal(np.asarray(clipped), np.float32([288, 448, 448, 448]))
    with pytest.raises(ValueError, match="most=70000.0 is beyond float16's 65504"):
        kernel_rounding.round_probabilities(jnp.asarray(x), F16, 70000.0)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_fits_bfloat16(fmt):
    plain = Format(fmt.dtype, 1.0, fmt.mantissa_bits)
    grid = np.asarray(formats.round_to(_values(), plain))
    grid = grid[np.isfinite(grid) & (np.abs(grid) > 1e-30)]
    exact = np.array_equal(grid, np.asarray(jnp.asarray(grid).astype(jnp.bfloat16), np.float32))
    assert kernel_rounding.fits_bfloat16(fmt) == exact


def test_three_bfloat16_pieces_are_the_float32():
    x = np.random.default_rng(1).standard_normal(10_000).astype(np.float32)
    pieces = jax.jit(kernel_rounding.bfloat16_pieces, static_argnums=1)(x, 3)
    total = sum(np.asarray(piece, np.float64) for piece in pieces)
    np.testing.assert_array_equal(total, x.astype(np.float64))
    two = jax.jit(kernel_rounding.bfloat16_pieces, static_argnums=1)(x, 2)
    total = sum(np.asarray(piece, np.float64) for piece in two)
    assert 0 < np.abs(total / x - 1).max() < 2.0**-16

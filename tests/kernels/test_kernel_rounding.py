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


@pytest.mark.parametrize("fmt", (BF16, F16, E4M3), ids=str)
def test_in_range_spares_a_check_but_no_bit(fmt):
    x = np.concatenate([np.arange(0, 2, 2.0**-14), [1e-9, 440.0]]).astype(np.float32)
    spared = jax.jit(
        lambda x: kernel_rounding.round_on_grid(x, fmt, in_range=True),
    )(x)
    np.testing.assert_array_equal(np.asarray(spared), np.asarray(formats.round_to(x, fmt)))


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

"""Rounding agrees bit for bit with ml_dtypes and an integer oracle, under jit, and stays there."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.formats import (
    BF16,
    E4M3,
    E4M3_256,
    E4M3_448,
    F16,
    F32,
    Format,
    round_to,
    store,
)

NARROW = {
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
}
CAST_FORMATS = [
    BF16,
    F16,
    E4M3,
    E4M3_448,
    E4M3_256,
    Format("float16", 8.0),
    Format("bfloat16", 3.0),
    Format("float8_e4m3fn", 0.3),
]


def oracle(x: np.ndarray, fmt: Format) -> np.ndarray:
    """round_to in NumPy: ml_dtypes' casts, and integer arithmetic for mantissa bits."""
    if fmt.mantissa_bits is not None:
        return keep_mantissa_bits(x, fmt.mantissa_bits)
    with np.errstate(over="ignore", invalid="ignore"):
        y = x * np.float32(fmt.scale)
        if fmt.dtype == "float8_e4m3fn":
            y = np.clip(y, -448, 448)
        return y.astype(NARROW[fmt.dtype]).astype(np.float32) * reciprocal(fmt.scale)


def reciprocal(scale: float) -> np.float32:
    return np.float32(1) / np.float32(scale)


def keep_mantissa_bits(x: np.ndarray, bits: int) -> np.ndarray:
    """Round to nearest even by adding just under half of the last kept bit's unit, as integers."""
    pattern = x.view(np.uint32).astype(np.uint64)
    drop = np.uint64(23 - bits)
    kept_is_odd = (pattern >> drop) & np.uint64(1)
    half = (np.uint64(1) << (drop - np.uint64(1))) - np.uint64(1)
    rounded = (pattern + half + kept_is_odd) >> drop << drop
    result = rounded.astype(np.uint32).view(np.float32)
    return np.where(np.isnan(x), x, result)


def around(values: np.ndarray) -> np.ndarray:
    """The values, the midpoints of neighbours, each one ulp down and up, and all negated."""
    values = np.unique(values[np.isfinite(values)]).astype(np.float32)
    middle = ((values[1:].astype(np.float64) + values[:-1]) / 2).astype(np.float32)
    points = np.concatenate([values, middle])
    down, up = np.nextafter(points, np.float32(-np.inf)), np.nextafter(points, np.float32(np.inf))
    both = np.concatenate([points, down, up])
    return np.concatenate([both, -both])


def edges() -> np.ndarray:
    """Zeros, subnormals, infinities, NaNs, overflow borders, and every exponent at random."""
    special = np.array(
        [0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 1e-45, -1e-45, 1.17e-38, 3.4028235e38]
        + [448, 463.9, 464, 464.1, 480, 1e4, 65503, 65519.996, 65520, 65536, 2**-6, 2**-9, 2**-10],
        np.float32,
    )
    patterns = np.random.default_rng(0).integers(0, 2**32, 100_000, np.uint32)
    return np.concatenate([special, -special, patterns.view(np.float32)])


def sample(fmt: Format) -> np.ndarray:
    """The inputs that decide: all codes and their midpoints, undone by the scale, and `edges`."""
    if fmt.mantissa_bits is not None:
        mantissas = np.arange(min(2**fmt.mantissa_bits, 512), dtype=np.float32)
        mantissas = 1 + mantissas / np.float32(2**fmt.mantissa_bits)
        codes = np.concatenate([mantissas * np.float32(2.0**e) for e in (-140, -126, -3, 0, 127)])
    else:
        width = np.uint8 if fmt.dtype == "float8_e4m3fn" else np.uint16
        every = np.arange(np.iinfo(width).max + 1, dtype=width)
        codes = every.view(NARROW[fmt.dtype]).astype(np.float32)
        codes = codes[np.isfinite(codes)] * reciprocal(fmt.scale)
    x = np.concatenate([around(codes), edges()])
    # XLA's products flush float32 subnormals to zero; a scaled format multiplies.
    return x if fmt.scale == 1.0 else x[(x == 0) | ~(np.abs(x) < 2.0**-120)]


def differing_bits(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Which entries differ, -0 from 0 included; one NaN is like another."""
    bits = np.asarray(got, np.float32).view(np.uint32) != want.view(np.uint32)
    return bits & ~(np.isnan(got) & np.isnan(want))


def count_wrong(rounding: Callable[[jax.Array], jax.Array], fmt: Format) -> int:
    x = sample(fmt)
    return int(differing_bits(np.asarray(jax.jit(rounding)(x)), oracle(x, fmt)).sum())


@pytest.mark.parametrize("fmt", CAST_FORMATS, ids=str)
def test_every_code_and_midpoint_agrees_with_ml_dtypes(fmt: Format) -> None:
    assert count_wrong(lambda x: round_to(x, fmt), fmt) == 0


@pytest.mark.parametrize("bits", range(1, 23))
def test_mantissa_bits_agree_with_integer_arithmetic(bits: int) -> None:
    fmt = Format(mantissa_bits=bits)
    assert count_wrong(lambda x: round_to(x, fmt), fmt) == 0


def test_seven_mantissa_bits_are_bfloat16() -> None:
    x = sample(BF16)
    assert not differing_bits(oracle(x, Format(mantissa_bits=7)), oracle(x, BF16)).any()


@pytest.mark.parametrize(
    ("fmt", "wrong"),
    [
        (BF16, lambda x: x),  # a pair of casts that the compiler dropped
        (E4M3, lambda x: x.astype(jnp.float8_e4m3fn).astype(jnp.float32)),  # NaN above 464
        (F16, lambda x: jax.lax.reduce_precision(x, 5, 10)),  # flushes float16's subnormals
        (E4M3_448, lambda x: round_to(x, E4M3_256)),
        (Format(mantissa_bits=4), lambda x: round_to(x, Format(mantissa_bits=5))),
        (BF16, lambda x: jax.lax.bitcast_convert_type(
            jax.lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFF0000), jnp.float32)),
    ],
    ids=["dropped", "not saturated", "no subnormals", "other scale", "other bits", "truncated"],
)  # fmt: skip
def test_the_comparison_sees_a_wrong_rounding(fmt: Format, wrong: Callable) -> None:
    assert count_wrong(wrong, fmt) > 0


@pytest.mark.parametrize("fmt", [*CAST_FORMATS, Format(mantissa_bits=4)], ids=str)
def test_rounding_survives_fusion(fmt: Format) -> None:
    """Inside one larger expression the rounded bits are still those of the oracle."""
    rng = np.random.default_rng(1)
    x, y = rng.standard_normal((2, 4096)).astype(np.float32)

    def expression(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.maximum(round_to(round_to(x + y, fmt) - y, fmt), x) + y

    want = np.maximum(oracle(oracle(x + y, fmt) - y, fmt), x) + y
    assert not differing_bits(np.asarray(jax.jit(expression)(x, y)), want).any()


def keeps_rounding(function: Callable, *args: jax.ShapeDtypeStruct) -> bool:
    """Whether the optimised program still holds the rounding, in a form no pass may drop."""
    return "reduce-precision(" in jax.jit(function).lower(*args).compile().as_text()


def test_the_optimised_program_still_rounds() -> None:
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    for fmt in [*CAST_FORMATS, Format(mantissa_bits=22)]:
        assert keeps_rounding(lambda a, fmt=fmt: jnp.tanh(round_to(a * a, fmt)) @ a, x), fmt
        assert keeps_rounding(lambda a, fmt=fmt: store(a + 1, fmt).astype(jnp.float32) * a, x), fmt
    # Negative controls: a pair of casts, which a compiler is free to drop, and no rounding at all.
    pair = lambda a: (a * a).astype(jnp.bfloat16).astype(jnp.float32) @ a  # noqa: E731
    assert not keeps_rounding(pair, x)
    assert not keeps_rounding(lambda a: round_to(a * a, F32) @ a, x)


def test_worked_values() -> None:
    def rounded(x: float, fmt: Format) -> float:
        return float(round_to(jnp.float32(x), fmt))

    assert rounded(0.0009, E4M3) == 0.0
    assert rounded(0.0009, E4M3_448) == pytest.approx(0.000906808, abs=5e-10)
    assert rounded(2**-9, E4M3) == 0.001953125  # smallest positive
    assert rounded(2**-10, E4M3) == 0.0  # halfway: to even
    assert rounded(448, E4M3) == rounded(1e9, E4M3) == rounded(float("inf"), E4M3) == 448.0
    assert rounded(1.0, E4M3_448) == 1.0


def test_rounding_again_changes_nothing() -> None:
    for fmt in [BF16, F16, E4M3, E4M3_448, E4M3_256, Format(mantissa_bits=3)]:
        once = round_to(edges(), fmt)
        assert not differing_bits(np.asarray(round_to(once, fmt)), np.asarray(once)).any(), fmt


@pytest.mark.parametrize(
    ("fmt", "dtype"),
    [
        (F32, "float32"),
        (BF16, "bfloat16"),
        (F16, "float16"),
        (E4M3, "float8_e4m3fn"),
        (E4M3_448, "float32"),
        (Format(mantissa_bits=7), "float32"),
    ],
    ids=str,
)
def test_store_holds_the_rounded_values(fmt: Format, dtype: str) -> None:
    x = edges()
    stored = jax.jit(lambda x: store(x, fmt))(x)
    assert stored.dtype == fmt.storage_dtype == jnp.dtype(dtype)
    back = np.asarray(stored).astype(np.float32)
    assert not differing_bits(back, np.asarray(round_to(x, fmt))).any()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn"])
def test_narrow_inputs_are_widened_first(dtype: str) -> None:
    x = jnp.asarray([0.1, 0.3, 7.0], dtype)
    assert round_to(x, F32).dtype == jnp.float32
    np.testing.assert_array_equal(round_to(x, Format(dtype)), np.asarray(x, np.float32))


bits = st.integers(1, 22).map(lambda n: Format(mantissa_bits=n))
scales = st.floats(2.0**-100, 2.0**100)
scaled = st.builds(Format, st.sampled_from(sorted(NARROW)), scales | st.just(1.0))


@settings(deadline=None)  # the machine may be busy
@given(st.just(F32) | bits | scaled)
def test_text_is_read_back(fmt: Format) -> None:
    assert Format.parse(str(fmt)) == fmt


def test_texts() -> None:
    assert [str(f) for f in (F32, BF16, F16, E4M3, E4M3_448)] == "f32 bf16 f16 fp8 fp8*448".split()
    assert Format.parse("e4m3*256") == E4M3_256
    assert Format.parse("float8_e4m3fn") == E4M3
    assert Format.parse("m7") == Format(mantissa_bits=7)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fp9", "'fp9': expected one of f32, bf16, f16, fp8"),
        ("", "expected one of"),
        ("m0", "mantissa_bits=0 is not in 1..22"),
        ("m23", "mantissa_bits=23 is not in 1..22"),
        ("m7*2", "expected one of"),
        ("fp8*", "scale '' is not a number"),
        ("fp8*x", "scale 'x' is not a number"),
        ("fp8*0", "scale=0.0 is not between"),
        ("fp8*-1", "scale=-1.0 is not between"),
        ("fp8*nan", "scale=nan is not between"),
        ("fp8*1e60", "scale=1e+60 is not between"),
        ("f32*448", "on float32 rounds nothing"),
    ],
)
def test_what_is_no_format(text: str, message: str) -> None:
    with pytest.raises(ValueError) as error:
        Format.parse(text)
    assert message in str(error.value)


def test_what_is_no_record() -> None:
    with pytest.raises(ValueError, match="float64"):
        Format("float64")
    with pytest.raises(ValueError, match="goes with float32, not bfloat16"):
        Format("bfloat16", mantissa_bits=3)

"""The TPU attention kernel in the plain interpreter: the same checks, splits, tiles, refusals."""

from __future__ import annotations

import dataclasses

import attention_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import ROUNDINGS, assert_true, check_rounding, make, row_errors, tiled
from attention_tpu import interpreted, run

from pallas_kernels import attention
from pallas_kernels.attention import AttentionFormats, Tiles
from pallas_kernels.attention.tiles import choose, choose_tpu
from pallas_kernels.formats import BF16, E4M3, E4M3_256, E4M3_448, F16, F32, Format

# Every shape and format is a program of its own to compile: the telling ones, not all of them.
CHECKS = [check for check in cases.CHECKS if check not in (cases.check_mass, cases.check_batch)]
SITES = ("operands", "scores", "p f16", "p m4", "p fp8*448, bf16 dots", "row sum", "lazy")


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_check(check):
    check(interpreted())


@pytest.mark.parametrize("site", SITES)
def test_rounding(site):
    check_rounding(interpreted(), ROUNDINGS[site])


def test_mass():
    """V = 1: unscaled e4m3 loses mass, x448 keeps it (the other formats: test_attention.py)."""
    case = make(12, B=1, T=4, S=1024, N=2, G=1, sigma=2.0, constant_v=True)
    direct = run(case._replace(formats=AttentionFormats(p=E4M3)))
    kept = run(case._replace(formats=AttentionFormats(p=E4M3_448)))
    assert direct.mean() < 0.995
    assert 0.998 < kept.mean() < 1.002


@pytest.mark.parametrize(
    "shape",
    [
        dict(T=70, S=300, N=6, G=1, H=256, Hv=256),
        dict(T=70, S=300, N=2, G=2, H=192, Hv=128),
        dict(T=1, S=300, N=6, G=2, H=128, Hv=128),
        dict(T=5, S=300, N=4, G=2, H=64, Hv=64),
    ],
    ids=str,
)
def test_model_widths(shape):
    """Head sizes and groupings of the models, bf16 throughout, blocks that end inside."""
    formats = AttentionFormats(q=BF16, k=BF16, v=BF16, p=BF16, block_k=128)
    case = make(50, B=1, **shape)._replace(formats=formats)
    k, v = (np.asarray(jnp.asarray(x).astype(jnp.bfloat16)) for x in (case.k, case.v))
    case = case._replace(k=k, v=v)
    error = row_errors(run(case), tiled(case))
    assert np.quantile(error, 0.8) <= 2e-6 and error.max() < 1e-3


@pytest.mark.parametrize(
    "stored, p",
    [("bfloat16", F32), ("bfloat16", F16), ("float16", BF16), ("float8_e4m3fn", E4M3_448)],
    ids=str,
)
def test_narrow_cache(stored, p):
    """A narrow cache with scales that are no 1, under P that fits one, two and three bfloat16."""
    case = make(51, B=1, T=6, S=200, lengths=(190,))
    k, v = (np.asarray(jnp.asarray(x * 2).astype(stored)) for x in (case.k, case.v))
    formats = AttentionFormats(q=BF16, p=p, block_k=128)
    case = case._replace(k=k, v=v, k_scale=0.5, v_scale=0.25, formats=formats)
    error = row_errors(run(case), tiled(case))
    assert np.quantile(error, 0.8) <= 2e-6 and error.max() < 1e-2


def _splits(case: cases.Case, splits: int) -> Tiles:
    tiles = dataclasses.replace(choose(case.q, case.k, case.formats), block_k=64, block_kv=64)
    return dataclasses.replace(tiles, splits=splits)


def test_splits_merge_by_their_log_sum_exp():
    """Peaked scores, a hot key in the last split, and splits that hold no key of a row."""
    case = make(52, T=3, S=600, sigma=4.0, lengths=(600, 40))
    k = case.k.copy()
    k[0, 590] = 4 * case.q[0, 1].reshape(2, 2, 16).mean(1)
    case = case._replace(k=k)
    assert_true(run(case, tiles=_splits(case, 4)), case)
    bfloat16 = case._replace(formats=AttentionFormats(p=BF16, block_k=64))
    whole, parts = (run(bfloat16, tiles=_splits(bfloat16, n)) for n in (1, 3))
    apart = np.linalg.norm(whole - parts) / np.linalg.norm(whole)
    assert 0 < apart < 3e-3  # each split rounds P against a maximum of its own


def test_splits_round_against_their_own_maximum():
    """Two splits are two softmaxes: each the oracle of its half, weighted by exp(lse)."""
    formats = AttentionFormats(p=E4M3_448, block_k=64)
    case = make(53, B=1, T=1, S=256, sigma=2.0)._replace(formats=formats)
    expected, _ = cases.in_parts(case, 128)
    error = row_errors(run(case, tiles=_splits(case, 2)), expected)
    assert np.median(error) <= 2e-6 and error.max() < 1e-2


def test_tiles_change_no_result():
    """Exact formats: grouped heads or single ones, short or long blocks, to float32 rounding."""
    case = make(54, T=40, S=300, N=4, G=1)
    for tiles in (Tiles(1, 32, 16, 32), Tiles(4, 8, 64, 64)):
        assert_true(run(case, tiles=tiles), case)


def test_fp8_dot_multiplies_what_is_rounded_anyway():
    """P in e4m3 on an e4m3 cache: float8 operands hold the same values as bfloat16 ones."""
    case = make(55, B=1, T=4, S=128)._replace(formats=AttentionFormats(p=E4M3_448, block_k=128))
    k, v = (np.asarray(jnp.asarray(x).astype(jnp.float8_e4m3fn)) for x in (case.k, case.v))
    case = case._replace(k=k, v=v)
    tiles = choose(case.q, case.k, case.formats)
    fp8 = run(case, tiles=dataclasses.replace(tiles, fp8_dot=True))
    np.testing.assert_allclose(fp8, run(case, tiles=tiles), rtol=0, atol=2e-6)


@pytest.mark.parametrize("row_sum", ["unrounded", "rounded"])
def test_fp8_cast_has_the_bits_of_the_arithmetic(row_sum):
    """The chip's own conversion, saturating by hand: P reaches 4096 where the rescale is lazy."""
    formats = AttentionFormats(
        v=BF16, p=E4M3_256, row_sum=row_sum, rescale_threshold=4.0, block_k=128
    )
    case = make(65, B=1, T=4, S=300, sigma=2.0)._replace(formats=formats)
    tiles = choose(case.q, case.k, formats)
    cast = run(case, tiles=dataclasses.replace(tiles, fp8_cast=True))
    np.testing.assert_array_equal(cast, run(case, tiles=tiles))


def test_tiles_of_a_chip():
    """Only TPU7x converts to e4m3 by itself, and only e4m3 is converted."""
    q = jax.ShapeDtypeStruct((1, 512, 4, 128), jnp.bfloat16)
    for kind, p, casts in (
        ("TPU7x", E4M3_448, True), ("TPU7x", BF16, False), ("TPU v6 lite", E4M3_448, False),
    ):  # fmt: skip
        formats = AttentionFormats(p=p)
        expected = dataclasses.replace(choose(q, q, formats), fp8_cast=casts)
        assert choose_tpu(q, q, formats, kind) == expected


@pytest.mark.parametrize("tokens, prefix", [(512, 0), (300, 512)])
def test_diagonal_of_long_blocks(tokens, prefix):
    """A block whose first query is its first key's own: 256 rows at a time, as many keys as they
    see, the mask in the last corner alone; and one that ends inside, which is masked by position.
    """
    case = make(66, B=1, T=tokens, S=tokens + prefix, N=1, G=1, H=8, Hv=8, sigma=2.0)
    case = case._replace(formats=AttentionFormats(p=E4M3_448, block_k=512))
    error = row_errors(run(case), tiled(case))
    assert np.quantile(error, 0.8) <= 2e-6 and error.max() < 1e-2


def test_layer_of_a_stack():
    case = make(56, T=3, S=70)
    k, v = (np.stack([np.full_like(x, np.nan), x]) for x in (case.k, case.v))
    o = attention.prefill(
        case.q, k, v, q_offset=case.q_offset, kv_length=case.kv_length, layer=jnp.int32(1),
        implementation="mosaic_tpu_interpret",
    )  # fmt: skip
    assert_true(np.asarray(o), case)


def test_callable_as_a_plug_in():
    """What `--kernel attention.prefill=pallas_kernels.attention:mosaic_tpu_interpret` calls."""
    case = make(59, T=3, S=20)
    o = attention.mosaic_tpu_interpret(
        case.q, case.k, case.v, q_offset=case.q_offset, kv_length=case.kv_length, scale=None,
        k_scale=1.0, v_scale=1.0, formats=AttentionFormats(),
    )  # fmt: skip
    assert_true(np.asarray(o), case)


@pytest.mark.parametrize(
    "formats, message",
    [
        (AttentionFormats(m=BF16), r"formats.m=bf16 is not f32"),
        (AttentionFormats(l=F16), r"formats.l=f16 is not f32"),
        (AttentionFormats(acc=Format(mantissa_bits=9)), r"formats.acc=m9 is not f32"),
        (AttentionFormats(p=Format("float16", 1e5)), r"formats.p=f16\*100000 .*overflows"),
    ],
)
def test_refused_formats_are_named(formats, message):
    case = make(57, T=2, S=20)
    with pytest.raises(NotImplementedError, match=message):
        run(case._replace(formats=formats))


def test_refused_tiles_are_named():
    case = make(57, T=2, S=300)._replace(formats=AttentionFormats(p=BF16, block_k=64))
    tiles = choose(case.q, case.k, case.formats)
    with pytest.raises(NotImplementedError, match="block_k=128 with formats.block_k=64"):
        run(case, tiles=dataclasses.replace(tiles, block_k=128, block_kv=128))
    with pytest.raises(NotImplementedError, match="fp8_dot with formats.p=bf16"):
        run(case, tiles=dataclasses.replace(tiles, fp8_dot=True))
    with pytest.raises(NotImplementedError, match="fp8_cast with formats.p=bf16"):
        run(case, tiles=dataclasses.replace(tiles, fp8_cast=True))
    with pytest.raises(ValueError, match="block_kv=100 must be a multiple of block_k=64"):
        Tiles(1, 8, 64, 100)
    with pytest.raises(ValueError, match="block_q=6 must be a power of two"):
        Tiles(1, 6, 64, 64)
    with pytest.raises(ValueError, match="splits=0"):
        Tiles(1, 8, 64, 64, splits=0)


def test_names():
    """`mosaic_tpu` refuses a CPU with the reason; the interpreted one is what `describe` says."""
    case = make(58, T=2, S=20)
    arrays = (case.q, case.k, case.v)
    lengths = dict(q_offset=case.q_offset, kv_length=case.kv_length)
    with pytest.raises(NotImplementedError, match="runs on TPU; this is 'cpu'"):
        attention.decode(*arrays, **lengths, implementation="mosaic_tpu")
    o = attention.decode(*arrays, **lengths, implementation="mosaic_tpu_interpret")
    assert_true(np.asarray(o), case)
    with jax.enable_x64(True):
        wide = [x.astype(np.float64) for x in arrays]
        with pytest.raises(NotImplementedError, match="float64"):
            attention.decode(*wide, **lengths, implementation="mosaic_tpu_interpret")


def test_describe():
    q = jax.ShapeDtypeStruct((1, 2048, 24, 256), jnp.bfloat16)
    kv = jax.ShapeDtypeStruct((1, 8192, 4, 256), jnp.bfloat16)
    formats = AttentionFormats(p=E4M3_256, block_k=256)
    found = attention.describe(
        "prefill", q, kv, kv, formats=formats, implementation="mosaic_tpu_interpret"
    )
    assert found["implementation"] == "mosaic_tpu_interpret"
    assert found["tiles"] == dataclasses.asdict(choose(q, kv, formats))
    assert found["tiles"]["block_k"] == 256 and found["tiles"]["heads"] == 6
    fallen = attention.describe("prefill", q, kv, kv, implementation=("mosaic_tpu", "xla"))
    assert fallen == {"implementation": "xla", "tiles": None}
    with pytest.raises(NotImplementedError, match="runs on TPU"):
        attention.describe("prefill", q, kv, kv, implementation="mosaic_tpu")

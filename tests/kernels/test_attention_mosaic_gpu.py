"""The GPU attention kernel in the GPU interpreter (jax 0.12), races watched; refusals anywhere."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from attention_cases import assert_true, make, row_errors, tiled
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import attention
from pallas_kernels.attention import AttentionFormats, Tiles, mosaic_gpu
from pallas_kernels.formats import BF16, E4M3_256, E4M3_448, F16, Format

BF16_OPERANDS = AttentionFormats(q=BF16, k=BF16, v=BF16, block_k=64)
interpreted = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"), reason="the GPU interpreter came with jax 0.12"
)


def run(case, tiles: Tiles | None = None, **interpret) -> np.ndarray:
    """Outputs; a race, or a read of what nobody wrote or of NaN slots, is no number."""
    watched = plgpu.InterpretGPUParams(detect_races=True, **interpret)
    rest = {name: getattr(case, name) for name in case._fields[3:]}
    o = mosaic_gpu.attention(*case[:3], tiles=tiles, interpret=watched, **rest)
    return np.asarray(o)


def with_formats(case, **changes):
    return case._replace(formats=dataclasses.replace(BF16_OPERANDS, **changes))


@interpreted
@pytest.mark.parametrize(
    "shape, changes",
    [
        (dict(B=1, T=70, S=150, N=1, G=1, H=64, Hv=64), dict(p=BF16)),
        (dict(B=2, T=1, S=150, N=6, G=2, H=64, Hv=64), dict(p=E4M3_448)),
        (dict(B=1, T=3, S=140, N=1, G=1, H=192, Hv=128), dict(p=F16, block_k=128)),
        (dict(B=1, T=2, S=70, N=4, G=2, H=64, Hv=64), dict(p=E4M3_256, row_sum="rounded")),
    ],
    ids=["ragged prefill", "decode", "MLA", "rounded sum"],
)
def test_rounds_where_the_oracle_rounds(shape, changes):
    case = with_formats(make(70, sigma=2.0, **shape), **changes)
    error = row_errors(run(case), tiled(case))
    assert np.quantile(error, 0.8) <= 2e-6 and error.max() < 1e-2


@interpreted
def test_float32_probabilities_are_exact_in_pieces():
    """The truth for operands that are bfloat16 already: nothing else rounds."""
    case = make(71, B=1, T=5, S=100, N=2, G=2, H=64, Hv=128, lengths=(90,))
    import ml_dtypes

    q, k, v = (x.astype(ml_dtypes.bfloat16) for x in case[:3])
    case = case._replace(q=q, k=k, v=v, k_scale=0.5, v_scale=2.0, formats=AttentionFormats())
    assert_true(run(case), case)


@interpreted
def test_keyless_rows_are_zero():
    case = make(72, B=2, T=2, S=70, N=1, G=1, H=64, Hv=64)
    case = with_formats(case._replace(kv_length=np.array([0, 47], np.int32)), p=BF16)
    o = run(case)
    assert (o[0] == 0).all() and np.isfinite(o).all() and (o[1] != 0).any()


@pytest.mark.parametrize(
    "shape, changes, message",
    [
        (dict(H=48, Hv=64), {}, "q and k of width 48"),
        (dict(H=64, Hv=320), {}, "v of width 320"),
        (dict(H=64, Hv=64), dict(q=AttentionFormats().q), "q is float32 after formats.q"),
        (dict(H=64, Hv=64), dict(m=BF16), "formats.m=bf16 is not f32"),
        (dict(H=64, Hv=64), dict(acc=F16), "formats.acc=f16 is not f32"),
        (dict(H=64, Hv=64), dict(p=BF16, block_k=512), "formats.block_k=512"),
        (dict(H=64, Hv=64), dict(p=Format("float16", 1e5)), "overflows float16"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_refusals_name_what_and_why(shape, changes, message):
    case = with_formats(make(73, B=1, T=2, S=80, N=2, G=1, **shape), **changes)
    rest = {name: getattr(case, name) for name in case._fields[3:]}
    with pytest.raises(NotImplementedError, match=message):
        mosaic_gpu.attention(*case[:3], **rest)


def test_refused_tiles():
    case = with_formats(make(73, B=1, T=2, S=80, N=2, G=1, H=64, Hv=64))
    rest = {name: getattr(case, name) for name in case._fields[3:]}
    for tiles in (Tiles(2, 64, 64, 64), Tiles(1, 2, 256, 256), Tiles(1, 2, 64, 64, splits=2)):
        with pytest.raises(NotImplementedError, match="Tiles"):
            mosaic_gpu.attention(*case[:3], tiles=tiles, **rest)


@pytest.mark.skipif(hasattr(plgpu, "store"), reason="this jax is new enough")
def test_refuses_a_jax_that_is_too_old():
    case = with_formats(make(73, B=1, T=2, S=80, N=2, G=1, H=64, Hv=64))
    rest = {name: getattr(case, name) for name in case._fields[3:]}
    with pytest.raises(NotImplementedError, match=r"jax 0\..* install jax 0\.12"):
        mosaic_gpu.attention(*case[:3], **rest)


def test_table_entry_refuses_a_cpu():
    case = make(74, T=2, S=20)
    with pytest.raises(NotImplementedError, match=r"compute capability 9.0 .*'cpu'"):
        attention.prefill(
            *case[:3], q_offset=case.q_offset, kv_length=case.kv_length, implementation="mosaic_gpu"
        )

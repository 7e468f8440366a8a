"""The GPU attention kernels in the GPU interpreter (jax 0.12), races watched; refusals anywhere."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from attention_cases import assert_true, in_parts, make, raw_scores, row_errors, tiled
from jax.experimental.pallas import mosaic_gpu as plgpu
from mutants import mutant

from pallas_kernels import arg_specs, attention
from pallas_kernels.attention import AttentionFormats, Tiles, mosaic_gpu, mosaic_gpu_walk
from pallas_kernels.attention.tiles import choose_gpu
from pallas_kernels.formats import BF16, E4M3_448, F16, Format

HOPPER, BLACKWELL = "9.0", "10.0"
BF16_OPERANDS = AttentionFormats(q=BF16, k=BF16, v=BF16, block_k=64)
interpreted = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"), reason="the GPU interpreter came with jax 0.12"
)
both = pytest.mark.parametrize("gpu", [HOPPER, BLACKWELL], ids=["hopper", "blackwell"])


def call(case, **rest):
    fields = {name: getattr(case, name) for name in case._fields[3:]}
    return jax.tree.map(np.asarray, mosaic_gpu.attention(*case[:3], **fields, **rest))


def run(case, gpu: str, **rest):
    """Outputs; a race, or a read of what nobody wrote or of NaN slots, is no number."""
    # Asynchronous work takes turns on clocks, and two works on one clock are never a race.
    watched = plgpu.InterpretGPUParams(detect_races=True, num_tma_threads_per_device=61)
    return call(case, capability=gpu, interpret=watched, **rest)


def with_formats(case, **changes):
    return case._replace(formats=dataclasses.replace(BF16_OPERANDS, **changes))


def assert_rounds_as_the_oracle(o, case):
    error = row_errors(o, tiled(case))
    assert np.quantile(error, 0.8) <= 2e-6 and error.max() < 1e-2


@interpreted
@pytest.mark.parametrize(
    "gpu, shape, changes",
    [
        (HOPPER, dict(B=1, T=70, S=150, N=1, G=1, H=64, Hv=64), dict(p=BF16)),
        (HOPPER, dict(B=1, T=3, S=140, N=1, G=1, H=192, Hv=128), dict(p=F16, block_k=128)),
        (BLACKWELL, dict(B=1, T=1, S=150, N=6, G=2, H=64, Hv=64), dict(p=E4M3_448)),
        (
            BLACKWELL,
            dict(B=1, T=130, S=150, N=1, G=1, H=64, Hv=64),
            dict(p=BF16, scores=F16, row_sum="rounded", rescale_threshold=4.0),
        ),
    ],
    ids=["hopper, ragged prefill", "hopper, MLA", "decode", "ragged prefill, late rescale"],
)
def test_rounds_where_the_oracle_rounds(gpu, shape, changes):
    case = with_formats(make(70, sigma=2.0, **shape), **changes)
    assert_rounds_as_the_oracle(run(case, gpu), case)


@interpreted
@both
def test_float32_probabilities_are_exact_in_pieces(gpu):
    """The truth for operands that are bfloat16 already: nothing else rounds. V is two blocks' work,
    the log-sum-exp one's."""
    case = make(71, B=1, T=5, S=100, N=1, G=1, H=192, Hv=256, lengths=(90,))
    import ml_dtypes

    q, k, v = (x.astype(ml_dtypes.bfloat16) for x in case[:3])
    case = case._replace(q=q, k=k, v=v, k_scale=0.5, v_scale=2.0, formats=AttentionFormats())
    o, lse = run(case, gpu, return_lse=True)
    assert_true(o, case)
    scores, _ = raw_scores(case, lambda x, fmt: x)
    want = np.logaddexp.reduce(scores, axis=-1).transpose(0, 2, 1)
    np.testing.assert_allclose(lse, want, rtol=0, atol=2e-6)


def check_splits(gpu: str) -> None:
    """257 keys in four splits: two whole ones, one that only the second query sees into, and one
    without a key. Then a row of the batch that has none at all. NaN past them."""
    case = make(76, sigma=2.0, B=2, T=2, S=300, N=1, G=1, H=64, Hv=64, lengths=(257, 0))
    case = with_formats(case, p=E4M3_448)
    o, lse = run(case, gpu, tiles=Tiles(1, 2, 64, 64, splits=4), return_lse=True)
    want, want_lse = in_parts(case.row(0), 2 * 64)
    error = row_errors(o[:1], want)
    assert np.median(error) <= 2e-6 and error.max() < 1e-2
    np.testing.assert_allclose(lse[:1], want_lse, rtol=0, atol=4e-6)
    assert (o[1] == 0).all() and np.isneginf(lse[1]).all()


@interpreted
@both
def test_splits_are_merged_by_their_log_sum_exp(gpu):
    check_splits(gpu)


@interpreted
def test_a_split_that_drops_the_last_keys_shows(monkeypatch):
    old, new = "self.end + (tiles.splits - 1)", "self.end"
    faulty = mutant("pallas_kernels.attention", ("mosaic_gpu_walk",), old, new)
    monkeypatch.setattr(mosaic_gpu_walk, "Walk", faulty.Walk)
    with pytest.raises(AssertionError):
        check_splits(HOPPER)


@interpreted
def test_keyless_rows_are_zero():
    case = make(72, B=2, T=2, S=70, N=1, G=1, H=64, Hv=64)
    case = with_formats(case._replace(kv_length=np.array([0, 47], np.int32)), p=BF16)
    o = run(case, HOPPER)
    assert (o[0] == 0).all() and np.isfinite(o).all() and (o[1] != 0).any()


@interpreted
@pytest.mark.parametrize(
    "old, new, seen",
    [
        ("old * walk.along_rows(alpha, old.shape) + new", "old + new", "quantile"),
        ("pl.when(n > walk.begin)(lambda: plgpu.barrier_wait(pv_ready))", "pass", "RACE DETECTED"),
        ("scores = load(s)\n        plgpu.wait_load_tmem()", "scores = load(s)", "RACE DETECTED"),
        ("            plgpu.commit_smem()", "            pass", "RACE DETECTED"),
    ],
    ids=["no rescaling", "product not awaited", "scores overwritten", "clearing not committed"],
)
def test_planted_faults_show(old, new, seen, monkeypatch):
    """Blackwell's products run beside the warpgroup: what is forgotten there is seen."""
    faulty = mutant("pallas_kernels.attention", ("mosaic_gpu_blackwell",), old, new)
    monkeypatch.setitem(mosaic_gpu._FAMILIES, BLACKWELL, faulty)
    case = make(75, sigma=2.0, B=1, T=1, S=100, N=1, G=1, H=64, Hv=64, lengths=(90,))
    case = with_formats(case, p=BF16)
    with pytest.raises((AssertionError, jax.errors.JaxRuntimeError), match=seen):
        assert_rounds_as_the_oracle(run(case, BLACKWELL), case)


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
        (dict(H=256, Hv=128), dict(p=BF16, block_k=128), "bytes of shared memory; 64 keys"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_refusals_name_what_and_why(shape, changes, message):
    case = with_formats(make(73, B=1, T=2, S=80, N=2, G=1, **shape), **changes)
    with pytest.raises(NotImplementedError, match=message):
        call(case)


def test_refuses_float64():
    case = make(73, B=1, T=2, S=80, N=2, G=1, H=64, Hv=64)
    with pytest.raises(NotImplementedError, match="v is float64"):
        call(with_formats(case._replace(v=case.v.astype(np.float64)), p=BF16))


def test_refused_tiles():
    case = with_formats(make(73, B=1, T=2, S=80, N=2, G=1, H=64, Hv=64))
    for tiles in (Tiles(2, 64, 64, 64), Tiles(1, 2, 256, 256), Tiles(1, 2, 64, 64, fp8_dot=True)):
        with pytest.raises(NotImplementedError, match="Tiles"):
            call(case, tiles=tiles)


def test_blackwell_holds_twice_the_rows_and_half_the_keys():
    case = make(73, B=1, T=200, S=80, N=6, G=1, H=64, Hv=64)
    assert choose_gpu(*case[:3], AttentionFormats(), HOPPER) == Tiles(1, 64, 128, 128)
    assert choose_gpu(*case[:3], AttentionFormats(), BLACKWELL) == Tiles(1, 128, 64, 64)
    step = choose_gpu(case.q[:, :1], *case[1:3], AttentionFormats(), BLACKWELL)
    assert step == Tiles(6, 1, 64, 64)
    with pytest.raises(NotImplementedError, match=r"formats.block_k=128: .*\(64 in registers\)"):
        call(with_formats(case, p=BF16, block_k=128), capability=BLACKWELL)
    with pytest.raises(NotImplementedError, match="block_q at most 64"):
        call(with_formats(case, p=BF16), tiles=Tiles(1, 128, 64, 64))


@pytest.mark.parametrize("gpu, processors", [(HOPPER, 132), (BLACKWELL, 148)])
def test_splits_busy_the_multiprocessors_that_blocks_leave_idle(gpu, processors):
    """One sequence of 128k is on nearly all of them at once; a full batch, a prefill and a short
    cache stay whole."""
    formats = AttentionFormats(q=BF16, p=BF16, block_k=64)

    def chosen(name, **changes):
        spec = dataclasses.replace(arg_specs.ATTENTION[name], **changes)
        return choose_gpu(*list(spec.arguments().values())[:3], formats, gpu)

    long = chosen("qwen3.8-27b_decode_128k")
    blocks = 4 * 2 * long.splits  # key heads, halves of V
    assert long.heads == 6 and processors - 8 < blocks <= processors
    assert chosen("demo_decode").splits == 8
    whole = ("qwen3.8-27b_decode", "kimi-k3_decode", "demo_prefill", "qwen3.8-27b_prefill_128k")
    assert {chosen(name).splits for name in whole} == {1}
    assert chosen("qwen3.8-27b_decode_128k", capacity=1000).splits == 1


@interpreted
def test_the_device_decides_which_kernel(monkeypatch):
    case = make(73, B=1, T=200, S=80, N=6, G=1, H=64, Hv=64)
    for gpu, rows in ((HOPPER, 64), (BLACKWELL, 128)):
        monkeypatch.setattr(attention, "_compute_capability", lambda gpu=gpu: gpu)
        runs = attention.describe(
            "prefill", *case[:3], formats=with_formats(case, p=BF16).formats,
            implementation="mosaic_gpu",
        )  # fmt: skip
        assert runs["tiles"] == dataclasses.asdict(Tiles(1, rows, 64, 64))
        step = arg_specs.ATTENTION["demo_decode"].arguments().values()
        runs = attention.describe(
            "decode", *list(step)[:3], formats=AttentionFormats(q=BF16), implementation="mosaic_gpu"
        )
        assert runs["tiles"]["splits"] == 8


@pytest.mark.skipif(hasattr(plgpu, "store"), reason="this jax is new enough")
def test_refuses_a_jax_that_is_too_old():
    case = with_formats(make(73, B=1, T=2, S=80, N=2, G=1, H=64, Hv=64))
    with pytest.raises(NotImplementedError, match=r"jax 0\..* install jax 0\.12"):
        call(case)


def test_table_entry_refuses_a_cpu():
    case = make(74, T=2, S=20)
    with pytest.raises(NotImplementedError, match=r"capability 9.0 .* 10.0 .*'cpu'"):
        attention.prefill(
            *case[:3], q_offset=case.q_offset, kv_length=case.kv_length, implementation="mosaic_gpu"
        )

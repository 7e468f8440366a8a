"""The GPU kernel of the delta rule in the GPU interpreter (jax 0.12), and lowered for a GPU."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from delta_rule_cases import FAMILIES, assert_near, case, truth
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import delta_rule
from pallas_kernels.arg_specs import DELTA_RULE
from pallas_kernels.delta_rule import DeltaRuleFormats, mosaic_gpu
from pallas_kernels.formats import BF16

GATES = pytest.mark.parametrize("per_channel", [False, True], ids=["scalar", "channel"])
interpreted = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"), reason="jax before 0.12 has no GPU interpreter"
)
LENGTHS = np.array([2, 1, 0], np.int32)


def _known(per_channel=False):
    families = FAMILIES[1], FAMILIES[7], FAMILIES[9]
    return case(2, families, key_heads=1, value_heads=2, key_dim=8, value_dim=128,
                per_channel=per_channel)  # fmt: skip


def _watched(known, op, lengths, **fields):
    """With races raising; padding poisoned."""
    padded = np.arange(known.q.shape[1]) >= lengths[:, None]
    poisoned = [
        np.where(padded.reshape(padded.shape + (1,) * (x.ndim - 2)), np.float32(np.nan), x)
        for x in known[:5]
    ]
    return getattr(mosaic_gpu, op)(
        *poisoned, known.state, lengths=lengths, scale=8**-0.5, formats=DeltaRuleFormats(**fields),
        interpret=plgpu.InterpretGPUParams(detect_races=True),
    )  # fmt: skip


@interpreted
@GATES
def test_steps(per_channel):
    known = _known(per_channel)
    got = _watched(known, "recurrent", LENGTHS)
    assert_near(got, truth(known, LENGTHS), 1e-6, "steps")
    np.testing.assert_array_equal(np.asarray(got[1])[2], known.state[2])


@interpreted
def test_narrow_values():
    """V = 24: the other threads of the warpgroup have no column."""
    known = case(2, FAMILIES[1:2], key_heads=1, value_heads=2, key_dim=8, value_dim=24)
    full = np.full(1, 2, np.int32)
    assert_near(_watched(known, "recurrent", full), truth(known), 1e-6, "narrow")


@interpreted
def test_a_prompt_is_the_same_walk():
    known = _known()
    full = np.full(3, 2, np.int32)
    o, state = _watched(known, "chunked", full, state=BF16)
    exact_o, exact = _watched(known, "recurrent", full)
    np.testing.assert_array_equal(o, exact_o)
    np.testing.assert_array_equal(state, np.asarray(exact.astype("bfloat16"), np.float32))


@interpreted
def test_every_step_stores_the_state():
    known = _known()
    full = np.full(3, 2, np.int32)
    got = _watched(known, "recurrent", full, state=BF16, g=BF16, exp_g=BF16, beta=BF16)
    formats = DeltaRuleFormats(state=BF16, g=BF16, exp_g=BF16, beta=BF16)
    want = delta_rule.recurrent(*known, formats=formats, implementation="xla")
    assert_near(got, tuple(map(np.asarray, want)), 2e-3, "stored states")
    assert np.mean(np.asarray(got[1]) == np.asarray(want[1])) > 0.99


@interpreted
def test_the_first_token_matters():
    """The checks' own control: a state that enters transposed in its columns is refused."""
    known = _known()
    swapped = known._replace(state=known.state[..., ::-1])
    with pytest.raises(AssertionError, match="is off by"):
        assert_near(_watched(swapped, "recurrent", LENGTHS), truth(known, LENGTHS), 1e-6, "swapped")


@pytest.mark.parametrize(
    "name", ["qwen3.8-27b_recurrent", "kimi-k3_recurrent", "kimi-linear_chunked", "demo_recurrent"]
)
def test_lowers_for_gpu(name):
    spec = DELTA_RULE[name]
    run = functools.partial(
        getattr(mosaic_gpu, spec.op), lengths=None, scale=0.1, formats=DeltaRuleFormats(state=BF16)
    )
    traced = jax.jit(run).trace(*spec.arguments().values())
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_refuses_what_it_cannot_run():
    known = _known()
    with pytest.raises(NotImplementedError, match="'cpu'.*mosaic_gpu_interpret"):
        delta_rule.recurrent(*known, implementation="mosaic_gpu")
    run = functools.partial(mosaic_gpu.chunked, lengths=None, scale=0.25)
    with pytest.raises(NotImplementedError, match=r"formats\.p=bf16"):
        run(*known, formats=DeltaRuleFormats(p=BF16))
    with pytest.raises(NotImplementedError, match=r"formats\.dot='default'"):
        run(*known, formats=DeltaRuleFormats(dot="default"))
    wide = case(3, FAMILIES[:1], key_dim=16, value_dim=192)
    with pytest.raises(NotImplementedError, match="V=192; it takes up to 128"):
        run(*wide, formats=DeltaRuleFormats())
    odd = case(3, FAMILIES[:1], key_dim=12, value_dim=128)
    with pytest.raises(NotImplementedError, match="K=12; it takes multiples of 8"):
        run(*odd, formats=DeltaRuleFormats())
    with jax.enable_x64(True), pytest.raises(NotImplementedError, match="float64"):
        run(*(x.astype(np.float64) for x in known), formats=DeltaRuleFormats())

"""The attention checks refuse every planted fault, and pass the same kernel without one."""

from __future__ import annotations

import attention_cases as cases
import pytest
from attention_cases import ROUNDINGS, check_rounding
from attention_faults import planted

from pallas_kernels.attention import AttentionFormats
from pallas_kernels.formats import E4M3_256

FAULTS = [
    ("scale twice", cases.check_score_spread),
    ("acc not rescaled at a new max", cases.check_score_spread),
    ("output in bf16", cases.check_score_spread),
    ("acc not rescaled at a new max", cases.check_maxima),
    ("split without LSE", cases.check_maxima),
    ("causal sees the next", cases.check_lengths),
    ("causal misses itself", cases.check_lengths),
    ("no prefix", cases.check_lengths),
    ("garbage only masked in scores", cases.check_lengths),
    ("kv_length ignored", cases.check_ragged),
    ("causal sees the next", cases.check_first_tokens),
    ("causal misses itself", cases.check_first_tokens),
    ("longest kv_length for all", cases.check_ragged),
    ("keyless rows divide by 0", cases.check_ragged),
    ("key heads interleaved", cases.check_heads),
    ("k_scale ignored", cases.check_scales),
    ("v_scale ignored", cases.check_scales),
    ("k_scale inverted", cases.check_scales),
    ("k_scale for v", cases.check_scales),
    ("scale by width", cases.check_scales),
    ("decode ignores the offset", cases.check_splits),
    ("longest kv_length for all", cases.check_batch),
    ("other result each time", cases.check_repeatable),
    ("positions in int16", cases.check_far_positions),
    ("p unscaled", cases.check_mass),
]
ROUNDING_FAULTS = [
    ("p not rounded", "p fp8*448"),
    ("p not rounded", "p bf16"),
    ("p unscaled", "p fp8*448"),
    ("wrong row sum", "p fp8"),
    ("wrong row sum", "row sum"),
    ("l summed from rounded P", "p bf16"),
    ("m not rounded", "m l acc"),
    ("l not rounded", "m l acc"),
    ("acc not rounded", "m l acc"),
    ("lazy rescale ignored", "lazy"),
    ("lazy threshold in nats", "lazy"),
    ("output in bf16", "p m4"),
]


@pytest.mark.parametrize("check", cases.CHECKS, ids=lambda check: check.__name__)
def test_faultless_passes(check):
    check(planted(None))


@pytest.mark.parametrize("site", ROUNDINGS)
def test_faultless_rounding_passes(site):
    check_rounding(planted(None), ROUNDINGS[site])


@pytest.mark.parametrize(
    "fault, check", FAULTS, ids=[f"{fault}-{check.__name__}" for fault, check in FAULTS]
)
def test_fault_is_refused(fault, check):
    with pytest.raises(AssertionError):
        check(planted(fault))


@pytest.mark.parametrize("fault, site", ROUNDING_FAULTS)
def test_rounding_fault_is_refused(fault, site):
    with pytest.raises(AssertionError):
        check_rounding(planted(fault), ROUNDINGS[site])


def test_lazy_rescale_saturates_prescaled_p():
    """FlashAttention-4's own bug: 2**8 before e4m3 and a threshold of 4 clip P at 448.

    It is a correct emulation of a wrong choice: the oracle agrees, the truth does not.
    """
    case = cases.make(40, T=8, S=1024, sigma=2.0)
    errors = {}
    for threshold in (0.0, 4.0):
        formats = AttentionFormats(p=E4M3_256, rescale_threshold=threshold, block_k=64)
        o = cases.ours("xla").prefill(case._replace(formats=formats))
        errors[threshold] = cases.frobenius(o, cases.dense(case))
    assert errors[0.0] < 0.03
    assert errors[4.0] > 3 * errors[0.0]

"""Negative controls: each check of the delta rule refuses the faults it is there for.

The faults are accuracy bugs that inference kernels really had; g-numbers as in their catalogue.
"""

from __future__ import annotations

import pytest
from delta_rule_cases import (
    check_budget,
    check_converged,
    check_families,
    check_long_decode,
    check_ragged,
    check_split,
)
from delta_rule_faults import planted

CHECKS = {
    "families": check_families,
    "ragged": check_ragged,
    "split": check_split,
    "budget": check_budget,
    "converged": check_converged,
    "long decode": check_long_decode,
}


@pytest.mark.parametrize("check", CHECKS)
def test_the_form_without_a_fault_passes(check):
    CHECKS[check](planted(None))


@pytest.mark.parametrize(
    "fault",
    [
        "state not carried",  # g01
        "state dropped once",  # g02
        "gate sum in bf16",  # g04
        "decay mask one off",  # g07
        "beta missing in k k^T",  # g09
        "off-diagonal blocks missing",  # g10
        "key decay missing",  # g12
        "last update skipped",  # g14, seen in the final state alone
        "pads update the state",  # g15, seen in the final state alone
        "decay exponent x24",  # g18
        "key heads permuted",  # g19
        "Neumann series",
    ],
)
def test_no_budget_for_bfloat16_lets_a_fault_through(fault):
    with pytest.raises(AssertionError):
        check_budget(planted(fault))


@pytest.mark.parametrize(
    "control",
    [
        "control: state bf16 per chunk",  # g20, FlashKDA
        "control: v_new bf16",  # g21, FLA
        "control: g bf16",  # g29
        "control: q and k bf16",  # g30
    ],
)
def test_benign_roundings_keep_the_budget_and_only_that(control):
    check_budget(planted(control))
    with pytest.raises(AssertionError):
        check_families(planted(control))


def test_transposed_state():  # g03
    check_families(planted(None), square=True)
    with pytest.raises(AssertionError):
        check_families(planted("state transposed"), square=True)


def test_channel_gates_split_from_the_start_of_the_chunk():
    check_families(planted(None), per_channel=True)
    with pytest.raises(AssertionError):
        check_families(planted("gates split from the chunk's start"), per_channel=True)


@pytest.mark.parametrize("fault", ["q unmasked", "k unmasked", "beta unmasked"])
def test_padding_that_leaks(fault):  # g26
    with pytest.raises(AssertionError):
        check_ragged(planted(fault))


@pytest.mark.parametrize("fault", ["last update skipped", "state not carried", "decay in bf16"])
def test_windows_and_steps_that_disagree(fault):
    with pytest.raises(AssertionError):
        check_split(planted(fault))


def test_residual_rounded_before_the_subtraction():  # g23
    check_converged(planted("control: v_new bf16"))
    with pytest.raises(AssertionError):
        check_converged(planted("residual rounded before subtraction"))


@pytest.mark.parametrize("fault", ["decay in bf16", "state bf16 per token"])  # g27, g22
def test_slow_decay_over_many_steps(fault):
    with pytest.raises(AssertionError):
        check_long_decode(planted(fault))

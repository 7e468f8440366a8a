"""The TPU kernels of the delta rule, interpreted, pass the checks that refuse planted faults.

The checks and their faults are those of `test_delta_rule_faults.py`.
"""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from delta_rule_cases import (
    FAMILIES,
    FULL,
    QUICK_OPTIONS,
    Implementation,
    assert_near,
    case,
    check_families,
    check_long_decode,
    check_ragged,
    check_split,
    truth,
)

from pallas_kernels import delta_rule
from pallas_kernels.delta_rule import DeltaRuleFormats

GATES = pytest.mark.parametrize("per_channel", [False, True], ids=["scalar", "channel"])
_jit = functools.partial(
    jax.jit, static_argnames=("formats", "scale"), compiler_options=QUICK_OPTIONS
)
KERNEL = Implementation(
    "mosaic_tpu_interpret",
    _jit(delta_rule.chunked_mosaic_tpu_interpret),
    _jit(delta_rule.recurrent_mosaic_tpu_interpret),
)


@GATES
def test_every_family_of_keys_and_gates(per_channel):
    check_families(KERNEL, per_channel, budget=2e-6)


@GATES
def test_ragged_rows_with_nan_padding(per_channel):
    check_ragged(KERNEL, per_channel)


def test_one_call_split_calls_and_single_steps_agree():
    check_split(KERNEL)


def test_the_same_call_gives_the_same_bits():
    known, formats = case(300), DeltaRuleFormats()
    first, second = (KERNEL.chunked(*known, lengths=FULL, formats=formats) for _ in range(2))
    np.testing.assert_array_equal(first[0], second[0])
    np.testing.assert_array_equal(first[1], second[1])


def test_long_decode():
    check_long_decode(KERNEL)


@GATES
def test_ragged_steps_leave_finished_rows_untouched(per_channel):
    known = case(8, per_channel=per_channel)
    lengths = np.array([0, 1, 2, 3, 4, 5, 6, 7, 8, 8, 0], np.int32)
    padding = np.arange(8) >= lengths[:, None]
    q, k, v, g, beta = (
        np.where(padding.reshape(padding.shape + (1,) * (x.ndim - 2)), np.float32(np.nan), x)
        for x in known[:5]
    )
    got = KERNEL.recurrent(q, k, v, g, beta, known.state, lengths=lengths)
    assert_near(got, truth(known, lengths), 2e-6, "ragged steps")
    np.testing.assert_array_equal(np.asarray(got[1])[lengths == 0], known.state[lengths == 0])


def test_step_sites_have_the_bits_of_xla():
    """All on the same grid, so only a site in another place could tell the two apart."""
    from pallas_kernels.formats import BF16

    known = case(1, FAMILIES[1:4])
    formats = DeltaRuleFormats(state=BF16, g=BF16, exp_g=BF16, beta=BF16)
    got = KERNEL.recurrent(*known, formats=formats)
    want = delta_rule.recurrent(*known, formats=formats, implementation="xla")
    assert_near(got, tuple(map(np.asarray, want)), 1e-3, "one step")
    assert np.mean(np.asarray(got[1]) == np.asarray(want[1])) > 0.999

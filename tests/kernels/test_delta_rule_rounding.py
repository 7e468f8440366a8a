"""Every rounding site of the delta rule is where `DeltaRuleFormats` says, and nowhere else."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest
from delta_rule_cases import (
    FAMILIES,
    QUICK,
    Case,
    assert_like_oracle,
    case,
    oracle,
    relative,
    truth,
)

from pallas_kernels.delta_rule import DeltaRuleFormats
from pallas_kernels.formats import BF16, F16, F32, Format, round_to

CHUNK, LENGTH = 16, 40
SITES = tuple(field.name for field in dataclasses.fields(DeltaRuleFormats) if field.default == F32)
FLA = dict.fromkeys(("state_operand", "h", "v_new", "inverse", "w", "u", "p"), BF16)
GATES = pytest.mark.parametrize("per_channel", [False, True], ids=["scalar", "channel"])


@functools.cache
def _case(per_channel: bool = False) -> Case:
    families = FAMILIES[1:3] + FAMILIES[6:7] + FAMILIES[8:9]
    return case(LENGTH, families, key_heads=1, value_heads=3, key_dim=16, value_dim=8,
                per_channel=per_channel)  # fmt: skip


def _xla(known: Case, **fields) -> tuple[np.ndarray, np.ndarray]:
    formats = DeltaRuleFormats(**{"chunk": CHUNK, **fields})
    return tuple(np.asarray(x) for x in QUICK.chunked(*known, formats=formats))


def _assert_like_oracle(known: Case, **fields) -> None:
    formats = DeltaRuleFormats(**{"chunk": CHUNK, **fields})
    assert_like_oracle(_xla(known, **fields), known, formats)


@pytest.mark.parametrize("site", SITES)
def test_each_site_agrees_with_the_oracle(site):
    _assert_like_oracle(_case(), **{site: BF16})


@pytest.mark.parametrize("site", ["exp_g", "g_cumsum", "v_new", "p"])
def test_sites_under_a_gate_per_channel(site):
    _assert_like_oracle(_case(True), **{site: BF16})


@GATES
def test_chunk_casts_of_fla(per_channel):
    _assert_like_oracle(_case(per_channel), chunk=32, **FLA)


@GATES
def test_every_dot_in_one_bfloat16_pass(per_channel):
    _assert_like_oracle(_case(per_channel), chunk=32, dot="default")


def test_unrounded_forms_agree_to_float32():
    got, want = _xla(_case()), oracle(_case(), DeltaRuleFormats(chunk=CHUNK))
    assert relative(got[0], want[0]) < 1e-6 and relative(got[1], want[1]) < 1e-6


@pytest.mark.parametrize("site", SITES)
def test_each_site_changes_something(site):
    """Rounded alone it moves the outputs or the state by about bf16's step, not more."""
    exact, want = _xla(_case()), truth(_case())
    got = _xla(_case(), **{site: BF16})
    changes = [relative(x, y) for x, y in zip(got, exact, strict=True)]
    assert 1e-5 < max(changes) < 3e-2
    assert max(relative(x, y) for x, y in zip(got, want, strict=True)) < 3e-2


# What a site must not touch: (changed inputs, outputs that keep every bit).
BOTH = (True, True)
UNTOUCHED = [
    ("state", {}, (True, False)),  # outputs of the same call never see the stored state
    ("h", {}, (False, True)),
    ("p", {}, (False, True)),
    ("h", {"state": 0.0, "tokens": CHUNK}, BOTH),
    ("state_operand", {"state": 0.0, "tokens": CHUNK}, BOTH),
    ("w", {"state": 0.0, "tokens": CHUNK}, BOTH),
    ("chunk_state", {"state": 0.0, "tokens": CHUNK}, (True, False)),
    ("u", {"v": 0.0}, BOTH),
    ("beta", {"beta": 1.0}, BOTH),
    ("w", {"beta": 0.0}, BOTH),
    ("u", {"beta": 0.0}, BOTH),
    ("v_new", {"beta": 0.0}, BOTH),
    ("inverse", {"beta": 0.0}, BOTH),  # the identity, exact in bf16
    ("p", {"q": 0.0}, BOTH),
    ("h", {"q": 0.0}, BOTH),
    ("g", {"g": 0.0}, BOTH),
    ("g_cumsum", {"g": 0.0}, BOTH),
    ("exp_g", {"g": 0.0}, BOTH),
    ("g", {"g": -0.375}, BOTH),  # on bf16's grid, as are its sums
    ("g_cumsum", {"g": -0.375}, BOTH),
]


@pytest.mark.parametrize("site, inputs, kept", UNTOUCHED, ids=str)
def test_a_site_touches_only_its_own_tensor(site, inputs, kept):
    inputs = dict(inputs)
    known = _case()
    tokens = inputs.pop("tokens", LENGTH)
    known = known._replace(
        **{name: np.full_like(getattr(known, name), value) for name, value in inputs.items()}
    )
    lengths = np.full(len(known.q), tokens, np.int32)
    got, exact = (
        QUICK.chunked(*known, lengths=lengths, formats=DeltaRuleFormats(chunk=CHUNK, **fields))
        for fields in ({site: BF16}, {})
    )
    for x, y, is_kept in zip(got, exact, kept, strict=True):
        if is_kept:
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("fmt", [BF16, F16, Format(mantissa_bits=4)], ids=str)
def test_the_stored_state_is_on_its_grid(fmt):
    got, exact = _xla(_case(), state=fmt), _xla(_case())
    np.testing.assert_array_equal(got[0], exact[0])
    np.testing.assert_array_equal(got[1], round_to(exact[1], fmt))


def test_every_step_stores_the_state():
    known = _case()
    formats = DeltaRuleFormats(state=BF16)
    state = known.state
    for t in range(3):
        o, stored = QUICK.recurrent(*known.tokens(t, t + 1, state), formats=formats)
        exact_o, exact = QUICK.recurrent(*known.tokens(t, t + 1, state))
        np.testing.assert_array_equal(o, exact_o)  # the step's own output comes before the store
        np.testing.assert_array_equal(stored, round_to(exact, BF16))
        state = stored
    _, together = QUICK.recurrent(*known.tokens(0, 3), formats=formats)
    assert relative(together, state) < 1e-3
    np.testing.assert_array_equal(together, round_to(together, BF16))


def test_steps_have_no_chunk_sites():
    """Fused decode kernels keep everything but the stored state in float32 (MODELS: FLA, vLLM)."""
    known = _case()
    formats = DeltaRuleFormats(chunk_state=BF16, dot="default", **FLA)
    got = QUICK.recurrent(*known.tokens(0, 8), formats=formats)
    exact = QUICK.recurrent(*known.tokens(0, 8))
    np.testing.assert_array_equal(got[0], exact[0])
    np.testing.assert_array_equal(got[1], exact[1])


def test_step_sites_agree_with_the_reference():
    known = _case().tokens(0, 8)
    formats = DeltaRuleFormats(state=BF16, g=BF16, exp_g=BF16, beta=BF16)
    got = QUICK.recurrent(*known, formats=formats)
    with jax.enable_x64(True):
        wide = (x.astype(np.float64) for x in known)
        want = QUICK.recurrent(*wide, formats=formats, implementation="reference")
        want = tuple(np.asarray(x) for x in want)
    # A state entry on the edge of two bf16 numbers may fall either way.
    assert relative(got[0], want[0]) < 1e-4 and relative(got[1], want[1]) < 1e-4

"""The delta rule against the float64 token recurrence."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from delta_rule_cases import (
    F32_BUDGET,
    FAMILIES,
    FULL,
    QUICK,
    QUICK_OPTIONS,
    XLA,
    Case,
    assert_near,
    case,
    check_families,
    check_long_decode,
    check_ragged,
    check_split,
    relative,
    truth,
)

from pallas_kernels import delta_rule
from pallas_kernels.delta_rule import DeltaRuleFormats
from pallas_kernels.formats import BF16

GATES = pytest.mark.parametrize("per_channel", [False, True], ids=["scalar", "channel"])


@GATES
def test_every_family_of_keys_and_gates(per_channel):
    check_families(XLA, per_channel, budget=2e-6)


@pytest.mark.parametrize("chunk, per_channel", [(16, False), (32, True), (128, False)])
def test_every_chunk_length(chunk, per_channel):
    check_families(QUICK, per_channel, chunk, budget=2e-6)


@GATES
def test_ragged_rows_with_nan_padding(per_channel):
    check_ragged(XLA, per_channel)


@GATES
def test_one_call_split_calls_and_single_steps_agree(per_channel):
    check_split(XLA, per_channel)


def test_long_decode():
    check_long_decode(XLA)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65])
def test_lengths_around_chunk_edges(length):
    known = case(length, FAMILIES[6:7], key_heads=1, value_heads=3, key_dim=8, value_dim=16)
    assert_near(QUICK.chunked(*known), truth(known), F32_BUDGET, f"T={length}")


def test_a_long_call_in_bfloat16_inputs():
    known = case(2085, FAMILIES[1:2], key_heads=1, value_heads=3, key_dim=16, value_dim=16)
    known = Case(*(x.astype(jnp.bfloat16) for x in known[:3]), *known[3:])
    exact = Case(*(x.astype(np.float32) for x in known))
    got = QUICK.chunked(*known)
    assert got[0].dtype == got[1].dtype == jnp.float32
    assert_near(got, truth(exact), F32_BUDGET, "T=2085")


def test_no_initial_state_is_a_zero_state():
    known = case(65, FAMILIES[6:7], key_heads=1, value_heads=3, key_dim=8, value_dim=16)
    zero = known._replace(state=np.zeros_like(known.state))
    got = QUICK.chunked(*known[:5])
    assert_near(got, truth(zero), F32_BUDGET, "no initial state")


@GATES
@pytest.mark.parametrize("length", [1, 8])
def test_steps(length, per_channel):
    known = case(length, per_channel=per_channel)
    assert_near(QUICK.recurrent(*known), truth(known), F32_BUDGET, f"T={length}")


def test_ragged_steps_leave_finished_rows_untouched():
    known = case(8)
    lengths = np.array([0, 1, 2, 3, 4, 5, 6, 7, 8, 8, 0], np.int32)
    padding = np.arange(8) >= lengths[:, None]
    q, k, v, g, beta = (
        np.where(padding.reshape(padding.shape + (1,) * (x.ndim - 2)), np.float32(np.nan), x)
        for x in known[:5]
    )
    formats = DeltaRuleFormats(state=BF16)
    o, state = QUICK.recurrent(q, k, v, g, beta, known.state, lengths=lengths, formats=formats)
    exact = QUICK.recurrent(q, k, v, g, beta, known.state, lengths=lengths)
    assert_near(exact, truth(known, lengths), F32_BUDGET, "ragged steps")
    assert np.isfinite(o).all()
    # Not even rounded: nothing was stored for rows without tokens.
    np.testing.assert_array_equal(np.asarray(state)[lengths == 0], known.state[lengths == 0])


def test_a_row_does_not_depend_on_its_batch():
    known, formats = case(40, key_heads=1, value_heads=3), DeltaRuleFormats(chunk=32)
    full = np.asarray(QUICK.chunked(*known, formats=formats)[0])
    for b in (0, len(FAMILIES) - 1):
        alone = np.asarray(QUICK.chunked(*known.row(b), formats=formats)[0])
        assert relative(alone[0], full[b]) < 1e-6


def test_the_same_call_gives_the_same_bits():
    known, formats = case(300), DeltaRuleFormats()
    first, second = (XLA.chunked(*known, lengths=FULL, formats=formats) for _ in range(2))
    np.testing.assert_array_equal(first[0], second[0])
    np.testing.assert_array_equal(first[1], second[1])


@GATES
def test_references_in_float64(per_channel):
    known = case(70, FAMILIES[:3], per_channel=per_channel)
    want = truth(known)
    with jax.enable_x64(True):
        wide = Case(*(x.astype(np.float64) for x in known))
        for name in ("recurrence", "reference"):
            got = QUICK.chunked(*wide, implementation=name)
            assert got[0].dtype == got[1].dtype == jnp.float64
            assert_near(got, want, 1e-11, name)
        steps = Case(*(x[:, :8] for x in wide[:5]), wide.state)
        got = QUICK.recurrent(*steps, implementation="reference")
        assert_near(got, truth(Case(*steps)), 1e-13, "recurrent reference")


@pytest.mark.parametrize("name", ["recurrence", "reference"])
def test_references_mask_padding_in_float32(name):
    known = case(40, FAMILIES[:2])
    lengths = np.array([40, 17], np.int32)
    q, k, v, g, beta = (x.copy() for x in known[:5])
    for x in (q, k, v, g, beta):
        x[1, 17:] = np.nan
    got = QUICK.chunked(
        q, k, v, g, beta, known.state, lengths=lengths, implementation=name,
        formats=DeltaRuleFormats(chunk=16),
    )  # fmt: skip
    assert_near(got, truth(known, lengths), F32_BUDGET, name)


@GATES
def test_gradients(per_channel):
    """Reverse mode through the chunked form is the gradient of the recurrence."""
    known = case(
        40, FAMILIES[4:7:2], key_heads=1, value_heads=2, key_dim=8, value_dim=6,
        per_channel=per_channel,
    )  # fmt: skip
    rng = np.random.default_rng(5)
    weights = [rng.normal(size=x.shape) for x in truth(known)]

    def loss(*arguments, implementation):
        formats = DeltaRuleFormats(chunk=32)
        outputs = delta_rule.chunked(*arguments, formats=formats, implementation=implementation)
        return sum(jnp.sum(x * w.astype(x.dtype)) for x, w in zip(outputs, weights, strict=True))

    gradient = jax.jit(
        jax.grad(loss, argnums=tuple(range(6))),
        static_argnames="implementation",
        compiler_options=QUICK_OPTIONS,
    )
    got = gradient(*known, implementation="xla")
    with jax.enable_x64(True):
        wide = (x.astype(np.float64) for x in known)
        want = [np.asarray(x) for x in gradient(*wide, implementation="recurrence")]
    for name, x, y in zip(Case._fields, got, want, strict=True):
        assert relative(x, y) < 1e-5, name


def test_dots_are_float32_on_every_backend():
    """An f32 dot is one bf16 pass on a TPU, and TF32 on a GPU, unless the program says HIGHEST."""
    known = case(64, FAMILIES[:1])
    for function in (delta_rule.chunked, delta_rule.recurrent):
        tokens = known.tokens(0, 64 if function is delta_rule.chunked else 8)
        text = jax.jit(functools.partial(function, implementation="xla")).lower(*tokens).as_text()
        dots = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
        assert dots
        assert all("precision = [HIGHEST, HIGHEST]" in line for line in dots)

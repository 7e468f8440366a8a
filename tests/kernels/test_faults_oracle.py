"""The faults of `kernjax.faults` compute what the independent NumPy forms beside this file do.

`attention_faults` and `delta_rule_faults` are the oracles: float32 NumPy, written for the tests of
the kernels. A row of the catalogue that is also planted there has to be the same wrong function.
"""

from __future__ import annotations

import dataclasses

import attention_faults
import delta_rule_faults
import jax
import numpy as np
import pytest
from attention_cases import Case

from kernjax.faults import attention, delta_rule
from kernjax.faults.inputs import Call, example
from pallas_kernels.formats import E4M3_448

# ours -> (theirs, inputs); all at the op that shows it
ATTENTION = {
    "control_online_softmax": (None, "plain"),
    "scale_twice": ("scale twice", "plain"),
    "k_scale_ignored": ("k_scale ignored", "scaled"),
    "v_scale_ignored": ("v_scale ignored", "scaled"),
    "k_scale_for_v": ("k_scale for v", "scaled"),
    "sees_next": ("causal sees the next", "plain"),
    "misses_itself": ("causal misses itself", "plain"),
    "key_heads_interleaved": ("key heads interleaved", "plain"),
    "acc_not_rescaled": ("acc not rescaled at a new max", "plain"),
    "split_without_lse": ("split without LSE", "plain"),
    "p_e4m3": ("p unscaled", "plain"),
}
CHUNKED = {
    "control_chunk_form": None,
    "state_not_carried": "state not carried",
    "state_dropped_once": "state dropped once",
    "state_transposed": "state transposed",
    "last_update_skipped": "last update skipped",
    "decay_of_24": "decay exponent x24",
    "key_heads_permuted": "key heads permuted",
    "beta_missing_in_kk": "beta missing in k k^T",
    "key_decay_missing": "key decay missing",
    "off_diagonal_blocks_missing": "off-diagonal blocks missing",
    "control_state_bf16_per_chunk": "control: state bf16 per chunk",
}
RECURRENT = {
    "control_token_form": None,
    "decay_in_bf16": "decay in bf16",
    "state_bf16": "state bf16 per token",
}


def near(ours: np.ndarray, theirs: np.ndarray, bound: float = 2e-5) -> None:
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    assert np.linalg.norm(ours - theirs) <= bound * np.linalg.norm(theirs)


@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name):
    planted, family = ATTENTION[name]
    call = example("attention.prefill", family)
    # The accumulator that is not rescaled depends on where tiles end: 300 slots in 2 of 256.
    formats = dataclasses.replace(call.keywords["formats"], block_k=256)
    keywords = call.keywords | {"formats": formats}
    o = jax.jit(lambda *q: getattr(attention, name)(*q, **keywords))(*call.arguments)
    if name == "p_e4m3":
        formats = dataclasses.replace(formats, p=E4M3_448)  # what it loses is the scale
    case = Case(
        *(np.asarray(x, np.float32) for x in call.arguments),
        np.asarray(keywords["q_offset"]), np.asarray(keywords["kv_length"]),
        call.arguments[0].shape[-1] ** -0.5,
        float(keywords["k_scale"]), float(keywords["v_scale"]), formats,
    )  # fmt: skip
    near(o, attention_faults.planted(planted).prefill(case), 1e-3 if name == "p_e4m3" else 2e-5)


def _both(ours: str, theirs, op: str, call: Call):
    keywords = call.keywords
    got = jax.jit(lambda *q: getattr(delta_rule, ours)(*q, **keywords))(*call.arguments)
    arrays = [np.asarray(x) for x in call.arguments]
    form = getattr(delta_rule_faults.planted(theirs), op.partition(".")[2])
    return got, form(*arrays)


@pytest.mark.parametrize("name", CHUNKED)
def test_chunked(name):
    call = example("delta_rule.chunked", "plain")
    # Seven chunks: the middle one is number 3, where the NumPy form drops its state.
    tokens = (np.concatenate([x, x[:, :100]], axis=1) for x in map(np.asarray, call.arguments[:5]))
    lengths = np.full(2, 400, np.int32)
    call = Call((*tokens, call.arguments[5]), call.keywords | {"lengths": lengths})
    (o, state), (want_o, want_state) = _both(name, CHUNKED[name], "delta_rule.chunked", call)
    bound = 1e-3 if "bf16" in name else 2e-5
    near(o, want_o, bound)
    near(state, want_state, bound)


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent(name):
    call = example("delta_rule.recurrent", "plain")
    (o, state), (want_o, want_state) = _both(name, RECURRENT[name], "delta_rule.recurrent", call)
    bound = 1e-3 if "bf16" in name else 2e-5
    near(o, want_o, bound)
    near(state, want_state, bound)

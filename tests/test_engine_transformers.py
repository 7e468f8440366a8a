"""The vendor's code as a producer: its float32 rows are ours, its bfloat16 is its own."""

from __future__ import annotations

import importlib.util
import sys

import numpy as np
import pytest
from tiny import CONFIG, make_corpus, write_checkpoint

from kernjax.base.errors import UserError
from kernjax.engines.transformers import TransformersProducer
from kernjax.precision import parse_policy
from kernjax.recording import load_recording
from kernjax.scoring.batch import RowPlan
from kernjax.scoring.producer import JaxProducer
from kernjax.scoring.recorder import record_corpus

MISSING = [name for name in ("torch", "transformers") if not importlib.util.find_spec(name)]


def live(test):
    """Marks a test that runs the vendor's code."""
    reason = f"{' and '.join(MISSING)} not installed (the transformers extra)"
    return pytest.mark.parity(pytest.mark.skipif(bool(MISSING), reason=reason)(test))


CONTEXT, DECODED, WINDOW = 40, 6, 20
F32 = f"f32,prefill_window={WINDOW}"
TOKENS = (
    np.random.default_rng(3)
    .integers(0, CONFIG["vocab_size"], (2, CONTEXT + DECODED + 1))
    .astype(np.int32)
)
PLANS = [
    RowPlan(np.asarray([0, 19, 20, 39], np.int32), rescore=True),
    RowPlan(np.asarray([21, 39], np.int32)),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("vendor") / "tiny")


@pytest.fixture(scope="module")
def our_rows(checkpoint):
    return JaxProducer(checkpoint, parse_policy(F32)).score(TOKENS, CONTEXT, PLANS)


def at_ids_of(rows: list[dict[str, np.ndarray]]) -> list[RowPlan]:
    return [
        RowPlan(plan.prefill, plan.rescore, row["top_ids"])
        for plan, row in zip(PLANS, rows, strict=True)
    ]


def assert_same_rows(mine, theirs, atol: float) -> None:
    assert mine.keys() == theirs.keys()
    for name, values in mine.items():
        assert values.dtype == theirs[name].dtype and values.shape == theirs[name].shape, name
        if values.dtype.kind == "f":
            np.testing.assert_allclose(values, theirs[name], atol=atol, err_msg=name)
        else:
            np.testing.assert_array_equal(values, theirs[name], err_msg=name)


@live
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("window", [WINDOW, 2048])
def test_float32_rows_are_ours(checkpoint, our_rows, attention, window):
    """Positions, phases, targets exactly; logprobs within 1e-4, whole or in windows of 20."""
    policy = parse_policy(F32 if window == WINDOW else "f32")
    producer = TransformersProducer(checkpoint, policy, attn_implementation=attention)
    done: list[int] = []
    rows = producer.score(TOKENS, CONTEXT, at_ids_of(our_rows), done.append)
    for mine, theirs in zip(our_rows, rows, strict=True):
        assert_same_rows(mine, theirs, atol=1e-4)
    assert sum(done) == CONTEXT + DECODED
    assert [len(row["pos"]) for row in rows] == [4 + 2 * DECODED, 2 + DECODED]


@live
def test_a_reference_takes_its_own_top_20(checkpoint, our_rows):
    rows = TransformersProducer(checkpoint, parse_policy(F32)).score(TOKENS, CONTEXT, PLANS)
    for mine, theirs in zip(our_rows, rows, strict=True):
        logprobs = theirs["top_logprobs"]
        assert (np.diff(logprobs, axis=1) <= 0).all()
        np.testing.assert_allclose(logprobs, mine["top_logprobs"], atol=1e-4)
        np.testing.assert_array_equal(theirs["top_ids"][:, 0], theirs["top1_ids"])


@live
def test_bfloat16_logits_are_the_vendors(checkpoint, our_rows):
    """Margins of bfloat16 logits are whole multiples of 2^-14; the rows are near ours, not ours."""
    producer = TransformersProducer(checkpoint, parse_policy("bf16"))
    rows = producer.score(TOKENS, CONTEXT, at_ids_of(our_rows))
    for mine, theirs in zip(our_rows, rows, strict=True):
        steps = theirs["margins"] * 2**14
        np.testing.assert_array_equal(steps, np.round(steps))
        distance = np.abs(mine["top_logprobs"] - theirs["top_logprobs"])
        assert 0 < distance.mean() < 0.05
    assert producer.identity()["logits_dtype"] == "bfloat16"


@live
def test_nan_is_kept(tmp_path, our_rows):
    from safetensors.numpy import load_file, save_file

    directory = write_checkpoint(tmp_path / "poisoned")
    tensors = load_file(directory / "model.safetensors")
    tensors["lm_head.weight"][5] = np.nan
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    rows = TransformersProducer(directory, parse_policy(F32)).score(
        TOKENS, CONTEXT, at_ids_of(our_rows)
    )
    assert all(np.isnan(row["target_logprobs"]).all() for row in rows)


@live
def test_a_recording_says_who_made_it(checkpoint, tmp_path):
    corpus = make_corpus({24: 1}, score_len=4)
    producer = TransformersProducer(checkpoint, parse_policy("hf_bf16"), attn_implementation="sdpa")
    record_corpus(producer, corpus, tmp_path / "out", batch_size=1)
    recording = load_recording(tmp_path / "out")
    manifest = recording.manifest
    assert manifest["engine"] == "transformers" and manifest["attn_implementation"] == "sdpa"
    assert {"torch", "transformers"} <= manifest["versions"].keys()
    ours = JaxProducer(checkpoint, parse_policy("hf_bf16")).identity()
    assert manifest["model"] == ours["model"]
    assert np.isfinite(recording.top_logprobs).all()


@pytest.mark.parametrize("policy", ["fp8", "bf16,delta_rule.state=m7", "f32,dot=default"])
def test_other_policies_are_refused(checkpoint, policy):
    with pytest.raises(UserError, match="cannot run policy .* f32, bf16, hf_bf16"):
        TransformersProducer(checkpoint, parse_policy(policy))


def test_unknown_attention_is_refused(checkpoint):
    with pytest.raises(UserError, match="eager, sdpa"):
        TransformersProducer(checkpoint, parse_policy("f32"), attn_implementation="flash")


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_a_missing_package_names_the_extra(checkpoint, monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(UserError, match=r"pip install 'kernjax\[transformers\]'"):
        TransformersProducer(checkpoint, parse_policy("f32"))


@live
def test_a_cut_checkpoint_is_refused_before_it_is_loaded(tmp_path):
    directory = write_checkpoint(tmp_path / "cut")
    (directory / "model.safetensors").unlink()
    with pytest.raises(UserError, match="safetensors"):
        TransformersProducer(directory, parse_policy("f32"))

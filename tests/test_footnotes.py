"""Footnotes of a verdict: the whole vocabulary's KL, the accuracy bound, greedy texts."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from instrument import run

from kernjax import load_recording, record
from kernjax.judge import calibrate, compare, judge
from kernjax.judge.simulate import Corpus, Design
from kernjax.precision import parse_policy
from kernjax.reporting import render_text, verdict_line
from kernjax.scoring.greedy import Continuation, continued, first_differences
from kernjax.scoring.session import Session


@pytest.fixture(scope="module")
def full(instrument, tmp_path_factory):
    """A reference with the whole vocabulary, of a third of the segments, and bf16 at its ids."""
    folder = tmp_path_factory.mktemp("full")
    flags = ["--limit", "1", "--full_vocabulary", "--out", str(folder / "reference")]
    assert instrument.record(record, *flags) == 0
    session = Session.open(
        str(instrument.model), str(instrument.corpus), str(folder / "reference"), batch_size=8
    )
    candidate = session.record(parse_policy("bf16"), folder / "bf16", limit=1)
    return session, candidate


def test_the_whole_vocabulary_is_kept_and_bounds_the_coarse_kl(full):
    session, candidate = full
    whole = session.reference.extras["logprobs"].astype(np.float64)
    assert whole.shape == (len(session.reference), 64)
    np.testing.assert_allclose(np.exp(whole).sum(axis=1), 1, atol=1e-5)
    np.testing.assert_array_equal(
        np.take_along_axis(whole, session.reference.top_ids, 1).astype(np.float32),
        session.reference.top_logprobs,
    )
    c = compare(session.reference, candidate)
    p = whole - np.log(np.exp(whole).sum(axis=1, keepdims=True))
    q = candidate.extras["logprobs"].astype(np.float64)
    q -= np.log(np.exp(q).sum(axis=1, keepdims=True))
    expected = np.sum(np.exp(p) * (p - q), axis=1)
    np.testing.assert_allclose(c.full_kl, expected, rtol=1e-6, atol=1e-12)
    # Data processing: merging words into "other" hides some of it.
    assert np.all(c.kl <= c.full_kl + 1e-10) and c.kl.sum() < c.full_kl.sum()


def test_without_it_there_is_no_bound(instrument):
    reference = load_recording(instrument.reference)
    same = dataclasses.replace(
        reference, manifest={**reference.manifest, "reference": reference.identity}
    )
    assert compare(reference, same).full_kl is None


def test_the_accuracy_bound_of_a_verdict():
    """Worked value: 500 steps of KL 7e-4 bound the change of accuracy by 0.41833."""
    corpus = Corpus(Design(contexts=(512,), steps=500, per_cell=4), np.random.default_rng(0))
    band = calibrate(None, [corpus.producer(name=f"normal {i}") for i in range(5)])
    candidate = corpus.producer()
    assert judge(candidate, band).accuracy_bound == {}
    verdict = judge(dataclasses.replace(candidate, full_kl=np.full(candidate.kl.shape, 7e-4)), band)
    assert verdict.accuracy_bound.keys() == {"code", "prose"}
    for steps, bound in verdict.accuracy_bound.values():
        assert steps == 500 and bound == pytest.approx(math.sqrt(0.5 * 500 * 7e-4))
        assert bound == pytest.approx(0.41833, abs=1e-5)
    assert "0.418 over 500 steps (prose)" in " ".join(render_text(verdict).split())
    assert verdict_line(verdict)["accuracy_bound"]["code"][0] == 500


def test_greedy_texts(instrument):
    session = Session.open(
        str(instrument.model), str(instrument.corpus), str(instrument.reference), batch_size=8
    )
    prompts = np.stack([s.tokens[:48] for s in session.corpus.segments if s.context_len == 48])
    truth = session.producer(parse_policy("f32"))
    text = continued(truth, prompts, 12)
    assert text.ids.shape == (6, 12) and (text.margins >= 0).all()
    # Scoring the text that was written finds every token of it on top.
    row = np.concatenate([prompts[0], text.ids[0]])[None]
    from kernjax.scoring.batch import RowPlan

    rows = truth.score(row, 48, [RowPlan(np.array([47], np.int32))])[0]
    np.testing.assert_array_equal(rows["top1_ids"][:12], text.ids[0])
    np.testing.assert_allclose(rows["margins"][:12], text.margins[0], atol=1e-4)


def test_first_differences():
    a = Continuation(np.array([[1, 2, 3], [4, 5, 6]]), np.array([[0.5, 0.1, 2.0], [1.0, 1, 1]]))
    b = Continuation(np.array([[1, 7, 3], [4, 5, 6]]), np.zeros((2, 3)))
    assert first_differences(a, b) == [(1, 0.1), None]


def test_flags_that_do_not_go_together(capsys):
    from kernjax import check

    assert run(check, "--candidate", "x", "--greedy", "4") == 3
    assert "--greedy" in capsys.readouterr().err
    assert run(check, "--policy", "fp8", "--again", "x") == 3
    assert "--repeat" in capsys.readouterr().err

"""A candidate that lists its own top ids: what its KL may be, and what that allows to say."""

from __future__ import annotations

import dataclasses

import judge_recordings as made
import numpy as np
import pytest

from kernjax.base.errors import UserError
from kernjax.judge import Outcome, calibrate, compare, judge, metrics
from kernjax.judge.bounds import bound
from kernjax.judge.simulate import Corpus, Design, Effect
from kernjax.reporting import render_text, verdict_line


def softmax(logits):
    e = np.exp(logits - logits.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def lists(p, ids):
    """Log-probabilities at ids [R, K], and the tail's, as a recording has them."""
    top = np.take_along_axis(p, ids, 1)
    return np.log(np.concatenate([top, 1 - top.sum(1, keepdims=True)], axis=1))


def drawn(noise: float, listed: int, rows: int = 200, vocab: int = 60, size: int = 20):
    """Reference and candidate [rows, vocab], their lists, and targets that reach every token."""
    rng = np.random.default_rng(5)
    logits = rng.normal(0, 1.5, (rows, vocab))
    p, q = softmax(logits), softmax(logits + rng.normal(0, noise, logits.shape))
    ours = np.argsort(-p, axis=1)[:, :size]
    theirs = np.argsort(-q, axis=1)[:, :listed]
    target = np.argmin(q, axis=1)  # so that the file holds its least probable token
    return p, q, ours, theirs, target


def coarse_kl(p, q, ids):
    a, b = np.exp(lists(p, ids)), np.exp(lists(q, ids))
    return np.sum(a * np.log(a / b), axis=1)


@pytest.mark.parametrize("noise", [0.01, 0.3])
@pytest.mark.parametrize("listed", [20, 26])
def test_the_truth_lies_between(noise, listed):
    p, q, ours, theirs, target = drawn(noise, listed)
    found = bound(
        metrics.cells(lists(p, ours)), ours, lists(q, theirs), theirs, target,
        np.log(np.take_along_axis(q, target[:, None], 1))[:, 0], q.shape[1],
    )  # fmt: skip
    truth = coarse_kl(p, q, ours)
    assert np.all(found.kl_lower <= truth + 1e-9) and np.all(truth <= found.kl_upper + 1e-9)
    lacks = np.array([len(set(a) - set(b)) for a, b in zip(ours, theirs, strict=True)])
    assert np.all(found.missing <= lacks)
    assert (found.missing > 0).any() == (listed == 20 or noise == 0.3)
    whole = found.missing == 0
    np.testing.assert_allclose(found.kl_lower[whole], truth[whole], rtol=1e-6, atol=1e-12)
    np.testing.assert_array_equal(found.kl_lower[whole], found.kl_upper[whole])
    other = 1 - np.take_along_axis(q, ours, 1).sum(1)
    distance = np.abs(other - np.exp(lists(p, ours)[:, -1]))
    reference = np.exp(metrics.cells(lists(p, ours))[:, -1])
    assert np.all(np.abs(found.tail_nearest - reference) <= distance + 1e-9)
    assert np.all(np.abs(found.tail_farthest - reference) >= distance - 1e-9)


def test_no_allowed_distribution_is_below_the_lower_bound():
    """Against masses drawn at random among those that the list allows."""
    p, q, ours, theirs, target = drawn(0.5, 20, rows=40)
    found = bound(
        metrics.cells(lists(p, ours)), ours, lists(q, theirs), theirs, target,
        np.log(np.take_along_axis(q, target[:, None], 1))[:, 0], q.shape[1],
    )  # fmt: skip
    rng = np.random.default_rng(6)
    tried = 0
    for row in range(len(p)):
        missing = [i for i in ours[row] if i not in theirs[row] and i != target[row]]
        if not missing:
            continue
        listed = q[row, theirs[row]]
        spare = 1 - listed.sum() - (q[row, target[row]] if target[row] in ours[row] else 0)
        extra = sum(q[row, i] for i in theirs[row] if i not in ours[row])
        for _ in range(200):
            guess = rng.uniform(0, min(listed.min(), spare / len(missing)), len(missing))
            at = {i: q[row, i] for i in ours[row]} | dict(zip(missing, guess, strict=True))
            other = extra + spare - guess.sum()
            a = p[row, ours[row]]
            b = np.array([at[i] for i in ours[row]])
            rest = 1 - a.sum()
            kl = np.sum(a * np.log(a / b)) + rest * np.log(rest / other)
            assert kl >= found.kl_lower[row] - 1e-9
            tried += 1
    assert tried > 1000


def with_own_ids(reference, noise: float, seed: int = 1):
    """A candidate recording at its own top ids."""
    parts = made.segments()
    logits = made.logits_of(parts)
    noisy = logits + np.random.default_rng(seed).normal(0, noise, logits.shape)
    return made.recording(parts, noisy, None, "imported")


def test_compare_gives_both_bounds():
    parts = made.segments()
    logits = made.logits_of(parts)
    reference = made.recording(parts, logits)
    candidate = with_own_ids(reference, 0.3)
    c = compare(reference, candidate)
    assert 0 < c.missing_ids <= len(c.kl) and c.upper is not None
    rng = np.random.default_rng(1)
    noisy = logits + rng.normal(0, 0.3, logits.shape)
    truth = coarse_kl(softmax(logits), softmax(noisy), reference.top_ids)
    assert np.all(c.kl <= truth + 1e-5) and np.any(c.upper.kl > truth + 1e-3)
    assert np.array_equal(c.flipped, logits.argmax(1) != noisy.argmax(1))
    with pytest.raises(UserError, match="scored at the reference's ids"):
        calibrate(None, [c, c, c, c])


def test_a_list_of_another_recording_is_refused():
    reference, _ = made.pair()
    stranger = made.recording(made.segments(), made.logits_of(made.segments(), 9), None, "other")
    parts = made.segments()
    candidate = made.recording(parts, made.logits_of(parts), stranger, "candidate")
    with pytest.raises(UserError, match="Record the candidate with"):
        compare(reference, candidate)


@pytest.fixture(scope="module")
def judged():
    corpus = Corpus(Design(contexts=(512, 2048), steps=32), np.random.default_rng(11))
    band = calibrate(None, [corpus.producer(name=f"normal {i}") for i in range(5)])
    return corpus, band


def between(lower, upper):
    """One comparison of bounds: the KL of both, on the same rows."""
    return dataclasses.replace(lower, upper=upper, missing_ids=7)


def passing(corpus, band):
    for _ in range(20):
        candidate = corpus.producer()
        if judge(candidate, band).outcome is Outcome.PASS:
            return candidate
    raise AssertionError("none of 20 normals passed")


def test_fail_by_the_lower_pass_by_the_upper(judged):
    corpus, band = judged
    good, bad = passing(corpus, band), corpus.producer(Effect(ratio=2.0))
    assert judge(bad, band).outcome is Outcome.FAIL
    worse = dataclasses.replace(bad, kl=2 * bad.kl)

    verdict = judge(between(bad, worse), band)
    assert verdict.outcome is Outcome.FAIL and verdict.exit_code == 1
    verdict = judge(between(good, good), band)
    assert verdict.outcome is Outcome.PASS and verdict.missing_ids == 7
    verdict = judge(between(good, bad), band)
    assert verdict.outcome is Outcome.INCONCLUSIVE and verdict.exit_code == 2
    assert verdict.reason.startswith("7 of ")
    assert verdict.kl_upper["mean"] > verdict.kl["mean"]
    line = verdict_line(verdict)
    assert line["missing_ids"] == 7 and line["kl_upper"]["mean"] == verdict.kl_upper["mean"]
    assert "lower bound alone would be PASS" in " ".join(render_text(verdict).split())

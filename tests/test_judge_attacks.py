"""What a wrong candidate could do to pass: the demo's own recordings, damaged in one way each.

A normal recording is judged by a band of the other five. Where an attack says "KL times f", the
candidate's log-probabilities are moved away from the reference's by the root of f in these rows
(to second order KL goes with the square of the error), which is an error that looks like rounding.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from kernjax.base.errors import UserError
from kernjax.base.resources import demo_recording
from kernjax.judge import Band, Outcome, calibrate, compare, judge
from kernjax.recording import Recording, load_recording

OTHERS = ("bf16", "chunk128", "block256", "p_f32", "row_sum_rounded")


def load(name: str) -> Recording:
    return load_recording(demo_recording(f"demo.{name}.zip"))


@pytest.fixture(scope="module")
def reference() -> Recording:
    return load("f32")


@pytest.fixture(scope="module")
def candidate() -> Recording:
    return load("chunk32")


@pytest.fixture(scope="module")
def band(reference) -> Band:
    return calibrate(reference, [compare(reference, load(name)) for name in OTHERS])


def moved(reference: Recording, candidate: Recording, factor: np.ndarray) -> Recording:
    """The candidate with the KL of each row multiplied by about `factor` [R]."""
    ours, theirs = (
        np.concatenate([r.top_logprobs, r.tail_logprob[:, None]], axis=1).astype(np.float64)
        for r in (reference, candidate)
    )
    cells = ours + np.sqrt(factor)[:, None] * (theirs - ours)
    total = np.logaddexp.reduce(cells, axis=1)
    cells -= total[:, None]
    ours, theirs = (r.target_logprobs.astype(np.float64) for r in (reference, candidate))
    unlisted = ours + np.sqrt(factor) * (theirs - ours) - total
    order = np.argsort(-cells[:, :-1], axis=1, kind="stable")
    rows = np.arange(len(cells))
    ranked = np.take_along_axis(cells[:, :-1], order, axis=1)
    is_target = reference.top_ids == candidate.target_ids[:, None]
    listed = np.where(is_target, cells[:, :-1], -np.inf).max(axis=1)
    return dataclasses.replace(
        candidate,
        path="attack",
        identity="attack",
        top_logprobs=cells[:, :-1].astype(np.float32),
        tail_logprob=cells[:, -1].astype(np.float32),
        top1_ids=reference.top_ids[rows, order[:, 0]],
        margins=(ranked[:, 0] - ranked[:, 1]).astype(np.float32),
        target_logprobs=np.where(
            is_target.any(axis=1), listed, np.minimum(unlisted, cells[:, -1])
        ).astype(np.float32),
    )


class Rows:
    """Masks over the rows of a recording."""

    def __init__(self, r: Recording) -> None:
        context = r.context_lens[r.segment]
        self.prefill, self.decode, self.rescored = (r.phase == phase for phase in range(3))
        self.segment, self.pos, self.step = r.segment, r.pos, r.pos - context
        self.deep = context == context.max()
        self.last = self.prefill & (r.pos == context - 1)
        self.code = r.kinds[r.segment] == "code"
        self.some = np.random.default_rng(0).random(len(r.pos))


ATTACKS = {
    "rescored KL times 1.5": lambda r: (r.rescored, 1.5),
    "rescored, deep only, times 1.7": lambda r: (r.rescored & r.deep, 1.7),
    "rescored, after a chunk's edge, times 9": lambda r: (r.rescored & (r.pos % 64 < 4), 9),
    "one decode step in 128 times 9": lambda r: (r.decode & (r.step == 64), 9),
    "the step that fills a block times 9": lambda r: (r.decode & (r.pos % 64 == 63), 9),
    "one decode step inside a block times 8": lambda r: (r.decode & (r.step == 17), 8),
    "the first place of every page of 16 times 1.6": lambda r: (r.decode & (r.pos % 16 == 0), 1.6),
    "every second step times 1.8, the others 0.2": lambda r: (
        r.decode,
        np.where(r.step % 2 == 0, 1.8, 0.2),
    ),
    "rescored, one place of a page of 32 times 3": lambda r: (r.rescored & (r.pos % 32 == 5), 3),
    "the first decode steps times 4": lambda r: (r.decode & (r.step < 4), 4),
    "the last decode steps times 4": lambda r: (r.decode & (r.step >= 120), 4),
    "one segment times 3": lambda r: (r.decode & (r.segment == 7), 3),
    "one slot of a batch of 16 times 2": lambda r: (r.decode & (r.segment % 16 == 3), 2),
    "half the segments times 1.6, half times 0.3": lambda r: (
        r.decode,
        np.where(r.segment % 2 == 0, 1.6, 0.3),
    ),
    "half the segments times 1.5, half the reference": lambda r: (
        r.decode,
        np.where(r.segment % 2 == 0, 1.5, 0.0),
    ),
    "two thirds of the segments times 1.15, the others 0.2": lambda r: (
        r.decode,
        np.where(r.segment % 3 == 0, 0.2, 1.15),
    ),
    "rescored, half times 1.25, half nearly the reference": lambda r: (
        r.rescored,
        np.where(r.segment % 2 == 0, 1.25, 1e-4),
    ),
    "one segment's last position times 1000": lambda r: (r.last & (r.segment == 9), 1000),
    "one segment's chunk edges times 60": lambda r: (
        r.prefill & ~r.last & (r.segment == 20) & (r.pos >= 64),
        60,
    ),
    "1 % of the positions times 100": lambda r: (r.decode & (r.some < 0.01), 100),
    "the prompt's last position times 2": lambda r: (r.last, 2),
    "prefill's edges times 2": lambda r: (r.prefill & ~r.last, 2),
    "the last position times 5, in one kind and depth": lambda r: (
        r.last & r.code & r.deep,
        5,
    ),
    "decode's first steps times 2.5, in one kind and depth": lambda r: (
        r.decode & (r.step < 4) & ~r.code & ~r.deep,
        2.5,
    ),
    "the steps that fill a block times 2.5, in one kind and depth": lambda r: (
        r.decode & (r.pos % 64 == 63) & r.code & ~r.deep,
        2.5,
    ),
    "chunk edges times 1.6, in one kind and depth": lambda r: (
        r.prefill & ~r.last & (r.pos >= 64) & ~r.code & r.deep,
        1.6,
    ),
    "one kind of text times 1.15": lambda r: (r.decode & r.code, 1.15),
    "one depth times 1.3": lambda r: (r.decode & r.deep, 1.3),
}


def test_the_recording_itself_passes(reference, candidate, band):
    assert judge(compare(reference, candidate), band).outcome is Outcome.PASS
    same = moved(reference, candidate, np.ones(len(candidate.pos)))
    assert judge(compare(reference, same), band).outcome is Outcome.PASS


@pytest.mark.parametrize("name", ATTACKS)
def test_no_pass(reference, candidate, band, name):
    rows, factor = ATTACKS[name](Rows(candidate))
    attack = moved(reference, candidate, np.where(rows, factor, 1.0))
    verdict = judge(compare(reference, attack), band)
    assert verdict.outcome is not Outcome.PASS
    severe = {"fail", "inconclusive"}
    assert [f for f in verdict.findings if f.severity in severe]


@pytest.mark.parametrize("code", [False, True])
@pytest.mark.parametrize("deep", [False, True])
def test_the_last_position_of_one_kind_and_depth(reference, candidate, band, code, deep):
    """Its gate has one mean over four: it stays below what is allowed, and the cell is named."""
    rows = Rows(candidate)
    inside = rows.last & (rows.code == code) & (rows.deep == deep)
    attack = moved(reference, candidate, np.where(inside, 5.0, 1.0))
    verdict = judge(compare(reference, attack), band)
    (gate,) = [g for g in verdict.gates if g.name == "prefill_last"]
    assert gate.observed < gate.allowed and verdict.outcome is Outcome.INCONCLUSIVE
    place = f"on {'code' if code else 'prose'} at context {2048 if deep else 512} it is "
    (found,) = [f.text for f in verdict.findings if "one mean over 4 kinds and depths" in f.text]
    assert "Gate prefill_last" in found and place in found
    own = np.log(compare(reference, candidate).kl[inside]) + np.log(5.0)
    normal = np.log([compare(reference, load(name)).kl[inside] for name in OTHERS])
    ratio = float(found.split(place)[1].split(",")[0])
    assert ratio == pytest.approx(np.exp(np.mean(own - normal.mean(axis=0))), rel=0.05)


def with_rows_of(source: Recording, candidate: Recording, chosen: np.ndarray) -> Recording:
    """The candidate with some rows [R] of another recording, to the last bit."""
    columns = {
        name: np.where(chosen.reshape(-1, *[1] * (values.ndim - 1)), values, own)
        for name in ("top_logprobs", "tail_logprob", "target_logprobs", "top1_ids", "margins")
        for values, own in ((getattr(source, name), getattr(candidate, name)),)
    }
    return dataclasses.replace(candidate, path="copy", identity="copy", **columns)


@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("phase", ["prefill", "rescored"])
def test_rows_of_the_reference_in_what_does_not_decide(reference, candidate, band, phase, share):
    """Prefill did not run; all of it may be so where the candidate is of the reference's own
    precision, and changes decode alone."""
    rows = Rows(candidate)
    chosen = getattr(rows, phase) & ((rows.segment % 2 == 0) | (share == 1.0))
    copied = with_rows_of(reference, candidate, chosen)
    verdict = judge(compare(reference, copied), band)
    found = [f for f in verdict.findings if "rows are the reference's to the last bit" in f.text]
    assert verdict.outcome is Outcome.INCONCLUSIVE and len(found) == 1
    assert f"{'50' if share == 0.5 else '100'}% of the" in found[0].text
    fields = candidate.manifest["policy"]["fields"] | {"activations": "f32"}
    manifest = candidate.manifest | {"policy": candidate.manifest["policy"] | {"fields": fields}}
    same = judge(compare(reference, dataclasses.replace(copied, manifest=manifest)), band)
    found = [f for f in same.findings if "rows are the reference's to the last bit" in f.text]
    assert bool(found) == (share != 1.0)


@pytest.mark.parametrize("share", [0.02, 0.5, 1.0])
def test_rows_of_the_reference_itself(reference, candidate, band, share):
    """The others 1.5 times as wrong as normal: with half of them copied both means are below 1."""
    rows = Rows(candidate)
    worse = moved(reference, candidate, np.where(rows.decode & (share == 0.5), 1.5, 1.0))
    copied = with_rows_of(reference, worse, rows.decode & (rows.some < share))
    verdict = judge(compare(reference, copied), band)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert any("rows are the reference's to the last bit" in f.text for f in verdict.findings)


def test_rows_that_prefill_made_are_not_decode(reference, candidate, band):
    """What is called decode is what prefill said of the same tokens: a warning, since engines may
    run the same arithmetic in both."""
    rows = Rows(candidate)
    columns = {}
    for name in ("top_logprobs", "tail_logprob", "target_logprobs", "top1_ids", "margins"):
        columns[name] = (values := getattr(candidate, name).copy())
        values[rows.decode] = values[rows.rescored]
    verdict = judge(compare(reference, dataclasses.replace(candidate, **columns)), band)
    assert any("decode did not run" in f.text for f in verdict.findings)
    usual = judge(compare(reference, candidate), band)
    assert not any("decode did not run" in f.text for f in usual.findings)


@pytest.mark.parametrize("peers", [3, 5])
def test_a_wrong_producer_among_the_normals(reference, candidate, peers):
    """As wrong as scaled fp8 is: it would widen the limit enough to PASS by it itself."""
    wrong = moved(reference, candidate, np.where(candidate.phase == 1, 1.16, 1.0))
    normals = [*(load(name) for name in OTHERS[:peers]), wrong]
    with pytest.raises(UserError, match=rf"would FAIL by a band of its {peers} peers: level"):
        calibrate(reference, normals)


def test_a_wrong_shard_of_words_that_are_not_listed(reference, candidate, band):
    """Half a nat at one of sixteen shards of the vocabulary, outside the 20 ids: the KL sees one
    cell, whose mass stays; the corpus's own tokens tell."""
    listed = (reference.top_ids == reference.target_ids[:, None]).any(axis=1)
    shard = ~listed & (reference.target_ids // 24 == 13)
    assert 50 < shard.sum() < 0.02 * len(shard)
    logprobs = candidate.target_logprobs - np.where(shard, np.float32(0.5), 0)
    attack = dataclasses.replace(candidate, identity="attack", target_logprobs=logprobs)
    verdict = judge(compare(reference, attack), band)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "outside the recorded ids moves" in verdict.reason


def test_a_small_bias_that_kl_hardly_shows(reference, candidate, band):
    """0.005 nats taken from the likeliest word everywhere: the mass outside the list tells."""
    logprobs = candidate.top_logprobs.astype(np.float64)
    logprobs[:, 0] -= 0.005
    tail = candidate.tail_logprob[:, None].astype(np.float64)
    cells = np.concatenate([logprobs, tail], axis=1)
    cells -= np.logaddexp.reduce(cells, axis=1)[:, None]
    whole = moved(reference, candidate, np.ones(len(candidate.pos)))
    biased = dataclasses.replace(
        whole,
        top_logprobs=cells[:, :-1].astype(np.float32),
        tail_logprob=cells[:, -1].astype(np.float32),
    )
    verdict = judge(compare(reference, biased), band)
    assert verdict.outcome is Outcome.FAIL
    assert "tail_mass" in {g.name for g in verdict.gates if g.outcome is Outcome.FAIL}

"""compare(): what is read of two recordings, and which pairs are refused."""

from __future__ import annotations

import dataclasses

import judge_recordings as made
import numpy as np
import pytest

import kernjax
from kernjax.base.errors import UserError
from kernjax.judge import compare, metrics


def softmax(logits):
    e = np.exp(logits - logits.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def test_numbers_against_the_definitions():
    parts = made.segments()
    logits = made.logits_of(parts)
    noisy = logits + np.random.default_rng(1).normal(0, 0.3, logits.shape)
    reference = made.recording(parts, logits)
    c = compare(reference, made.recording(parts, noisy, reference, "candidate"))

    p, q = softmax(logits), softmax(noisy)
    for row in (0, 17, len(p) - 1):
        top = np.argsort(-logits[row], kind="stable")[:20]
        a = np.append(p[row, top], 1 - p[row, top].sum())
        b = np.append(q[row, top], 1 - q[row, top].sum())
        assert c.kl[row] == pytest.approx(np.sum(a * np.log(a / b)), rel=1e-4)
        assert c.tail_mass[row] == pytest.approx(a[-1], rel=1e-5)
        assert c.tail_change[row] == pytest.approx(b[-1] - a[-1], rel=1e-3, abs=1e-7)
        first, second = top[:2]
        change = (noisy[row, first] - noisy[row, second]) - (
            logits[row, first] - logits[row, second]
        )
        assert c.margin_change[row] == pytest.approx(change, abs=1e-5)
    assert np.array_equal(c.flipped, logits.argmax(1) != noisy.argmax(1))
    assert c.flipped.any() and not c.flipped.all()
    assert not c.bitwise_reference
    assert c.candidate_name == "candidate" and c.reference_identity == reference.identity


def test_the_same_bits_give_exactly_zero():
    reference, _ = made.pair()
    twin = dataclasses.replace(
        reference,
        path="twin",
        manifest={**reference.manifest, "reference": reference.identity},
    )
    c = compare(reference, twin)
    assert np.all(c.kl == 0) and np.all(c.margin_change == 0) and c.bitwise_reference


def test_ties_are_apart_from_flips():
    parts = made.segments()
    logits = made.logits_of(parts)
    order = np.argsort(-logits, axis=1)
    logits[np.arange(9), order[:9, 1]] = logits[np.arange(9), order[:9, 0]]
    reference = made.recording(parts, logits)
    swapped = logits.copy()
    first = reference.top1_ids[:9]
    swapped[np.arange(9), first] -= 1e-3  # the other of the two now leads
    c = compare(reference, made.recording(parts, swapped, reference, "candidate"))
    assert c.tie_flipped[:9].all() and c.tie_flipped.sum() == 9
    assert not c.flipped.any()


def test_non_finite_values_are_masked_not_spread():
    reference, candidate = made.pair()
    logprobs = candidate.top_logprobs.copy()
    logprobs[5, 3] = np.nan
    margins = candidate.margins.copy()
    margins[7] = np.inf
    tail = candidate.tail_logprob.copy()
    tail[9] = -np.inf
    c = compare(
        reference,
        made.changed(candidate, top_logprobs=logprobs, margins=margins, tail_logprob=tail),
    )
    assert np.nonzero(~c.finite)[0].tolist() == [5, 7, 9]
    assert np.isnan(c.kl[[5, 7, 9]]).all()
    assert np.isfinite(np.delete(c.kl, [5, 7, 9])).all()
    assert not c.flipped[[5, 7, 9]].any()


def test_extras_that_are_not_finite_count_as_the_rows_do():
    """A NaN in a hidden sketch is the candidate's NaN, though no probability shows it."""
    reference, candidate = made.pair()
    rows = len(reference.pos)
    sketches = np.zeros((rows, 2, 32), np.float32)
    broken = sketches.copy()
    broken[5, 1, 7], broken[8, 0, 0] = np.nan, np.inf
    kinds = {"hidden_sketch": sketches, "count": np.arange(rows, dtype=np.int32)}
    reference = made.changed(reference, extras=kinds)
    c = compare(reference, made.changed(candidate, extras={**kinds, "hidden_sketch": broken}))
    assert np.nonzero(~c.finite)[0].tolist() == [5, 8]
    assert np.isfinite(c.kl).all()
    with pytest.raises(UserError, match="NaN or infinite values in 2 rows"):
        compare(made.changed(reference, extras={"hidden_sketch": broken}), candidate)


def test_full_distributions_that_are_not_finite():
    reference, candidate = made.pair()
    full = np.full((len(reference.pos), made.VOCAB), -np.log(made.VOCAB), np.float32)
    broken = full.copy()
    broken[3, 9] = -np.inf
    c = compare(
        made.changed(reference, extras={"logprobs": full}),
        made.changed(candidate, extras={"logprobs": broken}),
    )
    assert np.nonzero(~c.finite)[0].tolist() == [3]


def test_a_top1_id_that_is_not_the_likeliest():
    """Flips are counted by it: one copied from the reference, or shifted, would hide them all."""
    reference, candidate = made.pair(noise=1.0)
    compare(reference, candidate)
    assert (candidate.top1_ids != reference.top1_ids).any()
    copied = made.changed(candidate, top1_ids=reference.top1_ids)
    with pytest.raises(UserError, match=r"top1_ids does not belong .* in \d+ rows"):
        compare(reference, copied)


@pytest.mark.parametrize("name", ["top1_ids", "target_logprobs", "margins"])
def test_a_column_that_was_shifted_against_the_others(name):
    reference, candidate = made.pair()
    rolled = made.changed(candidate, **{name: np.roll(getattr(candidate, name), 1)})
    with pytest.raises(UserError, match=f"candidate: {name} does not belong.*of one softmax"):
        compare(reference, rolled)
    changed = made.changed(candidate, **{name: -getattr(candidate, name)})
    if name != "top1_ids":
        with pytest.raises(UserError, match=name):
            compare(reference, changed)


def test_decode_against_one_shot_prefill():
    parts = made.segments()
    logits = made.logits_of(parts)
    reference = made.recording(parts, logits)
    decode = reference.phase == 1
    other = logits.copy()
    other[decode] += np.random.default_rng(3).normal(0, 0.05, other[decode].shape)
    c = compare(reference, made.recording(parts, other, reference, "candidate"))
    assert np.array_equal(np.isfinite(c.self_kl), decode)
    # The rescored rows equal the reference: decode's own KL is the same pair of distributions.
    assert np.allclose(c.self_kl[decode], c.kl[decode], rtol=1e-9)


def test_decode_against_prefill_where_the_two_rows_list_other_ids():
    parts = made.segments(per_cell=1, contexts=(64,))
    logits = made.logits_of(parts)
    rescored = np.nonzero(made.recording(parts, logits).phase == 2)[0]
    shifted = logits.copy()
    order = np.argsort(-logits, axis=1)
    # In the reference's own second pass the 20th and the 21st word change places.
    for row in rescored:
        a, b = order[row, 19], order[row, 20]
        shifted[row, [a, b]] = logits[row, [b, a]]
    reference = made.recording(parts, shifted)
    candidate = made.recording(parts, logits, reference, "candidate")
    c = compare(reference, candidate)
    # The candidate says the same in both passes; only the cells it is told through differ.
    assert np.nanmax(c.self_kl) < 1e-12


def test_a_part_of_the_segments_is_compared_on_that_part():
    reference, candidate = made.pair()
    keep = [s["id"] for s in reference.segments][1:3]
    c = compare(reference, candidate.select(keep))
    whole = compare(reference, candidate)
    assert [s.id for s in c.segments] == keep
    assert np.array_equal(c.kl, whole.kl[np.isin(whole.segment, [1, 2])])
    assert c.reference_identity == whole.reference_identity


def test_package_level_names():
    reference, candidate = made.pair()
    assert np.array_equal(
        kernjax.compare(reference, candidate).kl, compare(reference, candidate).kl
    )


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda r, c: (c, r), "Swap"),
        (lambda r, c: (r, made.pair(model={"weights_sha256": "z"})[1]), "weights"),
        (lambda r, c: (r, made.pair(corpus={"sha256": "z"})[1]), "corpus"),
        (lambda r, c: (r, made.pair(tokenizer_sha256="z")[1]), "tokenizer"),
        (lambda r, c: (r, made.changed(c, top_ids=c.top_ids[:, ::-1].copy())), "ids"),
        (lambda r, c: (r, made.changed(c, pos=c.pos + 1)), "pos"),
        (lambda r, c: (made.changed(r, margins=r.margins * np.nan), c), "NaN"),
        (
            lambda r, c: (r, made.changed(c, tail_logprob=c.tail_logprob + 1)),
            "sum to",
        ),
    ],
)
def test_pairs_that_do_not_belong_together(break_it, message):
    with pytest.raises(UserError, match=message):
        compare(*break_it(*made.pair()))


def test_values_are_computed_from_float32_without_losing_small_kl():
    """A KL of 1e-9 is told apart from 0 although float32 log-probabilities err by 1e-6."""
    parts = made.segments()
    logits = made.logits_of(parts)
    reference = made.recording(parts, logits)
    noise = np.random.default_rng(2).normal(0, 3e-5, logits.shape)
    c = compare(reference, made.recording(parts, logits + noise, reference, "candidate"))
    exact = metrics.kl_divergence(*(np.log(softmax(side)) for side in (logits, logits + noise)))
    assert np.median(exact) < 1e-9
    assert np.median(c.kl) == pytest.approx(np.median(exact), rel=0.5)

"""Vetting: every reason to refuse a corpus or to doubt it, made on purpose."""

from __future__ import annotations

import numpy as np
import pytest
from texts_helpers import make_corpus, make_recording, make_segment

from kernjax.base.errors import UserError
from kernjax.texts import Corpus, Segment, vet_recording, vet_tokens


def names(remarks):
    return {(remark.name, remark.is_refusal) for remark in remarks}


def corpus_of(*token_lists, score_len=100):
    segments = [
        Segment(f"s{i}", "prose", len(ids) - score_len - 1, score_len, np.asarray(ids, np.int32))
        for i, ids in enumerate(token_lists)
    ]
    return Corpus.build("vetted", segments)


def random_ids(seed, count=401):
    return np.random.default_rng(seed).integers(0, 500, count)


def test_independent_texts_are_good():
    corpus = corpus_of(*[random_ids(seed) for seed in range(16)])
    assert names(vet_tokens(corpus)) == {("depths", False)}


def test_thin_strata_are_named():
    remarks = vet_tokens(corpus_of(*[random_ids(seed) for seed in range(15)]))
    assert names(remarks) == {("thin", False), ("depths", False)}
    assert remarks[0].text == "fewer than 16 independent segments: prose at 300 (15)."


def test_missing_depths_are_named():
    def cell(kind, context_len):
        return [
            Segment(f"{kind}-{context_len}-{i}", kind, context_len, 8,
                    random_ids(1000 * context_len + 10 * i + len(kind), context_len + 9)
                    .astype(np.int32))
            for i in range(16)
        ]  # fmt: skip

    both = [*cell("prose", 64), *cell("prose", 128), *cell("code", 64), *cell("code", 128)]
    assert vet_tokens(Corpus.build("both", both)) == []
    remarks = vet_tokens(Corpus.build("lacks", both[:48]))
    assert names(remarks) == {("depths", False)}
    assert remarks[0].text == "depths that other kinds have are missing: code at 128."


@pytest.mark.parametrize(("copied", "expected"), [(300, True), (100, False), (20, None)])
def test_shared_text_is_found_wherever_it_stands(copied, expected):
    texts = [random_ids(seed) for seed in range(16)]
    texts[5] = np.concatenate([random_ids(99, 401 - copied), texts[3][7 : 7 + copied]])
    remarks = [r for r in vet_tokens(corpus_of(*texts)) if r.name == "shared"]
    if expected is None:
        assert remarks == []
    else:
        assert [r.is_refusal for r in remarks] == [expected, expected]
        assert "'s3'" in remarks[0].text and "'s5'" in remarks[1].text


@pytest.mark.parametrize(
    ("loops", "segments", "expected"),
    [
        (100, 1, {("loop", False)}),
        (100, 2, {("loop", False)}),
        (100, 3, {("loop", False), ("loops", True)}),
        (60, 3, {("loop", False)}),
        (10, 3, set()),
    ],
)
def test_scored_text_that_loops_is_found(loops, segments, expected):
    """A segment that loops says little; where many do, nothing is left that says something."""
    texts = [random_ids(seed) for seed in range(16)]
    for at in range(segments):
        kept = texts[at][: 401 - loops - 5]
        texts[at] = np.concatenate([kept, np.resize(np.arange(5) + 7 * at, loops + 5)])
    found = [r for r in vet_tokens(corpus_of(*texts)) if r.name.startswith("loop")]
    assert {(r.name, r.is_refusal) for r in found} == expected
    assert sum(r.name == "loop" for r in found) == (segments if loops > 10 else 0)


def test_a_context_that_loops_before_the_scored_part_is_no_reason():
    texts = [random_ids(seed) for seed in range(16)]
    texts[4] = np.concatenate([np.resize([1, 2, 3, 4, 5], 250), random_ids(77, 151)])
    assert [r for r in vet_tokens(corpus_of(*texts)) if r.name.startswith("loop")] == []


def test_short_segments_do_not_break_the_windows():
    for context_len in (1, 40):
        found = names(vet_tokens(make_corpus(2, context_len=context_len, score_len=0)))
        assert found == {("thin", False), ("depths", False)}


def recorded(**fields):
    strata = [(kind, depth, i) for kind in ("prose", "code") for depth in (8, 16) for i in range(4)]
    segments = [
        make_segment(f"{kind}{depth}-{i}", kind, depth, 30, seed=seed)
        for seed, (kind, depth, i) in enumerate(strata)
    ]
    corpus = Corpus.build("recorded", segments)
    return corpus, make_recording(corpus, **fields)


def test_a_good_recording_has_a_profile_and_no_remark():
    corpus, recording = recorded()
    remarks, profiles = vet_recording(corpus, recording)
    assert remarks == []
    assert [(p.kind, p.context_len, p.segments, p.rows) for p in profiles] == [
        ("code", 8, 4, 124),
        ("code", 16, 4, 124),
        ("prose", 8, 4, 124),
        ("prose", 16, 4, 124),
    ]
    rows = np.arange(124) + 2 * 124  # code follows prose in the corpus
    chosen = profiles[0]
    assert chosen.other_mean == pytest.approx(float(np.exp(recording.tail_logprob[rows]).mean()))
    assert chosen.margin_quartiles == pytest.approx(
        tuple(np.quantile(recording.margins[rows].astype(float), (0.25, 0.5, 0.75)))
    )
    assert chosen.near_ties == pytest.approx(float((recording.margins[rows] < 0.1).mean()))
    assert chosen.undecided == pytest.approx(float((recording.margins[rows] < 1).mean()))


def test_entropy_of_known_rows():
    corpus, recording = recorded()
    recording.top_logprobs[:] = np.log(0.5 / 20)
    recording.tail_logprob[:] = np.log(0.5)
    _, profiles = vet_recording(corpus, recording)
    expected = -(0.5 * np.log(0.5 / 20) + 0.5 * np.log(0.5))
    assert profiles[0].entropy_median == pytest.approx(expected, rel=1e-6)
    recording.top_logprobs[:] = np.log(1 / 20)
    recording.tail_logprob[:] = -np.inf  # an empty tail is no error
    _, profiles = vet_recording(corpus, recording)
    assert profiles[0].entropy_median == pytest.approx(np.log(20), rel=1e-6)
    assert profiles[0].other_mean == 0


def test_another_corpus_is_refused():
    corpus, recording = recorded()
    with pytest.raises(UserError, match="was made on corpus 'recorded'"):
        vet_recording(make_corpus(), recording)
    recording.manifest.pop("corpus")
    with pytest.raises(UserError, match="was made on corpus None"):
        vet_recording(corpus, recording)


def drop_rows(recording, keep):
    for name, values in vars(recording).items():
        if name != "manifest":
            setattr(recording, name, values[keep])


@pytest.mark.parametrize(
    "lost",
    [lambda r: (r.segment == 5) & (r.phase == 0), lambda r: (r.segment == 5) & (r.pos == 20)],
)
def test_missing_rows_are_refused(lost):
    corpus, recording = recorded()
    drop_rows(recording, ~lost(recording))
    remarks, profiles = vet_recording(corpus, recording)
    assert names(remarks) == {("incomplete", True)} and profiles == []
    assert "1 of 16 segments" in remarks[0].text and "prose at 16" in remarks[0].text


def test_a_missing_depth_is_refused():
    corpus, recording = recorded()
    deep = [i for i, segment in enumerate(corpus.segments) if segment.context_len == 16]
    drop_rows(recording, ~np.isin(recording.segment, deep))
    remarks, _ = vet_recording(corpus, recording)
    assert "8 of 16 segments" in remarks[0].text
    assert "code at 16, prose at 16" in remarks[0].text


@pytest.mark.parametrize(
    ("name", "index", "value", "expected"),
    [
        ("top_logprobs", (7, 3), np.nan, "non-finite"),
        ("top_logprobs", (7, 3), -np.inf, "non-finite"),
        ("tail_logprob", 7, np.nan, "non-finite"),
        ("margins", 7, np.inf, "non-finite"),
        ("top_logprobs", (7, 0), 0.0, "mass"),
        ("target_ids", 7, -1, "targets"),
        ("pos", 7, 500, "targets"),
    ],
)
def test_rows_that_cannot_be_right_are_refused(name, index, value, expected):
    corpus, recording = recorded()
    getattr(recording, name)[index] = value
    remarks, _ = vet_recording(corpus, recording)
    assert (expected, True) in names(remarks)


@pytest.mark.parametrize(
    ("other", "expected"), [(0.1, None), (0.3, False), (0.5, True)], ids=["good", "warn", "refuse"]
)
def test_mass_outside_the_top_20(other, expected):
    corpus, recording = recorded()
    top = np.exp(recording.top_logprobs.astype(np.float64))
    scaled = np.log(top / top.sum(1, keepdims=True) * (1 - other))
    recording.top_logprobs[:] = scaled
    recording.tail_logprob[:] = np.log(other)
    found = {r.is_refusal for r in vet_recording(corpus, recording)[0] if r.name == "other"}
    assert found == (set() if expected is None else {expected})


def test_an_untrained_model_is_refused():
    corpus, recording = recorded(vocab_size=3000, sharpness=0.02)
    found = names(vet_recording(corpus, recording)[0])
    assert {("uniform", True), ("other", True), ("near ties", False), ("margins", False)} <= found


def test_rows_that_repeat_are_found():
    corpus, recording = recorded()
    decode = np.flatnonzero(recording.phase == 1)
    for count, expected in ((3, None), (100, False), (400, True)):
        for name in ("top_ids", "top_logprobs", "tail_logprob"):
            values = getattr(recording, name)
            values[decode[:count]] = values[decode[0]]
        found = [
            r.is_refusal for r in vet_recording(corpus, recording)[0] if r.name[:8] == "repeated"
        ]
        assert found == ([] if expected is None else [expected])


def test_a_rescored_row_is_no_repetition():
    corpus, recording = recorded()
    again = np.flatnonzero(recording.phase == 1)
    for name, values in vars(recording).items():
        if name != "manifest":
            setattr(recording, name, np.concatenate([values, values[again]]))
    recording.phase[-len(again) :] = 2
    assert vet_recording(corpus, recording)[0] == []


def test_rounded_logits_show_in_the_margins():
    corpus, recording = recorded()
    recording.margins[:] = np.round(recording.margins * 8) / 8
    found = [r for r in vet_recording(corpus, recording)[0] if r.name == "rounded logits"]
    assert len(found) == 4 and not found[0].is_refusal

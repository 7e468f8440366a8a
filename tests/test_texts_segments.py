"""Segments and corpora: what is refused, and what the hash depends on."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest
from texts_helpers import make_corpus, make_segment

from kernjax.base.errors import UserError
from kernjax.texts import Corpus, Segment, corpus_sha256


def tokens(count, dtype=np.int32):
    return np.arange(count, dtype=dtype)


def test_a_segment_holds_read_only_int32_ids():
    segment = Segment("a", "prose", 3, 2, tokens(6, np.uint16), (0, 4))
    assert segment.tokens.dtype == np.int32 and segment.length == 6
    with pytest.raises(ValueError):
        segment.tokens[0] = 1
    assert json.loads(json.dumps(segment.to_dict())) == {
        "id": "a",
        "kind": "prose",
        "context_len": 3,
        "score_len": 2,
        "documents": [0, 4],
    }


def test_a_segment_does_not_follow_its_source_array():
    ids = tokens(6)
    segment = Segment("a", "prose", 3, 2, ids)
    ids[0] = 99
    assert segment.tokens[0] == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"id": "a b"}, "id='a b'"),
        ({"id": ""}, "id=''"),
        ({"kind": "pro/se"}, "kind='pro/se'"),
        ({"context_len": 0}, "context_len=0"),
        ({"context_len": 3.0}, "context_len=3.0"),
        ({"score_len": -1}, "score_len=-1"),
        ({"score_len": True}, "score_len=True"),
        ({"tokens": tokens(6, np.int64)}, "dtype int64"),
        ({"tokens": tokens(6, np.float32)}, "dtype float32"),
        ({"tokens": tokens(5)}, r"shape \[5\]. Expected \[6\]"),
        ({"tokens": tokens(6).reshape(2, 3)}, r"shape \[2, 3\]"),
        ({"tokens": -tokens(6)}, "hold -5"),
        ({"documents": (1, 2)}, "0 first"),
        ({"documents": (0, 3, 3)}, "ascending"),
        ({"documents": (0, 6)}, "from 0 to 5"),
        ({"documents": ()}, "0 first"),
    ],
)
def test_a_wrong_segment_is_refused(fields, message):
    good = {"id": "a", "kind": "prose", "context_len": 3, "score_len": 2, "tokens": tokens(6)}
    Segment(**good)
    with pytest.raises(UserError, match=message):
        Segment(**{**good, **fields})


def test_the_hash_is_over_ids_and_layout_only():
    segment = make_segment("a", documents=(0, 5))
    ids = hashlib.sha256(segment.tokens.astype("<i4").tobytes()).hexdigest()
    layout = [{**segment.to_dict(), "tokens": ids}]
    canonical = json.dumps(layout, sort_keys=True, separators=(",", ":"))
    expected = hashlib.sha256(canonical.encode()).hexdigest()
    assert corpus_sha256([segment]) == expected
    assert Corpus.build("x", [segment]).sha256 == Corpus.build("y", [segment], "f" * 64).sha256


def test_the_hash_changes_with_everything_that_matters():
    first, second = make_segment("a", seed=1), make_segment("b", seed=2)
    changed = first.tokens.copy()
    changed[-1] += 1
    hashes = [
        corpus_sha256(segments)
        for segments in (
            [first, second],
            [second, first],
            [first],
            [Segment("c", "prose", 8, 4, first.tokens), second],
            [Segment("a", "code", 8, 4, first.tokens), second],
            [Segment("a", "prose", 7, 5, first.tokens), second],
            [Segment("a", "prose", 8, 4, first.tokens, (0, 3)), second],
            [Segment("a", "prose", 8, 4, changed), second],
        )
    ]
    assert len(set(hashes)) == len(hashes)


def test_a_corpus_refuses_repetitions_and_emptiness():
    with pytest.raises(UserError, match="has no segments"):
        Corpus.build("x", [])
    with pytest.raises(UserError, match="id 'a' occurs twice"):
        Corpus.build("x", [make_segment("a", seed=1), make_segment("a", seed=2)])
    with pytest.raises(UserError, match="'a' and 'b' hold the same tokens"):
        Corpus.build("x", [make_segment("a"), make_segment("b")])


def test_vocabulary_check_names_the_place():
    corpus = make_corpus(vocab_size=100)
    largest = max(int(segment.tokens.max()) for segment in corpus.segments)
    corpus.check_vocabulary(largest + 1)
    with pytest.raises(UserError, match=f"token id {largest} at index") as caught:
        corpus.check_vocabulary(largest)
    assert f"below {largest}" in str(caught.value)


def test_strata_are_ordered_by_kind_and_depth():
    parts = [("a", "prose", 16), ("b", "code", 8), ("c", "prose", 8), ("d", "prose", 16)]
    segments = [
        make_segment(id, kind, context_len, seed=seed)
        for seed, (id, kind, context_len) in enumerate(parts)
    ]
    strata = Corpus.build("x", segments).strata()
    assert list(strata) == [("code", 8), ("prose", 8), ("prose", 16)]
    assert [segment.id for segment in strata["prose", 16]] == ["a", "d"]

"""Sampling: prompts are kept, the rest is the model's own, and the seed decides."""

from __future__ import annotations

import numpy as np

from kernjax.demo.corpora import SCORE_LEN, pack, plan_lengths
from kernjax.scoring.sampling import sample_segments
from kernjax.texts import Prompt


def prompts(*lengths):
    rng = np.random.default_rng(0)
    return [
        Prompt(f"p{i}", "prose", rng.integers(0, 64, length).astype(np.int32))
        for i, length in enumerate(lengths)
    ]


def sample(instrument, asked, **options):
    return sample_segments(instrument.model, asked, context_len=12, score_len=4, **options)


def test_prompts_are_kept_and_continued(instrument):
    asked = prompts(1, 5, 12)
    segments = sample(instrument, asked, seed=1)
    for prompt, segment in zip(asked, segments, strict=True):
        assert (segment.id, segment.kind, segment.length) == (prompt.id, "prose", 17)
        np.testing.assert_array_equal(segment.tokens[: len(prompt.ids)], prompt.ids)
    again = sample(instrument, asked, seed=1, batch_size=2)
    other = sample(instrument, asked, seed=2)
    assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(segments, again, strict=True))
    assert any(not np.array_equal(a.tokens, b.tokens) for a, b in zip(segments, other, strict=True))


def test_greedy_is_the_most_likely_token(instrument):
    """What temperature 0 draws is the top-1 of a recording of the same tokens."""
    from kernjax.precision import parse_policy
    from kernjax.scoring.batch import RowPlan
    from kernjax.scoring.producer import JaxProducer

    (segment,) = sample(instrument, prompts(4), temperature=0.0)
    producer = JaxProducer(instrument.model, parse_policy("f32"))
    (rows,) = producer.score(segment.tokens[None], 4, [RowPlan(np.asarray([3], np.int32))])
    np.testing.assert_array_equal(rows["top1_ids"], segment.tokens[4:])


def test_segments_are_packed_from_whole_documents():
    for context_len in (512, 2048, 8192, 16384):
        lengths = plan_lengths(context_len)
        documents = (np.full(2000, number, np.int32) for number in range(1, 100))
        tokens, starts = pack(documents, lengths, separator=0)
        assert len(tokens) == context_len + SCORE_LEN + 1
        assert starts[0] == 0 and len(starts) == len(lengths)
        assert all(tokens[start - 1] == 0 for start in starts[1:])
        assert len(set(tokens[context_len:])) == 1

"""Positions where a local fault would still be visible are scored, and have a gate."""

from __future__ import annotations

import numpy as np
import pytest

from kernjax.judge.comparison import PREFILL, Comparison, Segment
from kernjax.judge.summaries import row_groups
from kernjax.scoring.positions import prefill_positions


@pytest.mark.parametrize("context_len", [512, 2048, 8192, 16384])
def test_where_a_lost_state_shows(context_len):
    """The sequence's start, chunk edges, and the window edges of quarters of the prompt."""
    positions = set(prefill_positions(context_len, 2048, (0, 300)).tolist())
    edges = [0, 64, 300, *range(context_len // 4, context_len, context_len // 4)]
    edges += range(2048, context_len, 2048)
    for edge in edges:
        assert {edge, edge + 1, edge + 3} <= positions
    assert context_len - 1 in positions and max(positions) < context_len


@pytest.mark.parametrize("context_len", [1, 3, 40, 64, 65, 100, 5000])
def test_any_length_has_few_rows_in_order(context_len):
    positions = prefill_positions(context_len, 64, (0,))
    assert positions.dtype == np.int32 and np.all(np.diff(positions) > 0)
    assert positions[-1] == context_len - 1
    inner = prefill_positions(context_len, 10**6, (0,))
    assert len(inner) <= 3 * 11 + 1


def test_the_prompts_first_tokens_belong_to_the_document_gate():
    pos = prefill_positions(512, 256, (0, 150))
    count = len(pos)
    blank = np.zeros(count)
    comparison = Comparison(
        segments=(Segment("a", "prose", 512, 8, (0, 150)),),
        segment=np.zeros(count, np.int64),
        pos=pos.astype(np.int64),
        phase=np.full(count, PREFILL, np.uint8),
        kl=blank, self_kl=np.full(count, np.nan),
        flipped=blank > 0, tie_flipped=blank > 0, margin=blank, margin_change=blank,
        tail_mass=blank, tail_change=blank, finite=np.ones(count, bool),
        reference_target=blank, candidate_target=blank,
        reference_manifest={"prefill_window": 256},
    )  # fmt: skip
    groups = {name: set(pos[rows].tolist()) for name, rows in row_groups(comparison, 1).items()}
    assert groups["edge_document"] == {0, 1, 3, 150, 151, 153}
    assert groups["edge_window"] == {256, 257, 259}
    assert groups["last"] == {511}
    assert groups["edge_chunk"] == set(pos.tolist()) - {511} - (
        groups["edge_document"] | groups["edge_window"]
    )

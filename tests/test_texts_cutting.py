"""Cutting: no overlap, no invention, spread over the texts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernjax.base.errors import UserError
from kernjax.texts import Cut, Group, cut_segments


def numbered(sizes_by_group: list[list[int]]) -> list[Group]:
    """Groups whose tokens are all different, so that every token tells where it is from."""
    groups, start = [], 0
    for index, sizes in enumerate(sizes_by_group):
        documents = []
        for size in sizes:
            documents.append(np.arange(start, start + size, dtype=np.int32))
            start += size
        groups.append(Group(f"g{index}", documents))
    return groups


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=5), min_size=1, max_size=4),
    wanted=st.lists(
        st.tuples(st.integers(1, 25), st.integers(0, 5), st.integers(1, 4)), min_size=1, max_size=4
    ),
)
def test_segments_are_real_stretches_that_do_not_overlap(sizes, wanted):
    groups = numbered(sizes)
    # Different depths, as ids are made of kind and depth.
    cuts = [Cut("prose", *cut) for cut in {cut[0]: cut for cut in wanted}.values()]
    try:
        segments = cut_segments(cuts, {"prose": groups})
    except UserError:
        largest = max(cut.length for cut in cuts)
        total = sum(cut.length * cut.count for cut in cuts)
        # A refusal is right when there is too little; pieces of several groups may not fit either.
        room = sum(group.size // largest for group in groups)
        assert room < sum(cut.count for cut in cuts)
        assert any(group.size < total for group in groups)
        return
    assert [(s.kind, s.context_len) for s in segments] == [
        ("prose", cut.context_len) for cut in cuts for _ in range(cut.count)
    ]
    used = np.concatenate([segment.tokens for segment in segments])
    assert len(np.unique(used)) == len(used)
    firsts = {int(document[0]) for group in groups for document in group.documents if len(document)}
    ends = [sum(group.size for group in groups[: i + 1]) for i in range(len(groups))]
    for segment in segments:
        assert (np.diff(segment.tokens) == 1).all()
        assert sum(segment.tokens[0] < end for end in ends) == sum(
            segment.tokens[-1] < end for end in ends
        )
        inner = {i for i in range(1, segment.length) if int(segment.tokens[i]) in firsts}
        assert set(segment.documents) == {0} | inner


def test_one_depth_comes_from_different_groups_the_longest_first():
    groups = numbered([[1000], [1000], [1000]])
    segments = cut_segments([Cut("code", 9, 0, 3), Cut("code", 99, 0, 3)], {"code": groups})
    for depth in (9, 99):
        homes = [int(s.tokens[0]) // 1000 for s in segments if s.context_len == depth]
        assert sorted(homes) == [0, 1, 2]


def test_segments_are_spread_and_start_where_a_document_does():
    single = cut_segments([Cut("prose", 9, 0, 3)], {"prose": numbered([[130]])})
    # Three times ten tokens of 130: four gaps of 25.
    assert [int(segment.tokens[0]) for segment in single] == [25, 60, 95]
    files = cut_segments([Cut("prose", 9, 0, 3)], {"prose": numbered([[20, 30, 40, 40]])})
    assert [int(segment.tokens[0]) for segment in files] == [20, 50, 90]


def test_kinds_do_not_mix():
    texts = {"prose": numbered([[50]]), "code": [Group("c", [np.full(50, 7, np.int32)])]}
    segments = cut_segments([Cut("prose", 9, 0, 1), Cut("code", 9, 0, 1)], texts)
    assert [segment.id for segment in segments] == ["prose-9-00", "code-9-00"]
    assert set(segments[1].tokens.tolist()) == {7} != set(segments[0].tokens.tolist())


@pytest.mark.parametrize("kind", ["prose", "code"])
def test_too_little_text_says_how_much_there_is(kind):
    with pytest.raises(UserError) as caught:
        cut_segments([Cut(kind, 99, 0, 3)], {"prose": numbered([[150], [140]])})
    size = "290 tokens in 2 groups (largest 150)" if kind == "prose" else "0 tokens in 0 groups"
    assert size in str(caught.value)
    assert "3 separate segments of together 300 tokens, the longest of 100" in str(caught.value)

"""Cuts segments out of documents: each from its own place, spread over what there is."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence

import numpy as np

from kernjax.base.errors import UserError
from kernjax.texts.segments import Segment


@dataclasses.dataclass(frozen=True)
class Cut:
    """`count` segments of one kind and depth."""

    kind: str
    context_len: int
    score_len: int
    count: int

    @property
    def length(self) -> int:
        """Tokens of one segment."""
        return self.context_len + self.score_len + 1


@dataclasses.dataclass
class Group:
    """Documents that belong together (a book, a repository), as token ids, in order."""

    name: str
    documents: Sequence[np.ndarray]

    @property
    def size(self) -> int:
        """Tokens held."""
        return sum(len(document) for document in self.documents)


def cut_segments(cuts: Sequence[Cut], groups: dict[str, list[Group]]) -> list[Segment]:
    """Segments of every cut, from the groups of its kind, in the order of `cuts`.

    Segments do not overlap. Longest first, each goes to the group that has given fewest so far
    (then to the one with most left), so that one depth is drawn from different texts. Inside a
    group they are spread evenly, the gaps between them equal; where a document starts in the gap
    at most the segment's length before it, the segment starts there. Raises UserError when a kind
    has too little text.
    """
    chosen: dict[tuple[int, int], tuple[str, int]] = {}  # (cut, number) -> (kind, group)
    for kind in dict.fromkeys(cut.kind for cut in cuts):
        available = groups.get(kind, [])
        wanted = [
            (cut.length, index, number)
            for index, cut in enumerate(cuts)
            if cut.kind == kind
            for number in range(cut.count)
        ]
        left = [group.size for group in available]
        given = [0] * len(available)
        for length, index, number in sorted(wanted, key=lambda item: (-item[0], item[1:])):
            fitting = [g for g in range(len(available)) if left[g] >= length]
            if not fitting:
                raise UserError(
                    f"The {kind} texts hold {sum(group.size for group in available):,} tokens in "
                    f"{len(available)} groups (largest {max(map(_size, available), default=0):,}).",
                    f"Expected room for {len(wanted)} separate segments of together "
                    f"{sum(item[0] for item in wanted):,} tokens, the longest of "
                    f"{max(wanted)[0]:,}.",
                    "Use longer texts, or fewer or shorter segments.",
                )
            group = min(fitting, key=lambda g: (given[g], -left[g], g))
            given[group] += 1
            left[group] -= length
            chosen[index, number] = (kind, group)
    return _place(cuts, groups, chosen)


def _place(
    cuts: Sequence[Cut],
    groups: dict[str, list[Group]],
    chosen: dict[tuple[int, int], tuple[str, int]],
) -> list[Segment]:
    segments = {}
    for kind, group_index in sorted(set(chosen.values())):
        documents = [document for document in groups[kind][group_index].documents if len(document)]
        tokens = np.concatenate(documents)
        starts = np.cumsum([0, *map(len, documents)])[:-1].tolist()
        members = [key for key in sorted(chosen) if chosen[key] == (kind, group_index)]
        gap = (len(tokens) - sum(cuts[index].length for index, _ in members)) // (len(members) + 1)
        even, previous_end = gap, 0
        for index, number in members:
            cut = cuts[index]
            document = starts[bisect.bisect_right(starts, even) - 1]
            near = document >= previous_end and even - document <= cut.length
            begin = document if near else even
            end = begin + cut.length
            segments[index, number] = Segment(
                id=f"{kind}-{cut.context_len}-{number:02d}",
                kind=kind,
                context_len=cut.context_len,
                score_len=cut.score_len,
                tokens=tokens[begin:end],
                documents=(0, *(start - begin for start in starts if begin < start < end)),
            )
            even, previous_end = even + cut.length + gap, end
    return [segments[key] for key in sorted(segments)]


def _size(group: Group) -> int:
    return group.size

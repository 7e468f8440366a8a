"""How one layer's parameter lies inside its HF tensor, as NumPy views in both directions.

A layout knows the HF shape of a parameter, where any rectangle of it lies in the file, as bands of
rows, and how to write it back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

Shape = tuple[int, ...]
Index = tuple[slice, ...]  # with explicit bounds and no step
Band = tuple[Index, Index]


class Layout(Protocol):
    def hf_shape(self, shape: Shape) -> Shape:
        """The HF tensor's shape for a parameter of `shape` (one layer's, unstacked)."""
        ...

    def bands(self, index: Index, step: int) -> Iterator[Band]:
        """(i, r), that make up parameter[index]: its part i is turn(hf[r]).

        Of rows that follow one another in the file, cut at multiples of `step`.
        """
        ...

    def turn(self, block: np.ndarray) -> np.ndarray:
        """A band of the HF tensor with the parameter's own axes: a view."""
        ...

    def write(self, hf: np.ndarray, value: np.ndarray) -> None:
        """Puts the whole parameter into its place in the HF tensor."""
        ...


def _from_zero(index: Index) -> Index:
    return tuple(slice(0, part.stop - part.start) for part in index)


def _cut(rows: slice, step: int, offset: int = 0) -> Iterator[tuple[slice, slice]]:
    """(some of `rows`, counted from the first; the same, counted from `offset`)."""
    start = rows.start
    while start < rows.stop:
        stop = min(((start + offset) // step + 1) * step - offset, rows.stop)
        yield slice(start - rows.start, stop - rows.start), slice(start + offset, stop + offset)
        start = stop


def _grouped(
    rows: slice, size: int, step: int, group: int, offset: int
) -> Iterator[tuple[slice, slice]]:
    """As `_cut`, where every `size` rows lie `group` apart in the file, the first at `offset`."""
    for number in range(rows.start // size, -(-rows.stop // size)):
        first = number * size
        inside = slice(max(rows.start, first), min(rows.stop, first + size))
        for there, row in _cut(inside, step, number * (group - size) + offset):
            shift = inside.start - rows.start
            yield slice(there.start + shift, there.stop + shift), row


@dataclass(frozen=True)
class AsIs:
    """Vectors, and the embedding table [vocab, D]."""

    def hf_shape(self, shape: Shape) -> Shape:
        return shape

    def bands(self, index: Index, step: int) -> Iterator[Band]:
        rows, *rest = index
        for inside, band in _cut(rows, step):
            yield (inside, *_from_zero(tuple(rest))), (band, *rest)

    def turn(self, block: np.ndarray) -> np.ndarray:
        return block

    def write(self, hf: np.ndarray, value: np.ndarray) -> None:
        hf[...] = value


@dataclass(frozen=True)
class Transposed:
    """torch.nn.Linear: [out, in] for our [in, out]."""

    def hf_shape(self, shape: Shape) -> Shape:
        return shape[::-1]

    def bands(self, index: Index, step: int) -> Iterator[Band]:
        columns, rows = index
        for inside, band in _cut(rows, step):
            yield (*_from_zero((columns,)), inside), (band, columns)

    def turn(self, block: np.ndarray) -> np.ndarray:
        return block.T

    def write(self, hf: np.ndarray, value: np.ndarray) -> None:
        hf.T[...] = value


@dataclass(frozen=True)
class Row:
    """A Linear with one output, [1, in], for our vector [in]."""

    def hf_shape(self, shape: Shape) -> Shape:
        return (1, *shape)

    def bands(self, index: Index, step: int) -> Iterator[Band]:
        yield _from_zero(index), (slice(0, 1), *index)

    def turn(self, block: np.ndarray) -> np.ndarray:
        return block[0]

    def write(self, hf: np.ndarray, value: np.ndarray) -> None:
        hf[0] = value


@dataclass(frozen=True)
class PerHead:
    """A number a head, with axes for what it multiplies, [1, 1, heads, 1]: ours is [heads]."""

    def hf_shape(self, shape: Shape) -> Shape:
        return (1, 1, *shape, 1)

    def bands(self, index: Index, step: int) -> Iterator[Band]:
        yield _from_zero(index), (slice(0, 1), slice(0, 1), *index, slice(0, 1))

    def turn(self, block: np.ndarray) -> np.ndarray:
        return block[0, 0, :, 0]

    def write(self, hf: np.ndarray, value: np.ndarray) -> None:
        hf[0, 0, :, 0] = value


@dataclass(frozen=True)
class Depthwise:
    """torch.nn.Conv1d with groups = channels: [C, 1, taps] for our [C, taps]."""

    def hf_shape(self, shape: Shape) -> Shape:
        return (shape[0], 1, shape[1])

    def bands(self, index: Index, step: int) -> Iterator[Band]:
        rows, taps = index
        for inside, band in _cut(rows, step):
            yield (inside, *_from_zero((taps,))), (band, slice(0, 1), taps)

    def turn(self, block: np.ndarray) -> np.ndarray:
        return block[:, 0]

    def write(self, hf: np.ndarray, value: np.ndarray) -> None:
        hf[:, 0] = value


@dataclass(frozen=True)
class HeadPart:
    """Every other block of `head_dim` rows of a Linear: `part` 0 the queries, 1 their gates.

    q_proj is [N * 2 * H, D] with H query rows, then H gate rows, per head; ours is [D, N * H].
    """

    part: int
    head_dim: int

    def hf_shape(self, shape: Shape) -> Shape:
        width, rows = shape
        return (2 * rows, width)

    def _heads(self, hf: np.ndarray) -> np.ndarray:
        """[N, H, D], a view."""
        heads = hf.shape[0] // (2 * self.head_dim)
        return hf.reshape(heads, 2, self.head_dim, hf.shape[1])[:, self.part]

    def bands(self, index: Index, step: int) -> Iterator[Band]:
        columns, rows = index
        size = self.head_dim
        for inside, band in _grouped(rows, size, step, 2 * size, self.part * size):
            yield (*_from_zero((columns,)), inside), (band, columns)

    def turn(self, block: np.ndarray) -> np.ndarray:
        return block.T

    def write(self, hf: np.ndarray, value: np.ndarray) -> None:
        heads = self._heads(hf)
        heads[...] = value.T.reshape(heads.shape)


@dataclass(frozen=True)
class Interleaved:
    """Rows of a Linear in `groups` of `size`, of which some belong to the parameter.

    A group is a key head with all that goes with it. `spans` are the parameter's (offset, width)
    within a group; its columns are those of the first span, of all groups, then of the next.
    """

    groups: int
    size: int
    spans: tuple[tuple[int, int], ...]

    def hf_shape(self, shape: Shape) -> Shape:
        return (self.groups * self.size, shape[0])

    def bands(self, index: Index, step: int) -> Iterator[Band]:
        columns, rows = index
        start = 0
        for offset, width in self.spans:
            stop = start + self.groups * width
            span = slice(max(rows.start, start) - start, min(rows.stop, stop) - start)
            shift = start - rows.start + span.start
            for inside, band in _grouped(span, width, step, self.size, offset):
                moved = slice(inside.start + shift, inside.stop + shift)
                yield (*_from_zero((columns,)), moved), (band, columns)
            start = stop

    def turn(self, block: np.ndarray) -> np.ndarray:
        return block.T

    def write(self, hf: np.ndarray, value: np.ndarray) -> None:
        for start, span in self._spans(hf):
            span[...] = value.T[start : start + span.shape[0] * span.shape[1]].reshape(span.shape)

    def _spans(self, hf: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """The first column of the parameter that a span has, and its rows [groups, width, in]."""
        start = 0
        for offset, width in self.spans:
            by_group = hf.reshape(self.groups, self.size, hf.shape[1])
            yield start, by_group[:, offset : offset + width]
            start += self.groups * width


@dataclass(frozen=True)
class ExpertRows:
    """One stack of Linears, [E, rows, in]: ours, [E, in, out], are rows from `start` of each."""

    start: int
    rows: int

    def hf_shape(self, shape: Shape) -> Shape:
        return (shape[0], self.rows, shape[1])

    def bands(self, index: Index, step: int) -> Iterator[Band]:
        experts, columns, rows = index
        for expert in range(experts.start, experts.stop):
            at, one = expert - experts.start, slice(expert, expert + 1)
            for inside, band in _cut(rows, step, self.start):
                yield (slice(at, at + 1), *_from_zero((columns,)), inside), (one, band, columns)

    def turn(self, block: np.ndarray) -> np.ndarray:
        return block.transpose(0, 2, 1)

    def write(self, hf: np.ndarray, value: np.ndarray) -> None:
        hf[:, self.start : self.start + value.shape[2]] = value.transpose(0, 2, 1)

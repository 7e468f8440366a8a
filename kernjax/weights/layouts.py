"""How one layer's parameter lies inside its HF tensor, as NumPy views in both directions.

A layout knows the HF shape of a parameter, reads any rectangle of it from the mapped file, and
writes it back. Reading returns views where it can (nothing is read from disk until it is copied),
in whatever memory order the file has: jax transposes on transfer six times faster than NumPy does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

Shape = tuple[int, ...]
Index = tuple[slice, ...]


class Layout(Protocol):
    def hf_shape(self, shape: Shape) -> Shape:
        """The HF tensor's shape for a parameter of `shape` (one layer's, unstacked)."""
        ...

    def region(self, index: Index) -> tuple[Index, Index]:
        """(r, i) such that parameter[index] is take(hf[r], i): what has to be decoded to read it.

        Slices have explicit bounds and no step.
        """
        ...

    def take(self, block: np.ndarray, inside: Index) -> np.ndarray:
        """Of a region of the HF tensor what was asked for, in the parameter's own order of axes."""
        ...

    def write(self, hf: np.ndarray, value: np.ndarray) -> None:
        """Puts the whole parameter into its place in the HF tensor."""
        ...


def read(layout: Layout, hf: np.ndarray, index: Index) -> np.ndarray:
    """parameter[index] out of the whole HF tensor."""
    region, inside = layout.region(index)
    return layout.take(hf[region], inside)


def _from_zero(index: Index) -> Index:
    return tuple(slice(0, part.stop - part.start) for part in index)


@dataclass(frozen=True)
class AsIs:
    """Vectors, and the embedding table [vocab, D]."""

    def hf_shape(self, shape: Shape) -> Shape:
        return shape

    def take(self, block: np.ndarray, inside: Index) -> np.ndarray:
        return block[inside]

    def region(self, index: Index) -> tuple[Index, Index]:
        return index, _from_zero(index)

    def write(self, hf: np.ndarray, value: np.ndarray) -> None:
        hf[...] = value


@dataclass(frozen=True)
class Transposed:
    """torch.nn.Linear: [out, in] for our [in, out]."""

    def hf_shape(self, shape: Shape) -> Shape:
        return shape[::-1]

    def take(self, block: np.ndarray, inside: Index) -> np.ndarray:
        return block.T[inside]

    def region(self, index: Index) -> tuple[Index, Index]:
        return index[::-1], _from_zero(index)

    def write(self, hf: np.ndarray, value: np.ndarray) -> None:
        hf.T[...] = value


@dataclass(frozen=True)
class Row:
    """A Linear with one output, [1, in], for our vector [in]."""

    def hf_shape(self, shape: Shape) -> Shape:
        return (1, *shape)

    def take(self, block: np.ndarray, inside: Index) -> np.ndarray:
        return block[0][inside]

    def region(self, index: Index) -> tuple[Index, Index]:
        return (slice(0, 1), *index), _from_zero(index)

    def write(self, hf: np.ndarray, value: np.ndarray) -> None:
        hf[0] = value


@dataclass(frozen=True)
class PerHead:
    """A number a head, with axes for what it multiplies, [1, 1, heads, 1]: ours is [heads]."""

    def hf_shape(self, shape: Shape) -> Shape:
        return (1, 1, *shape, 1)

    def take(self, block: np.ndarray, inside: Index) -> np.ndarray:
        return block[0, 0, :, 0][inside]

    def region(self, index: Index) -> tuple[Index, Index]:
        one = slice(0, 1)
        return (one, one, *index, one), _from_zero(index)

    def write(self, hf: np.ndarray, value: np.ndarray) -> None:
        hf[0, 0, :, 0] = value


@dataclass(frozen=True)
class Depthwise:
    """torch.nn.Conv1d with groups = channels: [C, 1, taps] for our [C, taps]."""

    def hf_shape(self, shape: Shape) -> Shape:
        return (shape[0], 1, shape[1])

    def take(self, block: np.ndarray, inside: Index) -> np.ndarray:
        return block[:, 0][inside]

    def region(self, index: Index) -> tuple[Index, Index]:
        return (index[0], slice(0, 1), index[1]), _from_zero(index)

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

    def _span(self, rows: slice) -> tuple[int, int]:
        """The first head that the parameter's `rows` touch, and the one after the last."""
        return rows.start // self.head_dim, -(-rows.stop // self.head_dim)

    def take(self, block: np.ndarray, inside: Index) -> np.ndarray:
        columns, rows = inside
        heads = self._heads(block)[:, :, columns]
        flat = heads.reshape(len(heads) * self.head_dim, heads.shape[-1])
        return flat[rows].T

    def region(self, index: Index) -> tuple[Index, Index]:
        """Both parts of the heads: they alternate, and a device that holds one holds the other."""
        columns, rows = index
        first, last = self._span(rows)
        offset = first * self.head_dim
        inside = slice(rows.start - offset, rows.stop - offset)
        whole = slice(2 * offset, 2 * last * self.head_dim)
        return (whole, columns), (_from_zero((columns,))[0], inside)

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

    def region(self, index: Index) -> tuple[Index, Index]:
        """All groups: spans are far apart in the parameter, and a device needs some of each."""
        columns, rows = index
        return (slice(0, self.groups * self.size), columns), (_from_zero((columns,))[0], rows)

    def take(self, block: np.ndarray, inside: Index) -> np.ndarray:
        columns, rows = inside
        pieces = []
        for start, span in self._spans(block[:, columns]):
            flat = span.reshape(span.shape[0] * span.shape[1], span.shape[2])
            pieces.append(flat[max(0, rows.start - start) : max(0, rows.stop - start)])
        return np.concatenate(pieces).T

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

    def region(self, index: Index) -> tuple[Index, Index]:
        experts, columns, rows = index
        moved = slice(self.start + rows.start, self.start + rows.stop)
        return (experts, moved, columns), _from_zero(index)

    def take(self, block: np.ndarray, inside: Index) -> np.ndarray:
        return block.transpose(0, 2, 1)[inside]

    def write(self, hf: np.ndarray, value: np.ndarray) -> None:
        hf[:, self.start : self.start + value.shape[2]] = value.transpose(0, 2, 1)

"""How one layer's parameter lies inside its HF tensor, as NumPy views in both directions.

A layout knows the HF shape of a parameter, reads any rectangle of it from the mapped file, and
writes it back. Reading returns views where it can (nothing is read from disk until it is copied),
in whatever memory order the file has: jax transposes on transfer six times faster than NumPy does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

Shape = tuple[int, ...]
Index = tuple[slice, ...]


class Layout(Protocol):
    def hf_shape(self, shape: Shape) -> Shape:
        """The HF tensor's shape for a parameter of `shape` (one layer's, unstacked)."""
        ...

    def read(self, hf: np.ndarray, index: Index) -> np.ndarray:
        """parameter[index] out of the HF tensor; slices have explicit bounds and no step."""
        ...

    def region(self, index: Index) -> tuple[Index, Index]:
        """(r, i) such that read(hf, index) is read(hf[r], i): what has to be decoded to read it."""
        ...

    def write(self, hf: np.ndarray, value: np.ndarray) -> None:
        """Puts the whole parameter into its place in the HF tensor."""
        ...


def _from_zero(index: Index) -> Index:
    return tuple(slice(0, part.stop - part.start) for part in index)


@dataclass(frozen=True)
class AsIs:
    """Vectors, and the embedding table [vocab, D]."""

    def hf_shape(self, shape: Shape) -> Shape:
        return shape

    def read(self, hf: np.ndarray, index: Index) -> np.ndarray:
        return hf[index]

    def region(self, index: Index) -> tuple[Index, Index]:
        return index, _from_zero(index)

    def write(self, hf: np.ndarray, value: np.ndarray) -> None:
        hf[...] = value


@dataclass(frozen=True)
class Transposed:
    """torch.nn.Linear: [out, in] for our [in, out]."""

    def hf_shape(self, shape: Shape) -> Shape:
        return shape[::-1]

    def read(self, hf: np.ndarray, index: Index) -> np.ndarray:
        return hf.T[index]

    def region(self, index: Index) -> tuple[Index, Index]:
        return index[::-1], _from_zero(index)

    def write(self, hf: np.ndarray, value: np.ndarray) -> None:
        hf.T[...] = value


@dataclass(frozen=True)
class Depthwise:
    """torch.nn.Conv1d with groups = channels: [C, 1, taps] for our [C, taps]."""

    def hf_shape(self, shape: Shape) -> Shape:
        return (shape[0], 1, shape[1])

    def read(self, hf: np.ndarray, index: Index) -> np.ndarray:
        return hf[:, 0][index]

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

    def read(self, hf: np.ndarray, index: Index) -> np.ndarray:
        columns, rows = index
        first, last = self._span(rows)
        block = self._heads(hf)[first:last, :, columns]
        block = block.reshape((last - first) * self.head_dim, block.shape[-1])
        offset = first * self.head_dim
        block = block[rows.start - offset : rows.stop - offset]
        return block.T

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

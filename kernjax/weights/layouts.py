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

    def write(self, hf: np.ndarray, value: np.ndarray) -> None:
        """Puts the whole parameter into its place in the HF tensor."""
        ...


@dataclass(frozen=True)
class AsIs:
    """Vectors, and the embedding table [vocab, D]."""

    def hf_shape(self, shape: Shape) -> Shape:
        return shape

    def read(self, hf: np.ndarray, index: Index) -> np.ndarray:
        return hf[index]

    def write(self, hf: np.ndarray, value: np.ndarray) -> None:
        hf[...] = value


@dataclass(frozen=True)
class Transposed:
    """torch.nn.Linear: [out, in] for our [in, out]."""

    def hf_shape(self, shape: Shape) -> Shape:
        return shape[::-1]

    def read(self, hf: np.ndarray, index: Index) -> np.ndarray:
        return hf.T[index]

    def write(self, hf: np.ndarray, value: np.ndarray) -> None:
        hf.T[...] = value


@dataclass(frozen=True)
class Depthwise:
    """torch.nn.Conv1d with groups = channels: [C, 1, taps] for our [C, taps]."""

    def hf_shape(self, shape: Shape) -> Shape:
        return (shape[0], 1, shape[1])

    def read(self, hf: np.ndarray, index: Index) -> np.ndarray:
        return hf[:, 0][index]

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
        return hf.reshape(-1, 2, self.head_dim, hf.shape[1])[:, self.part]

    def read(self, hf: np.ndarray, index: Index) -> np.ndarray:
        columns, rows = index
        first = rows.start // self.head_dim
        last = -(-rows.stop // self.head_dim)
        block = self._heads(hf)[first:last, :, columns]
        block = block.reshape((last - first) * self.head_dim, block.shape[-1])
        offset = first * self.head_dim
        block = block[rows.start - offset : rows.stop - offset]
        return block.T

    def write(self, hf: np.ndarray, value: np.ndarray) -> None:
        heads = self._heads(hf)
        heads[...] = value.T.reshape(heads.shape)

"""Where a weight's numbers come from: one tensor as it is, or quantised codes with their scales.

Both are read by rectangles of the parameter, so that a process touches only the pages, and decodes
only the blocks, of what its devices hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kernjax.weights.layouts import Index, Layout
from kernjax.weights.quantisation import Scheme
from kernjax.weights.safetensors_files import READABLE, TensorEntry


class Source(Protocol):
    """One HF weight of `shape`, by whatever tensors it is stored in."""

    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        ...

    @property
    def value_dtype(self) -> np.dtype:
        """The smallest of bfloat16, float16 and float32 that holds its values."""
        ...

    def tensors(self) -> Mapping[str, TensorEntry]:
        """What it is stored in, by what follows its name in theirs."""
        ...

    def read(self, layout: Layout, index: Index, dtype: np.dtype) -> np.ndarray:
        """parameter[index] in `dtype`: memory of its own, in the file's order where it can be."""
        ...


@dataclass(frozen=True)
class Plain:
    """A tensor in BF16, F16 or F32."""

    tensor: TensorEntry

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    @property
    def value_dtype(self) -> np.dtype:
        return READABLE[self.tensor.dtype]

    def tensors(self) -> Mapping[str, TensorEntry]:
        return {"": self.tensor}

    def read(self, layout: Layout, index: Index, dtype: np.dtype) -> np.ndarray:
        # A copy: jax on a CPU would alias the mapped file.
        return np.array(layout.read(self.tensor.array(), index), dtype=dtype, order="K")


@dataclass(frozen=True)
class Quantised:
    """A matrix [R, C] as codes and scales."""

    scheme: Scheme
    shape: tuple[int, int]
    codes: TensorEntry
    scales: TensorEntry

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    @property
    def value_dtype(self) -> np.dtype:
        return self.scheme.value_dtype

    def tensors(self) -> Mapping[str, TensorEntry]:
        return {self.scheme.codes: self.codes, self.scheme.scales: self.scales}

    def read(self, layout: Layout, index: Index, dtype: np.dtype) -> np.ndarray:
        (rows, columns), inside = layout.region(index)
        block = np.empty((rows.stop - rows.start, columns.stop - columns.start), dtype)
        # Some rows at a time: float32 values of the whole would be twice the block.
        step, at = self.scheme.rows_at_once, rows.start
        while at < rows.stop:
            stop = min((at // step + 1) * step, rows.stop)
            values = self.scheme.decode(self.codes, self.scales, slice(at, stop), columns)
            block[at - rows.start : stop - rows.start] = values
            at = stop
        return layout.read(block, inside)

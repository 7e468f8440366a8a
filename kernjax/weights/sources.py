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

_MAPPED_BYTES = 256 << 20  # of a file, mapped at a time


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
        # Copies: jax on a CPU would alias the mapped file.
        if self.nbytes <= _MAPPED_BYTES:
            return _converted(layout.read(self.tensor.array(), index), dtype)
        # Mapped pages count as the process's own until they are unmapped: some rows at a time.
        region, inside = layout.region(index)
        rows, rest = region[0], region[1:]
        step = max(1, _MAPPED_BYTES * self.shape[0] // self.nbytes)
        block = np.empty([part.stop - part.start for part in region], dtype)
        for at in range(rows.start, rows.stop, step):
            stop = min(at + step, rows.stop)
            values = self.tensor.rows(at, stop).array()[:, *rest]
            block[at - rows.start : stop - rows.start] = _converted(values, dtype)
        return layout.read(block, inside)


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


def _converted(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """A copy in `dtype`, in the same order of memory."""
    if (values.dtype, dtype) != (READABLE["BF16"], np.float32):
        return np.array(values, dtype=dtype, order="K")
    # bfloat16 is the upper half of float32: several times quicker than NumPy's cast of it.
    result = np.empty_like(values, dtype=dtype, order="K")
    np.left_shift(values.view(np.uint16), np.uint32(16), out=result.view(np.uint32))
    return result

"""Where a weight's numbers come from: one tensor as it is, or quantised codes with their scales.

Both are read by rectangles of the parameter, so that a process reads only the pages, and decodes
only the blocks, of what its devices hold; large ones in bands of rows, by several threads: one
alone neither keeps a disk busy nor decodes as fast as it delivers.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from kernjax.weights.layouts import Index, Layout, read
from kernjax.weights.quantisation import Scheme, bytes_of
from kernjax.weights.safetensors_files import READABLE, TensorEntry

# Of a file, in one band: a thread holds it as read, and as values. Smaller tensors are not cut.
_BAND_BYTES = 8 << 20
_THREADS = min(16, os.cpu_count() or 1)


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
        if self.nbytes <= _BAND_BYTES:
            values = read(layout, self.tensor.array(), index)
            result = np.empty_like(values, dtype=dtype, order="K")  # not the mapped file itself
            _convert(values, result)
            return result
        region, inside = layout.region(index)
        rows, rest = region[0], region[1:]
        whole = all(part == slice(0, size) for part, size in zip(rest, self.shape[1:], strict=True))
        block = np.empty(_lengths(region), dtype)

        def fill(start: int, stop: int) -> None:
            band = self.tensor.rows(start, stop)
            part = block[start - rows.start : stop - rows.start]
            if not whole:
                _convert(band.array()[:, *rest], part)
            elif dtype == self.value_dtype:
                band.load(part)
            else:
                values = _scratch(band.nbytes).view(self.value_dtype).reshape(part.shape)
                band.load(values)
                _convert(values, part)

        step = max(1, _BAND_BYTES * self.shape[0] // self.nbytes)
        _by_bands(fill, rows, step)
        return layout.take(block, inside)


@dataclass(frozen=True)
class Quantised:
    """A matrix [R, C], or a stack of them [E, R, C], as codes and scales."""

    scheme: Scheme
    shape: tuple[int, ...]
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
        region, inside = layout.region(index)
        *lead, rows, columns = region
        block = np.empty(_lengths(region), dtype)
        for matrix in range(lead[0].start, lead[0].stop) if lead else [None]:
            out = block if matrix is None else block[matrix - lead[0].start]
            codes, scales = (_matrix(tensor, matrix) for tensor in (self.codes, self.scales))

            def fill(start: int, stop: int, out=out, codes=codes, scales=scales) -> None:
                values = self.scheme.decode(codes, scales, slice(start, stop), columns)
                out[start - rows.start : stop - rows.start] = values

            _by_bands(fill, rows, self.scheme.rows_at_once)
        return layout.take(block, inside)

    def read_codes(self, layout: Layout, index: Index) -> np.ndarray:
        """The codes of parameter[index], whose second axis from the end counts their elements."""
        region, inside = layout.region(index)
        rows, rest = region[0], region[1:]
        codes, block = bytes_of(self.codes), np.empty(_lengths(region), np.uint8)

        def fill(start: int, stop: int) -> None:
            block[start - rows.start : stop - rows.start] = codes[start:stop, *rest]

        _by_bands(fill, rows, max(1, _BAND_BYTES // max(1, codes[0].size)))
        return layout.take(block.view(self.scheme.packed_dtype), inside)

    def read_scales(self, layout: Layout, index: Index, group: int) -> np.ndarray:
        """The scales of parameter[index], whose second axis from the end counts groups of rows.

        `group` divides the file's blocks; what shares a scale there has one each here.
        """
        region, inside = layout.region(index)
        *lead, rows, groups = region
        readable = self.scales.dtype in READABLE
        scales = self.scales.array() if readable else bytes_of(self.scales)
        high, wide = self.scheme.block
        across = np.arange(rows.start, rows.stop) // high
        along = np.arange(groups.start, groups.stop) * group // wide
        return layout.take(scales[tuple(lead)][..., across[:, None], along], inside)


def _lengths(region: Index) -> tuple[int, ...]:
    return tuple(part.stop - part.start for part in region)


def _matrix(tensor: TensorEntry, at: int | None) -> TensorEntry:
    """One of a stack; None: the tensor is no stack."""
    if at is None:
        return tensor
    return replace(tensor.rows(at, at + 1), shape=tensor.shape[1:])


def _by_bands(fill: Callable[[int, int], None], rows: slice, step: int) -> None:
    """fill(start, stop) over `rows`, cut at the multiples of `step`."""
    first = rows.start // step * step
    bands = [
        (max(start, rows.start), min(start + step, rows.stop))
        for start in range(first, rows.stop, step)
    ]
    if len(bands) <= 1:
        for band in bands:
            fill(*band)
        return
    for _ in _threads().map(fill, *zip(*bands, strict=True)):
        pass  # raises what a band raised


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_THREADS, thread_name_prefix="weights")


def _scratch(size: int) -> np.ndarray:
    """uint8 [size] of this thread, used again: fresh memory costs as much as reading into it."""
    buffer = getattr(_local, "buffer", None)
    if buffer is None or len(buffer) < size:
        buffer = _local.buffer = np.empty(max(size, _BAND_BYTES), np.uint8)
    return buffer[:size]


_local = threading.local()


def _convert(values: np.ndarray, out: np.ndarray) -> None:
    """out = values in out's dtype."""
    if (values.dtype, out.dtype) == (READABLE["BF16"], np.float32):
        # bfloat16 is the upper half of float32: several times quicker than NumPy's cast of it.
        np.left_shift(values.view(np.uint16), np.uint32(16), out=out.view(np.uint32))
    else:
        out[...] = values

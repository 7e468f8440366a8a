"""Where a weight's numbers come from: one tensor as it is, or quantised codes with their scales.

Both are read by rectangles of the parameter, in bands of rows, so that a process reads only the
bytes, and decodes only the blocks, of what its devices hold, and that many threads read one tensor:
one alone neither keeps a disk busy nor turns and decodes as fast as it delivers.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import DTypeLike

from kernjax.base.remote import is_staged
from kernjax.weights.layouts import Index, Layout
from kernjax.weights.quantisation import Scheme, bytes_of
from kernjax.weights.safetensors_files import READABLE, TensorEntry

# Of a file, in one band: little enough to stay in a core's cache from the disk to its place. What
# comes over a network is asked for in larger pieces.
_BAND_BYTES = 1 << 20
_FETCHED_BAND_BYTES = 8 << 20

# What is moved at once when rows become columns: 16 bytes, whatever they mean.
_TOGETHER = np.dtype(np.complex128)
# Rows that become columns at a time, where no such number of bytes makes a row.
_TURNED = 32

# Puts values into an array of their shape, in its dtype.
Fill = Callable[[np.ndarray], None]
Band = tuple[Index, Fill]


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

    def bands(self, layout: Layout, index: Index) -> Iterator[Band]:
        """(i, fill) for the parts i that make up parameter[index]; by any threads, in any order."""
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

    def bands(self, layout: Layout, index: Index) -> Iterator[Band]:
        return _bands(self.tensor, self.value_dtype, layout, index)


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

    def bands(self, layout: Layout, index: Index) -> Iterator[Band]:
        step, per_byte = self.scheme.rows_at_once, self.scheme.per_byte

        def fill(region: Index, out: np.ndarray) -> None:
            *lead, rows, columns = region
            held = slice(columns.start // per_byte, -(-columns.stop // per_byte))
            band = _rows(self.codes, (*lead, rows, held), np.uint8)
            scales = self.scales
            if lead:
                scales = replace(scales.rows(lead[0].start, lead[0].stop), shape=scales.shape[1:])
            # Rounded before rows become columns: there is less to move.
            values = np.empty(_lengths(region), out.dtype)
            codes, decoded = band.reshape(band.shape[-2:]), values.reshape(values.shape[-2:])
            for some in _cut_at(rows, step):
                here = slice(some.start - rows.start, some.stop - rows.start)
                decoded[here] = self.scheme.decode(codes[here], scales, some, columns)
            _put(layout.turn(values), out)

        at_once = step * max(1, _rows_at_once(self.codes) // step) if _is_far(self.codes) else step
        for inside, region in layout.bands(index, at_once):
            yield inside, functools.partial(fill, region)

    def code_bands(self, layout: Layout, index: Index) -> Iterator[Band]:
        """The codes of parameter[index], whose second axis from the end counts their elements."""
        return _bands(self.codes, self.scheme.packed_dtype, layout, index)

    def scale_bands(self, layout: Layout, index: Index, group: int) -> Iterator[Band]:
        """The scales of parameter[index], whose second axis from the end counts groups of rows.

        `group` divides the file's blocks; what shares a scale there has one each here.
        """
        high, wide = self.scheme.block

        def fill(region: Index, out: np.ndarray) -> None:
            *lead, rows, groups = region
            readable = self.scales.dtype in READABLE
            scales = self.scales.array() if readable else bytes_of(self.scales)
            across = np.arange(rows.start, rows.stop) // high
            along = np.arange(groups.start, groups.stop) * group // wide
            _put(layout.turn(scales[tuple(lead)][..., across[:, None], along]), out)

        for inside, region in layout.bands(index, self.shape[-2]):
            yield inside, functools.partial(fill, region)


def _bands(tensor: TensorEntry, dtype: np.dtype, layout: Layout, index: Index) -> Iterator[Band]:
    """Of a tensor whose elements are to be taken as `dtype`."""

    def fill(region: Index, out: np.ndarray) -> None:
        _put(layout.turn(_rows(tensor, region, dtype)), out)

    for inside, region in layout.bands(index, _rows_at_once(tensor)):
        yield inside, functools.partial(fill, region)


def _rows(tensor: TensorEntry, region: Index, dtype: DTypeLike) -> np.ndarray:
    """tensor[region]: this thread's scratch, used again by the next call, or the mapped file.

    Rows that are wanted as a whole are read; of others only the pages are that are looked at.
    """
    shape, rest = _lengths(region), region
    while True:
        tensor, rest = tensor.rows(rest[0].start, rest[0].stop), rest[1:]
        if not rest or tensor.shape[0] != 1:
            break
        tensor = replace(tensor, shape=tensor.shape[1:])
    if _lengths(rest) != tensor.shape[1:]:
        mapped = np.asarray(tensor.bytes()).view(dtype).reshape(tensor.shape)
        return mapped[:, *rest].reshape(shape)
    values = _scratch(tensor.nbytes, "read").view(dtype).reshape(shape)
    tensor.load(values)
    return values


def _rows_at_once(tensor: TensorEntry) -> int:
    """Rows of a matrix in a band."""
    row = tensor.nbytes * tensor.shape[-1] // max(1, _size(tensor.shape))
    return max(1, (_FETCHED_BAND_BYTES if _is_far(tensor) else _BAND_BYTES) // max(1, row))


def _is_far(tensor: TensorEntry) -> bool:
    return is_staged(tensor.file)


def _size(shape: tuple[int, ...]) -> int:
    return functools.reduce(lambda left, right: left * right, shape, 1)


def _lengths(region: Index) -> tuple[int, ...]:
    return tuple(part.stop - part.start for part in region)


def _cut_at(rows: slice, step: int) -> Iterator[slice]:
    """`rows`, cut at the multiples of `step`."""
    for start in range(rows.start // step * step, rows.stop, step):
        yield slice(max(start, rows.start), min(start + step, rows.stop))


def _scratch(size: int, use: str) -> np.ndarray:
    """uint8 [size] of this thread, used again: fresh memory costs as much as reading into it."""
    buffers = _local.__dict__
    if len(buffers.get(use, ())) < size:
        buffers[use] = np.empty(max(size, _BAND_BYTES), np.uint8)
    return buffers[use][:size]


_local = threading.local()


def _put(values: np.ndarray, out: np.ndarray) -> None:
    """out = values in out's dtype, rounded once."""
    while values.ndim > 2 and len(values) == 1:
        values, out = values[0], out[0]
    if values.ndim == 2 and values.strides[0] < values.strides[1]:
        _put_turned(values.T, out)
    else:
        _convert(values, out)


def _put_turned(rows: np.ndarray, out: np.ndarray) -> None:
    """out [C, R] = rows [R, C] turned.

    A band's numbers one by one take two to three times as long as this, which moves 16 bytes of a
    row at a time, and then takes them apart within the cache.
    """
    count, size = _TOGETHER.itemsize // rows.itemsize, rows.shape[1]
    if size % count or rows.strides[1] != rows.itemsize:
        for start in range(0, len(rows), _TURNED):
            some = slice(start, start + _TURNED)
            _convert(rows[some].T, out[:, some])
        return
    turned = _scratch(rows.nbytes, "turned").view(_TOGETHER).reshape(size // count, len(rows))
    turned[...] = rows.view(_TOGETHER).T
    parts = turned.view(rows.dtype).reshape(size // count, len(rows), count)
    for number in range(count):
        _convert(parts[:, :, number], out[number::count])


def _convert(values: np.ndarray, out: np.ndarray) -> None:
    """out = values in out's dtype."""
    if values.dtype == out.dtype:
        # As integers: NumPy copies bfloat16 with the interpreter's lock held.
        bits = np.dtype(f"u{out.itemsize}")
        out.view(bits)[...] = values.view(bits)
    elif (values.dtype, out.dtype) == (READABLE["BF16"], np.float32):
        # bfloat16 is the upper half of float32: several times quicker than NumPy's cast of it.
        np.left_shift(values.view(np.uint16), np.uint32(16), out=out.view(np.uint32))
    else:
        out[...] = values

"""A checkpoint's safetensors files, by their headers: what is where, checked before it is read.

Format (huggingface/safetensors): 8 bytes little-endian header length n, n bytes of JSON
`{name: {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__": {...}}`, then the data;
offsets count from the end of the header, and the tensors cover the data without gap or overlap.
A checkpoint is one `model.safetensors`, or shards listed in `model.safetensors.index.json`.

Headers are parsed here and not by the `safetensors` library, whose errors name neither the tensor
nor the file, and because names, shapes and byte ranges are needed before anything is mapped. Each
tensor is read by its own header's dtype: checkpoints of this family mix F32 with BF16.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import ml_dtypes
import numpy as np

from kernjax.base.errors import UserError
from kernjax.base.remote import fetch

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_MAX_HEADER = 100_000_000  # bytes; the library's own limit
_AGAIN = "Download the file again."

# Bits per element of every dtype of the format: also tensors that are skipped are checked.
_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "C64": 64, "BOOL": 8,
    "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F8_E8M0": 8,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip

# What a parameter may be stored as, as it is.
READABLE = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file: dtype as the header spells it, bytes [begin, end) of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin

    def bytes(self) -> np.ndarray:
        """The tensor's bytes, mapped: uint8 [nbytes]; the disk is read when they are touched."""
        if not self.nbytes:
            return np.empty(0, np.uint8)
        fetch(self.file, self.begin, self.end)
        return np.memmap(self.file, np.uint8, "r", offset=self.begin, shape=(self.nbytes,))

    def rows(self, start: int, stop: int) -> TensorEntry:
        """Rows [start, stop) of the first axis, as a tensor of their own."""
        row = self.nbytes // self.shape[0]
        return replace(
            self,
            shape=(stop - start, *self.shape[1:]),
            begin=self.begin + start * row,
            end=self.begin + stop * row,
        )

    def load(self, out: np.ndarray) -> None:
        """Reads the tensor into `out`: contiguous, of its shape and dtype (one of `READABLE`)."""
        fetch(self.file, self.begin, self.end)
        left = memoryview(out.reshape(-1).view(np.uint8))
        with open(self.file, "rb", buffering=0) as file:
            file.seek(self.begin)
            while left:
                count = file.readinto(left)
                if not count:
                    raise OSError(f"{self.file} became shorter while it was read")
                left = left[count:]

    def array(self) -> np.ndarray:
        """The tensor, mapped read-only; its dtype must be one of `READABLE`."""
        return np.asarray(self.bytes()).view(READABLE[self.dtype]).reshape(self.shape)


@dataclass(frozen=True)
class Checkpoint:
    """Every tensor of an HF directory, by name."""

    directory: Path
    tensors: dict[str, TensorEntry]


def open_checkpoint(directory: str | Path) -> Checkpoint:
    """Finds the files and reads and checks every header; no tensor data is read."""
    directory = Path(directory)
    if not directory.is_dir():
        raise UserError(
            f"Model directory {directory} "
            + ("is not a directory." if directory.exists() else "does not exist."),
            f"Expected an HF directory with {SINGLE} or {INDEX}.",
        )
    single, index = directory / SINGLE, directory / INDEX
    if single.exists() and index.exists():
        raise UserError(
            f"{directory} holds both {SINGLE} and {INDEX}.",
            "Expected one of them: which weights are meant cannot be told.",
            "Remove the one that does not belong to this checkpoint.",
        )
    if index.exists():
        return Checkpoint(directory, _read_shards(directory, _read_index(index)))
    if single.exists():
        return Checkpoint(directory, {entry.name: entry for entry in read_header(single)})
    others = sorted(
        path.name
        for pattern in ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
        for path in directory.glob(pattern)
    )
    raise UserError(
        f"{directory} has no weights: neither {SINGLE} nor {INDEX}"
        + (f" (but {capped(others, 3)})." if others else "."),
        "Expected an HF directory with safetensors weights under their published names.",
        "Download the whole checkpoint.",
    )


def read_header(path: Path) -> list[TensorEntry]:
    """The tensors of one safetensors file, in the order of their bytes; UserError if unsound."""
    try:
        size = path.stat().st_size
        fetch(path, 0, 8)
        with open(path, "rb", buffering=0) as file:  # nothing is read before it is fetched
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER):
                raise _unsound(path, f"{size} bytes cannot hold its header", "a whole file")
            fetch(path, 0, 8 + length)
            raw = file.read(length)
    except OSError as error:
        raise UserError(f"{path} could not be read: {error.strerror}.", "", _AGAIN) from None
    try:
        header = json.loads(raw, object_pairs_hook=_no_repeats)
    except ValueError as error:
        raise _unsound(path, f"its header is not sound JSON ({error})", "an object") from None
    if not isinstance(header, dict):
        raise _unsound(path, "its header is not a JSON object", "an object")
    header.pop("__metadata__", None)
    start = 8 + length
    entries = [_entry(path, name, fields, start) for name, fields in header.items()]
    entries.sort(key=lambda entry: (entry.begin, entry.end))
    _check_cover(path, entries, start, size)
    return entries


def capped(items: Iterable[Any], limit: int) -> str:
    """`a, b, c and 7 more`."""
    items = [str(item) for item in items]
    more = len(items) - limit
    return ", ".join(items[:limit]) + (f" and {more} more" if more > 0 else "")


def _unsound(path: Path, found: str, expected: str) -> UserError:
    return UserError(f"{path} is not a sound safetensors file: {found}.", f"Expected {expected}.",
                     _AGAIN)  # fmt: skip


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    repeated = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
    if repeated:
        raise ValueError(f"{repeated[0]!r} occurs twice")
    return dict(pairs)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _entry(path: Path, name: str, fields: Any, start: int) -> TensorEntry:
    """One header entry, its own fields checked against each other."""
    fields = fields if isinstance(fields, dict) else {}
    dtype, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if dtype not in _BITS:
        raise _unsound(path, f"tensor {name} has {dtype=}", f"one of {', '.join(_BITS)}")
    if not isinstance(shape, list) or not all(map(_is_size, shape)):
        raise _unsound(path, f"tensor {name} has {shape=}", "a list of sizes")
    if (
        not isinstance(offsets, list)
        or len(offsets) != 2
        or not all(map(_is_size, offsets))
        or offsets[0] > offsets[1]
    ):
        raise _unsound(path, f"tensor {name} has data_offsets={offsets!r}", "[begin, end]")
    begin, end = offsets
    if (end - begin) * 8 != math.prod(shape) * _BITS[dtype]:
        raise _unsound(
            path,
            f"tensor {name} has {end - begin} bytes",
            f"{math.prod(shape) * _BITS[dtype] // 8} for {dtype} {shape}",
        )
    return TensorEntry(name, dtype, tuple(shape), path, start + begin, start + end)


def _check_cover(path: Path, entries: list[TensorEntry], start: int, size: int) -> None:
    """The tensors, sorted, follow one another from `start` to the end of the file."""
    end, before = start, "the header"
    for entry in entries:
        if entry.begin < end:
            raise _unsound(path, f"tensor {entry.name} overlaps {before}", "separate byte ranges")
        if entry.end > size:
            raise UserError(
                f"{path} is cut: it has {size} bytes, but tensor {entry.name} ends at {entry.end}.",
                f"Expected {max(other.end for other in entries)} bytes.",
                _AGAIN,
            )
        if entry.begin > end:
            raise _unsound(
                path,
                f"{entry.begin - end} bytes between {before} and tensor {entry.name} belong to "
                "no tensor",
                "no gaps",
            )
        end, before = entry.end, f"tensor {entry.name}"
    if end != size:
        raise _unsound(path, f"{size - end} bytes follow its last tensor", f"{end} bytes in all")


def _read_index(path: Path) -> dict[str, str]:
    """weight_map of an index: tensor name -> shard file name, each inside the directory."""
    try:
        index = json.loads(path.read_bytes(), object_pairs_hook=_no_repeats)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} could not be read as JSON: {error}.", "", _AGAIN) from None
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or not all(isinstance(file, str) for file in weight_map.values())
    ):
        raise UserError(
            f"{path} has no weight_map of tensor names to file names.",
            "Expected the index that comes with the shards.",
            _AGAIN,
        )
    for name, file in weight_map.items():
        # By its spelling only: inside a hub cache, honest shards are symbolic links to elsewhere.
        parts = PurePosixPath(file).parts
        windows = PureWindowsPath(file)
        if not parts or parts[0] == "/" or ".." in parts or "\\" in file or windows.drive:
            raise UserError(
                f"{path} places tensor {name} in {file!r}, outside the model directory.",
                "Expected file names inside the directory.",
                "Do not use this checkpoint unless you know why it reads other files.",
            )
    return weight_map


def _read_shards(directory: Path, weight_map: dict[str, str]) -> dict[str, TensorEntry]:
    """The headers of all shards, held against the index in both directions."""
    files = sorted(set(weight_map.values()))
    absent = [file for file in files if not (directory / file).is_file()]
    if absent:
        raise UserError(
            f"{directory} lacks {len(absent)} of the {len(files)} shards in its index: "
            f"{capped(absent, 5)}.",
            "Expected every shard.",
            "Finish the download.",
        )
    tensors: dict[str, TensorEntry] = {}
    for file in files:
        for entry in read_header(directory / file):
            if entry.name in tensors:
                raise UserError(
                    f"Tensor {entry.name} is in two shards of {directory}: "
                    f"{tensors[entry.name].file.name} and {file}.",
                    "Expected each tensor once.",
                    "Download the checkpoint again, into an empty directory.",
                )
            tensors[entry.name] = entry
    missing = [f"{name} ({file})" for name, file in weight_map.items() if name not in tensors]
    misplaced = [
        f"{name} ({file}, found in {tensors[name].file.relative_to(directory)})"
        for name, file in weight_map.items()
        if name in tensors and tensors[name].file != directory / file
    ]
    unlisted = [
        f"{name} ({entry.file.name})" for name, entry in tensors.items() if name not in weight_map
    ]
    problems = [
        f"{len(items)} {what}: {capped(items, 5)}."
        for what, items in (
            ("listed but in no shard", missing),
            ("listed in another shard", misplaced),
            ("in a shard but not listed", unlisted),
        )
        if items
    ]
    if problems:
        raise UserError(
            f"{directory / INDEX} and its shards do not match. " + " ".join(problems),
            "Expected the index to list every tensor.",
            "Download the checkpoint again, into an empty directory.",
        )
    return tensors

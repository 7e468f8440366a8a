"""How rows lie on disk: two zarr3 arrays over [segment, row, column], one chunk a segment.

`ids` (int32) and `values` (float32) hold the columns of NUMERICS section 1 side by side, so that a
segment is two objects, not ten, on disk and in a bucket; the column names are in the arrays'
attributes. Segments are ragged: rows past a segment's own count hold the fill value, which
compresses to nothing. Each extra is a further array [segment, row, ...] of its own dtype; one that
is declared `"per": "token"` is [segment, token, ...], over all context_len + score_len tokens that
the model read.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from kernjax.base.errors import UserError

# name -> (dtype in memory, whether it has K columns); the order is the order on disk.
IDS = {
    "pos": ("int32", False),
    "phase": ("uint8", False),
    "target_ids": ("int32", False),
    "top1_ids": ("int32", False),
    "top_ids": ("int32", True),
}
VALUES = {
    "tail_logprob": ("float32", False),
    "target_logprobs": ("float32", False),
    "margins": ("float32", False),
    "top_logprobs": ("float32", True),
}
COLUMNS = IDS | VALUES
EXTRA_DTYPES = ("uint8", "uint16", "int32", "int64", "float16", "float32", "float64")
_PACKED = {"ids": ("int32", IDS), "values": ("float32", VALUES)}


@dataclasses.dataclass(frozen=True)
class Layout:
    """The arrays of a recording, derived from its manifest alone."""

    rows: tuple[int, ...]  # rows of each segment
    top_k: int
    extras: dict[str, tuple[str, tuple[int, ...]]]  # name -> dtype, shape of one row or token
    tokens: tuple[int, ...] = ()  # that each segment reads
    per_token: frozenset[str] = frozenset()  # names of extras

    @classmethod
    def of(cls, manifest: Mapping[str, Any]) -> Layout:
        """The layout of a stored manifest; UserError where an extra is declared wrongly."""
        extras, per_token = {}, set()
        for name, spec in sorted(manifest["extras"].items()):
            dtype, shape = spec.get("dtype"), spec.get("shape", [])
            taken = name in COLUMNS or name in _PACKED or name in ("segments", "segment")
            if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or taken:
                raise UserError(f"Extra array {name!r} has an unusable name.")
            if dtype not in EXTRA_DTYPES or not all(type(n) is int and n > 0 for n in shape):
                raise UserError(
                    f"Extra array {name} is declared with dtype={dtype!r}, shape={shape!r}.",
                    f"dtype is one of {', '.join(EXTRA_DTYPES)}; shape is that of one row.",
                )
            per = spec.get("per", "row")
            if per not in ("row", "token") or (per == "token" and dtype.startswith("float")):
                raise UserError(
                    f"Extra array {name} is declared with {per=}, {dtype=}.",
                    "Expected 'row', or 'token' for whole numbers.",
                )
            extras[name] = (dtype, tuple(shape))
            per_token |= {name} if spec.get("per") == "token" else set()
        segments = manifest["segments"]
        return cls(
            rows=tuple(segment["rows"] for segment in segments),
            top_k=manifest["top_k"],
            extras=extras,
            tokens=tuple(segment["context_len"] + segment["score_len"] for segment in segments),
            per_token=frozenset(per_token),
        )

    def lengths(self, name: str) -> tuple[int, ...]:
        """How long each segment's part of array `name` is."""
        return self.tokens if name in self.per_token else self.rows

    @property
    def names(self) -> list[str]:
        """The arrays on disk."""
        return [*_PACKED, *self.extras]

    def metadata(self, name: str) -> dict[str, Any]:
        """The zarr3 metadata of one array."""
        attributes: dict[str, Any] = {"rows": "the first manifest.segments[i].rows of segment i"}
        if name in self.per_token:
            attributes = {"tokens": "the first context_len + score_len of manifest.segments[i]"}
        if name in _PACKED:
            dtype, columns = _PACKED[name]
            shape: tuple[int, ...] = (sum(self._widths(columns)),)
            attributes["columns"] = [
                f"{column}[{i}]" if wide else column
                for column, (_, wide) in columns.items()
                for i in range(self.top_k if wide else 1)
            ]
        else:
            dtype, shape = self.extras[name]
        fill = "NaN" if dtype.startswith("float") else 0 if dtype.startswith("uint") else -1
        chunk = [1, max(self.lengths(name)), *shape]
        blosc = {
            "cname": "zstd",
            "clevel": 5,
            "shuffle": "shuffle",
            "typesize": np.dtype(dtype).itemsize,
            "blocksize": 0,
        }
        return {
            "shape": [len(self.rows), *chunk[1:]],
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
            "data_type": dtype,
            "fill_value": fill,
            # Byte shuffling puts the alike high bytes of ids and logprobs together.
            "codecs": [
                {"name": "bytes", "configuration": {"endian": "little"}}
                if np.dtype(dtype).itemsize > 1
                else {"name": "bytes"},
                {"name": "blosc", "configuration": blosc},
            ],
            "attributes": attributes,
        }

    def pack(
        self, rows: Mapping[str, np.ndarray], extras: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """Checked rows [n, ...] by column -> arrays [n, ...] by the name they have on disk."""
        packed = {}
        for name, (dtype, columns) in _PACKED.items():
            parts = [rows[column].reshape(len(rows[column]), -1) for column in columns]
            packed[name] = np.concatenate(parts, axis=1, dtype=dtype, casting="safe")
        return packed | {name: np.ascontiguousarray(extras[name]) for name in self.extras}

    def unpack(
        self, packed: Mapping[str, np.ndarray]
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """The inverse of `pack`: (rows by column, extras), contiguous and in their dtypes.

        Without extras per token, which no row belongs to.
        """
        rows = {}
        for name, (_, columns) in _PACKED.items():
            start = 0
            for (column, (dtype, wide)), width in zip(
                columns.items(), self._widths(columns), strict=True
            ):
                part = packed[name][:, start : start + width]
                rows[column] = np.ascontiguousarray(part if wide else part[:, 0], dtype=dtype)
                start += width
        return rows, {name: packed[name] for name in self.extras if name not in self.per_token}

    def pad(self, array: np.ndarray, name: str) -> np.ndarray:
        """[n, ...] -> one chunk, as long as the longest, the rest at the array's fill value."""
        fill = float(self.metadata(name)["fill_value"])
        chunk = np.full((max(self.lengths(name)), *array.shape[1:]), fill, array.dtype)
        chunk[: len(array)] = array
        return chunk

    def checksum(self, packed: Mapping[str, np.ndarray]) -> str:
        """Hex SHA-256 of a segment's content: names, dtypes, shapes and little-endian values.

        Over values, not over compressed bytes, so that an identity outlives a codec's version.
        """
        digest = hashlib.sha256()
        for name in self.names:
            array = packed[name]
            little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
            digest.update(f"{name} {array.dtype.name} {array.shape}\n".encode())
            digest.update(little.data)
        return digest.hexdigest()

    def _widths(self, columns: Mapping[str, tuple[str, bool]]) -> list[int]:
        return [self.top_k if wide else 1 for _, wide in columns.values()]

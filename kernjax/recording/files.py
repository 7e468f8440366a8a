"""The files of a recording, and moving a finished one into its place.

`manifest.json`, one folder per array, `segments/NNNNNN.json` (a marker per written segment, while
recording), `complete.json` (at the end), `.next/` (the same again, while a complete recording is
being overwritten).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorstore as ts

from kernjax.base.errors import UserError
from kernjax.recording.layout import Layout
from kernjax.recording.storage import Store, storage_errors

COMPLETE, MANIFEST, MARKERS, STAGED = "complete.json", "manifest.json", "segments/", ".next/"


def read_json(store: Store, key: str) -> dict[str, Any] | None:
    """A key's JSON object, None where it is absent; UserError where it cannot be read as JSON."""
    value = store.read(key)
    if value is None:
        return None
    try:
        parsed = json.loads(value)
        if isinstance(parsed, dict):
            return parsed
        reason = "not an object"
    except ValueError as error:
        reason = str(error)
    raise UserError(
        f"{store.name}/{key} is not what kernjax writes: {reason}.",
        todo="Restore it, or record again with another --out.",
    )


def read_segments(
    arrays: Mapping[str, ts.TensorStore], layout: Layout, checksums: Sequence[str]
) -> tuple[list[dict[str, np.ndarray]], dict[int, str]]:
    """Each segment's packed arrays without padding, and the reasons of those that are not whole."""
    futures = [
        {name: arrays[name][index, : layout.lengths(name)[index]].read() for name in layout.names}
        for index in range(len(layout.rows))
    ]
    segments: list[dict[str, np.ndarray]] = []
    bad: dict[int, str] = {}
    for index, (future, checksum) in enumerate(zip(futures, checksums, strict=True)):
        packed = {}
        for name in layout.names:
            try:
                with storage_errors("read", name):
                    packed[name] = np.asarray(future[name].result())
            except UserError as error:
                bad.setdefault(index, error.found)
        if index not in bad and layout.checksum(packed) != checksum:
            bad[index] = "its values do not match their checksum"
        segments.append(packed)
    return segments, bad


def marker(index: int) -> str:
    """The key that says that segment `index` is durably written."""
    return f"{MARKERS}{index:06d}.json"


def clear(store: Store) -> None:
    """Empties an incomplete recording, markers first and the manifest last.

    A kill in between leaves it readable as what it is: this producer's, with segments missing.
    """
    for key in (COMPLETE, MARKERS):
        store.delete(key)
    others = {key.partition("/")[0] + "/" for key in store.keys() if "/" in key}
    for folder in sorted(others - {STAGED}):
        store.delete(folder)
    store.delete(MANIFEST)


def settle(root: Store) -> None:
    """Ends what a kill interrupted after all was written: moving `.next/`, deleting markers."""
    staged = root.child(STAGED)
    value = staged.read(COMPLETE)
    if value is not None and root.read(COMPLETE) in (None, value):
        promote(root)
    if root.read(COMPLETE) is not None and root.keys(MARKERS):
        root.delete(MARKERS)


def is_complete(path: str | os.PathLike[str]) -> bool:
    """Whether a complete recording lies at `path`, after `settle`."""
    root = Store.open(path)
    settle(root)
    return root.read(COMPLETE) is not None


def promote(root: Store) -> None:
    """Puts the complete recording in `.next/` in the place of the root's; may be repeated."""
    staged = root.child(STAGED)
    complete = staged.read(COMPLETE)
    if complete is None:
        raise UserError(f"{staged.name} holds no complete recording.")
    if root.read(COMPLETE) != complete:
        clear(root)
        keys = [key for key in staged.keys() if key != COMPLETE]
        for key in keys:
            value = staged.read(key)
            if value is not None:
                root.write(key, value)
        root.write(COMPLETE, complete)
    staged.delete(COMPLETE)
    root.delete(STAGED)

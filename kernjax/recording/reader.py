"""Reading a recording: NumPy arrays over all rows, every byte checked against its checksum."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from kernjax.base.errors import UserError
from kernjax.base.hashing import sha256_bytes
from kernjax.recording.files import (
    COMPLETE,
    MANIFEST,
    MARKERS,
    STAGED,
    read_json,
    read_segments,
)
from kernjax.recording.layout import VALUES, Layout
from kernjax.recording.manifest import (
    SCHEMA_VERSION,
    TOP_K,
    canonical_json,
    diff_text,
    recording_identity,
)
from kernjax.recording.storage import Store


@dataclasses.dataclass(frozen=True, eq=False)
class Recording:
    """What one producer said on one corpus. Arrays over rows R, read-only.

    Rows are ordered by segment, then phase, then position. A row at `pos` is the distribution over
    token `pos + 1`. `top_logprobs` are the producer's logprobs at `top_ids`, which are its own
    top K (a reference) or those of the recording named by `manifest["reference"]`.
    """

    path: str
    identity: str  # hash over what it was made of and every value in it
    manifest: dict[str, Any]  # with `segments`
    segment: np.ndarray  # int32 [R], index into `segments`
    pos: np.ndarray  # int32 [R]
    phase: np.ndarray  # uint8 [R]: 0 prefill, 1 decode, 2 rescore
    top_ids: np.ndarray  # int32 [R, K]
    top_logprobs: np.ndarray  # float32 [R, K]
    tail_logprob: np.ndarray  # float32 [R], of everything outside top_ids
    target_ids: np.ndarray  # int32 [R], the text's own token at pos + 1
    target_logprobs: np.ndarray  # float32 [R]
    top1_ids: np.ndarray  # int32 [R], the producer's own
    margins: np.ndarray  # float32 [R], the producer's own largest minus second largest logit
    extras: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)  # [R, ...]
    # Name -> an array of every segment, [context_len + score_len, ...].
    token_extras: dict[str, tuple[np.ndarray, ...]] = dataclasses.field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.pos)

    @property
    def segments(self) -> list[dict[str, Any]]:
        """Per segment: id, kind, context_len, score_len, documents, rows."""
        return self.manifest["segments"]

    @functools.cached_property
    def kinds(self) -> np.ndarray:
        """str [segments]; `kinds[segment]` is the kind of each row."""
        return np.array([segment["kind"] for segment in self.segments])

    @functools.cached_property
    def context_lens(self) -> np.ndarray:
        """int64 [segments]; `context_lens[segment]` is the depth of each row."""
        return np.array([segment["context_len"] for segment in self.segments], np.int64)

    @functools.cached_property
    def non_finite(self) -> np.ndarray:
        """int64 [segments]: rows with a NaN or infinity in any float column or extra."""
        bad = np.zeros(len(self), bool)
        for array in (*(getattr(self, name) for name in VALUES), *self.extras.values()):
            if array.dtype.kind == "f":
                bad |= ~np.isfinite(array).reshape(len(self), -1).all(axis=1)
        return np.bincount(self.segment[bad], minlength=len(self.segments))

    def rows_of(self, segment: int | str) -> slice:
        """The rows of one segment, by its index or its id."""
        index = self._index(segment)
        start, stop = np.searchsorted(self.segment, [index, index + 1])
        return slice(int(start), int(stop))

    def select(self, segments: Sequence[int | str]) -> Recording:
        """Only these segments, in the recording's order. The identity stays the whole one's.

        For `--limit`: a candidate that scored a part is compared with that part.
        """
        chosen = sorted({self._index(segment) for segment in segments})
        rows = np.isin(self.segment, chosen)
        arrays: dict[str, Any] = {
            field.name: _freeze(getattr(self, field.name)[rows])
            for field in dataclasses.fields(self)
            if isinstance(getattr(self, field.name), np.ndarray)
        }
        arrays["segment"] = _freeze(np.searchsorted(chosen, arrays["segment"]).astype(np.int32))
        return dataclasses.replace(
            self,
            manifest={**self.manifest, "segments": [self.segments[i] for i in chosen]},
            extras={name: _freeze(array[rows]) for name, array in self.extras.items()},
            token_extras={
                name: tuple(parts[i] for i in chosen) for name, parts in self.token_extras.items()
            },
            **arrays,
        )

    def _index(self, segment: int | str) -> int:
        ids = [item["id"] for item in self.segments]
        if isinstance(segment, str) and segment in ids:
            return ids.index(segment)
        if not isinstance(segment, str) and 0 <= segment < len(ids):
            return int(segment)
        raise KeyError(f"segment {segment!r} is not one of the {len(ids)} of {self.path}")


def load_recording(path: str | os.PathLike[str]) -> Recording:
    """Reads a complete recording (directory, `gs://` URL or packed .zip) into memory.

    UserError, each with its own message: not a recording, incomplete, of a newer version, edited,
    fewer than 20 ids a row, an array missing, cut or changed, non-finite values in a reference.
    """
    root, store = locate(path)
    manifest = read_json(store, MANIFEST)
    if manifest is None:
        what = "is not a recording: it has no manifest.json" if root.exists() else "does not exist"
        raise UserError(f"{root.name} {what}.", todo="Make one with kernjax.record.")
    _check_schema(root, manifest)
    complete = read_json(store, COMPLETE)
    if complete is None:
        raise _incomplete(store, manifest)
    checksums = _checked_checksums(store, manifest, complete)
    layout = Layout.of(manifest)
    arrays = {}
    for name in layout.names:
        if store.read(f"{name}/zarr.json") is None:
            raise UserError(
                f"Recording {root.name} lacks its array {name}.",
                f"Its arrays are {', '.join(layout.names)}.",
                "Copy the whole directory, or record again with --overwrite.",
            )
        arrays[name] = store.array(name, layout.metadata(name), create=False)
    segments, bad = read_segments(arrays, layout, checksums)
    if bad:
        reasons = diff_text([f"{manifest['segments'][i]['id']}: {why}" for i, why in bad.items()])
        raise UserError(
            f"Recording {root.name} is damaged in {len(bad)} of {len(layout.rows)}"
            f" segments:{reasons}\n",
            todo="Copy it again from where it came, or record again with --overwrite.",
        )
    by_row = [name for name in layout.names if name not in layout.per_token]
    rows, extras = layout.unpack(
        {name: np.concatenate([segment[name] for segment in segments]) for name in by_row}
    )
    recording = Recording(
        path=root.name,
        identity=complete["identity"],
        manifest=manifest,
        segment=_freeze(np.repeat(np.arange(len(layout.rows), dtype=np.int32), layout.rows)),
        extras={name: _freeze(array) for name, array in extras.items()},
        token_extras={
            name: tuple(_freeze(segment[name]) for segment in segments)
            for name in sorted(layout.per_token)
        },
        **{name: _freeze(array) for name, array in rows.items()},
    )
    if manifest["reference"] is None:
        refuse_non_finite(recording)
    return recording


def locate(path: str | os.PathLike[str]) -> tuple[Store, Store]:
    """(the recording's root, where its live files are): the same but for a killed overwriting.

    Killed while the new one moved in, the new one is whole in `.next/`, and the root is not.
    """
    root = Store.open(path)
    staged = root.child(STAGED)
    moving = root.read(COMPLETE) is None and staged.read(COMPLETE) is not None
    return root, staged if moving else root


def refuse_non_finite(recording: Recording) -> None:
    """UserError where a recording that serves as the truth holds NaN or infinities."""
    if recording.non_finite.any():
        index = int(np.argmax(recording.non_finite > 0))
        raise UserError(
            f"Reference {recording.path} has NaN or infinite values in"
            f" {recording.non_finite.sum()} rows, first in segment"
            f" {recording.segments[index]['id']}.",
            "A reference is finite.",
            "Record it again with a producer that works.",
        )


def _check_schema(root: Store, manifest: dict[str, Any]) -> None:
    version = manifest.get("schema_version")
    if not isinstance(version, int) or version < 1:
        raise UserError(
            f"{root.name} is not a recording: its manifest.json has schema_version={version!r}.",
            todo="Make one with kernjax.record.",
        )
    segments = manifest.get("segments")
    if not isinstance(segments, list) or not all(isinstance(one, dict) for one in segments):
        raise UserError(
            f"{root.name} is not a recording: its manifest.json lists no segments.",
            todo="Make one with kernjax.record.",
        )
    if version > SCHEMA_VERSION:
        raise UserError(
            f"Recording {root.name} has schema version {version}.",
            f"This kernjax reads up to version {SCHEMA_VERSION}.",
            "Install a newer kernjax.",
        )
    top_k = manifest.get("top_k", 0)
    if not isinstance(top_k, int) or top_k < TOP_K:
        raise UserError(
            f"Recording {root.name} keeps top_k={top_k!r} ids a row.",
            f"At least {TOP_K} are needed: below, too much of the distribution is in `other`.",
            "Record again with a larger K.",
        )


def _checked_checksums(
    store: Store, manifest: dict[str, Any], complete: dict[str, Any]
) -> list[str]:
    """The segments' checksums, where manifest.json and complete.json belong together."""
    listed = complete.get("segments")
    listed = listed if isinstance(listed, list) else []
    checksums = [str(one.get("sha256") if isinstance(one, dict) else one) for one in listed]
    if (
        sha256_bytes(canonical_json(manifest)) != complete.get("manifest_sha256")
        or len(checksums) != len(manifest["segments"])
        or recording_identity(manifest, checksums) != complete.get("identity")
    ):
        raise UserError(
            f"{store.name}: {MANIFEST} and {COMPLETE} do not belong together: one was changed"
            " after the recording was finished.",
            "Each holds the other's checksum.",
            "Restore them, or record again.",
        )
    return checksums


def _incomplete(store: Store, manifest: dict[str, Any]) -> UserError:
    written = {key.removeprefix(MARKERS).removesuffix(".json") for key in store.keys(MARKERS)}
    ids = [segment["id"] for segment in manifest["segments"]]
    missing = [name for i, name in enumerate(ids) if f"{i:06d}" not in written]
    what = f"{len(missing)} of {len(ids)} segments are missing ({', '.join(missing[:8])}"
    what += ", ...)" if len(missing) > 8 else ")"
    return UserError(
        f"Recording {store.name} is incomplete: "
        + (what if missing else "all segments are written, but it was not finished")
        + ".",
        todo="Run the kernjax.record command that began it again: it goes on where it stopped.",
    )


def _freeze(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array

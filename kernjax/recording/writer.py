"""Writing a recording: segment by segment, by one process or many, killed at any moment.

Order of writes, each durable before the next:
1. `manifest.json`, then the arrays' metadata (which the manifest determines);
2. for a segment its chunks, then its marker `segments/NNNNNN.json` with the checksum of its
   content. A segment without a marker was not written, whatever its chunks hold;
3. at the end, after all was read back and matched its checksums, `complete.json`. Without it the
   directory is no recording. The markers, now inside it, are deleted.

Overwriting a complete recording goes to `.next/` inside it; the old one stays what readers see
until `.next/complete.json` exists, then the new one takes its place. On a kill in between readers
follow `.next/`, and the next writer finishes the move.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from kernjax.base.errors import UserError
from kernjax.base.hashing import sha256_bytes
from kernjax.recording.files import (
    COMPLETE,
    MANIFEST,
    MARKERS,
    STAGED,
    clear,
    marker,
    promote,
    read_json,
    read_segments,
    settle,
)
from kernjax.recording.layout import Layout
from kernjax.recording.manifest import (
    SCHEMA_VERSION,
    canonical_json,
    complete_manifest,
    diff_text,
    identity_diff,
    recording_identity,
)
from kernjax.recording.rows import check_rows, non_finite
from kernjax.recording.storage import Store, storage_errors

# What one process leaves for the others to find, so that they know it is one place.
_TICKET = "hosts/ticket"
_TICKET_S = 30  # a network file system may show a new file that late


class RecordingWriter:
    """A recording being written. Make one with `create`, `open_or_create` or `join`.

    Several processes may hold writers of the same recording and write different segments; one of
    them (after a barrier) calls `finish`. Only one process at a time may pass `overwrite`, before
    the others open.
    """

    def __init__(self, root: Store, store: Store, manifest: dict[str, Any]) -> None:
        self._root, self._store = root, store  # the same, unless a complete one is overwritten
        self.manifest = manifest
        self._layout = Layout.of(manifest)
        self._arrays = {
            name: store.array(name, self._layout.metadata(name), create=True)
            for name in self._layout.names
        }

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        manifest: Mapping[str, Any],
        segments: Sequence[Mapping[str, Any]],
        overwrite: bool = False,
    ) -> RecordingWriter:
        """Begins a recording at an empty or absent path (local directory or `gs://` URL).

        `manifest` comes from `build_manifest`; `segments` in the order of the corpus, each with
        its planned `rows`. With `overwrite` what lies there, if it is a recording, is replaced: an
        incomplete one at once, a complete one when the new one is finished.
        """
        return cls._open(path, manifest, segments, overwrite, resume=False)

    @classmethod
    def open_or_create(
        cls,
        path: str | os.PathLike[str],
        manifest: Mapping[str, Any],
        segments: Sequence[Mapping[str, Any]],
        overwrite: bool = False,
    ) -> RecordingWriter:
        """Like `create`, but goes on with an incomplete recording of the same producer.

        To go on, everything in the manifest but the labels must match, also versions, commit,
        device and batch size: one recording has one producer, and what reorders reductions
        changes bits. Otherwise UserError shows both sides. A stopped run with `overwrite`, started
        again with `overwrite`, goes on too.
        """
        return cls._open(path, manifest, segments, overwrite, resume=True)

    @classmethod
    def join(
        cls,
        path: str | os.PathLike[str],
        manifest: Mapping[str, Any],
        segments: Sequence[Mapping[str, Any]],
        ticket: Mapping[str, Any],
    ) -> RecordingWriter:
        """Opens what another host has just begun, or goes on with: whose `issue_ticket` says where.

        UserError where `path` is another place here than there.
        """
        root = Store.open(path)
        store = root.child(STAGED) if ticket["staged"] else root
        expected, deadline = ticket["word"].encode(), time.monotonic() + _TICKET_S
        while store.read(_TICKET) != expected:
            if time.monotonic() > deadline:
                raise UserError(
                    f"{root.name} is not shared by the hosts: this one does not see what process 0"
                    " wrote there.",
                    "All hosts write one recording.",
                    "Choose an --out on a file system that all of them mount, or gs://.",
                )
            time.sleep(0.2)
        begun = read_json(store, MANIFEST)
        if lines := identity_diff(begun or {}, complete_manifest(manifest, segments)):
            _refuse_other(store, lines)
        return cls(root, store, begun or {})

    def issue_ticket(self) -> dict[str, Any]:
        """What other hosts need to `join`; written here until `void_ticket`."""
        word = secrets.token_hex(16)
        self._store.write(_TICKET, word.encode())
        return {"word": word, "staged": self._store is not self._root}

    def void_ticket(self) -> None:
        """Removes what `issue_ticket` wrote, once all have joined."""
        self._store.delete("hosts/")

    @classmethod
    def _open(
        cls,
        path: str | os.PathLike[str],
        manifest: Mapping[str, Any],
        segments: Sequence[Mapping[str, Any]],
        overwrite: bool,
        resume: bool,
    ) -> RecordingWriter:
        full = complete_manifest(manifest, segments)
        Layout.of(full)  # refuses bad extras before anything is touched
        if full["schema_version"] != SCHEMA_VERSION:
            raise UserError(
                f"The manifest has schema_version={full['schema_version']!r}.",
                f"This kernjax writes version {SCHEMA_VERSION}.",
            )
        root = Store.open(path)
        settle(root)
        store, begun = root, read_json(root, MANIFEST)
        if root.read(COMPLETE) is not None:
            if not overwrite:
                _refuse_complete(root, begun or {}, full)
            store = root.child(STAGED)
            begun = read_json(store, MANIFEST)
        if begun is None:
            # Asked again after `exists`: another host may begin the same recording right now.
            if store is root and root.exists() and root.read(MANIFEST) is None:
                raise UserError(
                    f"{root.name} is not empty and holds no recording.",
                    "A recording is written to a place of its own.",
                    "Choose another --out.",
                )
        elif (lines := identity_diff(begun, full)) or not resume:
            if not overwrite:
                _refuse_other(store, lines)
            clear(store)
            begun = None
        if begun is None:
            bytes_now = store.write_new(MANIFEST, canonical_json(full))
            begun = json.loads(bytes_now)
            if lines := identity_diff(begun, full):  # another process was first
                _refuse_other(store, lines)
        # The manifest that was stored, labels included: resuming must not change bytes.
        return cls(root, store, begun)

    def missing(self) -> list[int]:
        """The indices of the segments that are not durably written, by anybody, ascending."""
        written = {
            int(key.removeprefix(MARKERS).removesuffix(".json"))
            for key in self._store.keys(MARKERS)
        }
        missing = [i for i in range(len(self._layout.rows)) if i not in written]
        # Asked last: `finish`, maybe on another host, deletes the markers after it has written
        # complete.json, and then moves `.next/`.
        return [] if missing and self._is_finished() else missing

    def write(
        self,
        index: int,
        rows: Mapping[str, Any],
        extras: Mapping[str, Any] | None = None,
    ) -> None:
        """Stores segment `index`; on return it is durable.

        `rows`: the columns of NUMERICS section 1, n rows: pos, target_ids, top1_ids int32 [n],
        phase uint8 [n], top_ids int32 [n,K], top_logprobs float32 [n,K], tail_logprob,
        target_logprobs, margins float32 [n]. `extras`: the arrays that the manifest declares.
        Rows that cannot be right are refused (UserError). NaN and infinities are kept and counted
        in a candidate and refused in a reference. Writing a segment again is allowed with the same
        values only: a producer that gives other ones is not deterministic.
        """
        base, further = check_rows(self.manifest, index, rows, extras)
        packed = self._layout.pack(base, further)
        record = {
            "rows": self._layout.rows[index],
            "sha256": self._layout.checksum(packed),
            "non_finite": non_finite({**base, **further}),
        }
        before = self._records([index])[0]
        if before is not None:
            if before != record:
                raise UserError(
                    f"Segment {self._name(index)} of {self._store.name} was written before with"
                    " other values.",
                    "The same inputs give the same bits.",
                    "Find what made the producer differ, then delete this and record again.",
                )
            return
        with storage_errors("write", f"segment {self._name(index)} of {self._store.name}"):
            futures = [
                self._arrays[name][index].write(self._layout.pad(packed[name], name))
                for name in self._layout.names
            ]
            for future in futures:
                future.result()
        self._store.write(marker(index), canonical_json(record))

    def finish(self) -> str:
        """Reads everything back, marks the recording complete and returns its identity.

        UserError, and nothing marked, where segments are missing or were not read back as they
        were written (these then count as missing, and the same command records them again).
        """
        records = self._records(range(len(self._layout.rows)))
        if None in records:
            if (done := read_json(self._store, COMPLETE)) is None:
                names = [self._name(i) for i, record in enumerate(records) if record is None]
                raise UserError(
                    f"{self._store.name} cannot be finished: {len(names)} segments are not"
                    f" written ({_some(names)}).",
                    todo="Run the same command again: it goes on where it stopped.",
                )
            records = done["segments"]
        whole = [record for record in records if record is not None]
        _, bad = read_segments(self._arrays, self._layout, [r["sha256"] for r in whole])
        if bad:
            for index in bad:
                self._store.delete(marker(index))
            reasons = diff_text([f"{self._name(i)}: {why}" for i, why in bad.items()])
            raise UserError(
                f"{self._store.name}: {len(bad)} segments did not read back as they were"
                f" written:{reasons}\n",
                todo="Check the storage and run the same command again: it records them again.",
            )
        identity = recording_identity(self.manifest, [record["sha256"] for record in whole])
        summary = {
            "schema_version": SCHEMA_VERSION,
            "identity": identity,
            "manifest_sha256": sha256_bytes(canonical_json(self.manifest)),
            "segments": whole,
        }
        self._store.write(COMPLETE, canonical_json(summary))
        self._store.delete(MARKERS)
        if self._store is not self._root:
            promote(self._root)
            self._store = self._root
            self._arrays = {
                name: self._root.array(name, self._layout.metadata(name), create=False)
                for name in self._layout.names
            }
        return identity

    def _is_finished(self) -> bool:
        if self._store.read(COMPLETE) is not None:
            return True
        return self._store is not self._root and self._store.read(MANIFEST) is None

    def _records(self, indices: Sequence[int]) -> list[dict[str, Any] | None]:
        values = self._store.read_many([marker(index) for index in indices])
        return [None if value is None else json.loads(value) for value in values]

    def _name(self, index: int) -> str:
        return self.manifest["segments"][index]["id"]


def _some(names: Sequence[str], limit: int = 8) -> str:
    return ", ".join(names[:limit]) + (", ..." if len(names) > limit else "")


def _refuse_complete(root: Store, begun: Mapping[str, Any], full: Mapping[str, Any]) -> None:
    lines = identity_diff(begun, full)
    if not lines:
        raise UserError(
            f"{root.name} is already complete, made by this very producer of these inputs.",
            todo="Use it as it is, or delete it to make it again (kernjax.record: --overwrite).",
        )
    raise UserError(
        f"{root.name} is already complete and differs:{diff_text(lines)}\n",
        todo="Choose another directory, or delete this one (kernjax.record: --overwrite).",
    )


def _refuse_other(store: Store, lines: Sequence[str]) -> None:
    if not lines:
        raise UserError(
            f"{store.name} holds an incomplete recording of the same producer.",
            todo="Go on with it (open_or_create), or delete it (kernjax.record: --overwrite).",
        )
    raise UserError(
        f"{store.name} is an incomplete recording of something else:{diff_text(lines)}\n",
        "One recording has one producer: model, corpus, policy, kernels, versions, commit, device"
        " and batch size must match to go on.",
        "Run what began it, choose another directory, or delete this one (kernjax.record:"
        " --overwrite).",
    )

"""A model's directory in a bucket or on the Hugging Face hub, seen as a local one.

`stage` makes a directory in the user's cache: small files are copied into it, weight files are
there in their full size, but sparse. `fetch` brings bytes of them before they are read, and keeps
them: a process downloads what its devices hold, once. What was fetched is marked block by block
after it is written, so that a process that is killed loses nothing and believes nothing.

The files are found through fsspec: `gs://` by gcsfs, `hf://ORG/NAME[@REVISION]` by huggingface_hub.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from kernjax.base.errors import UserError
from kernjax.base.hashing import sha256_json

T = TypeVar("T")

BLOCK = 1 << 20  # bytes under one mark
_REQUEST = 16  # blocks asked for at once
_THREADS = 8
_PAUSES_S = (1.0, 4.0)  # before another attempt: the first one fails now and then

_EXTRAS = {"gs": "gs", "hf": "hub"}  # what brings the file system of a scheme
_WEIGHTS = ".safetensors"
_SMALL = (".json", ".jinja", ".model", ".tiktoken", ".txt")
# Of an entry of a listing: what changes with the file, by the file systems that have it.
_STAMPS = ("blob_id", "etag", "ETag", "md5Hash", "generation", "mtime", "created")

_staged: dict[Path, _Source] = {}


def is_remote(name: str) -> bool:
    """Whether `--model=NAME` is an address, no directory."""
    return "://" in name


def default_cache_dir() -> Path:
    """Where fetched files lie: $KERNJAX_CACHE_DIR, or kernjax/ in the user's cache directory."""
    if given := os.environ.get("KERNJAX_CACHE_DIR"):
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kernjax"


def stage(url: str) -> Path:
    """The local directory that stands for the one at `url`; UserError where it cannot be read.

    Files that have changed there since make another directory.
    """
    files, root = _open(url)
    listed = _tried(f"list {url}", lambda: files.ls(root, detail=True))
    entries = {
        entry["name"].rstrip("/").rpartition("/")[2]: entry
        for entry in listed
        if entry["type"] == "file"
    }
    if "kernjax.json" in entries or "kernjax.unfinished" in entries:
        raise UserError(
            f"{url} is a converted checkpoint.",
            "From a bucket or the hub only HF directories are read.",
            "Mount it, or copy it to a disk.",
        )
    stamped = [
        [name, entry["size"], *(str(entry[key]) for key in _STAMPS if entry.get(key))]
        for name, entry in sorted(entries.items())
    ]
    place = default_cache_dir() / "models" / sha256_json([url, stamped])[:16]
    name = root.rstrip("/").rpartition("/")[2].partition("@")[0]
    source = _Source(files, url, place / name, place / "fetched")
    for folder in (source.directory, source.marks):
        folder.mkdir(parents=True, exist_ok=True)
    _staged[source.directory] = source
    for name, entry in entries.items():
        if name.endswith(_WEIGHTS):
            source.add(name, entry)
        elif name.endswith(_SMALL):
            source.add(name, entry)
            fetch(source.directory / name)
    return source.directory


def fetch(path: Path, begin: int = 0, end: int | None = None) -> None:
    """Makes bytes [begin, end) of a staged file ready to be read; of any other file, nothing."""
    if is_staged(path):
        _staged[path.parent].fetch(path.name, begin, end)


def is_staged(path: Path) -> bool:
    """Whether a file's bytes have to be fetched."""
    source = _staged.get(path.parent)
    return source is not None and path.name in source.paths


@dataclasses.dataclass(frozen=True)
class _Source:
    """A staged directory: where its files come from, and what is here of them."""

    files: Any  # an fsspec file system
    url: str
    directory: Path
    marks: Path
    paths: dict[str, tuple[str, int]] = dataclasses.field(default_factory=dict)
    # (file, block) that some thread is bringing, and a lock that tells when one has.
    coming: set[tuple[str, int]] = dataclasses.field(default_factory=set)
    changed: threading.Condition = dataclasses.field(default_factory=threading.Condition)

    def add(self, name: str, entry: dict[str, Any]) -> None:
        """A file of that size, empty where it is not here yet."""
        self.paths[name] = (entry["name"], entry["size"])
        blocks = -(-entry["size"] // BLOCK)
        for path, size in ((self.directory / name, entry["size"]), (self.marks / name, blocks)):
            with open(path, "ab") as file:
                if os.fstat(file.fileno()).st_size != size:
                    os.ftruncate(file.fileno(), size)

    def fetch(self, name: str, begin: int, end: int | None) -> None:
        size = self.paths[name][1]
        end = size if end is None else min(end, size)
        first, last = begin // BLOCK, -(-end // BLOCK)
        while True:
            with self.changed:
                missing = self._missing(name, first, last)
                own = {(name, block) for block in missing} - self.coming
                if missing and not own:  # others bring them; what they fail to bring is ours then
                    self.changed.wait()
                    continue
                self.coming.update(own)
            try:
                self._bring_all(name, sorted(block for _, block in own))
            finally:
                with self.changed:
                    self.coming.difference_update(own)
                    self.changed.notify_all()
            if len(own) == len(missing):
                return

    def _missing(self, name: str, first: int, last: int) -> list[int]:
        """The blocks of [first, last) that are not marked."""
        with open(self.marks / name, "rb") as marks:
            marks.seek(first)
            held = marks.read(last - first)
        return [first + at for at, mark in enumerate(held) if not mark]

    def _bring_all(self, name: str, blocks: list[int]) -> None:
        runs: list[list[int]] = []  # of blocks that follow one another: [first, stop]
        for block in blocks:
            if runs and runs[-1][1] == block and block - runs[-1][0] < _REQUEST:
                runs[-1][1] += 1
            else:
                runs.append([block, block + 1])
        if len(runs) > 1:
            for _ in _pool().map(lambda run: self._bring(name, *run), runs):
                pass  # raises what a request raised
        elif runs:
            self._bring(name, *runs[0])

    def _bring(self, name: str, first: int, stop: int) -> None:
        remote, size = self.paths[name]
        begin, end = first * BLOCK, min(stop * BLOCK, size)
        what = f"read {self.url}/{name}"
        data = _tried(what, lambda: self.files.cat_file(remote, start=begin, end=end))
        if len(data) != end - begin:
            raise UserError(
                f"{self.url}/{name} gave {len(data)} bytes at {begin}.",
                f"Expected {end - begin}: the file has {size} bytes by its listing.",
                "Run it again; if it was replaced meanwhile, that starts anew.",
            )
        for path, at, value in (
            (self.directory / name, begin, data),
            (self.marks / name, first, b"\x01" * (stop - first)),
        ):
            with open(path, "r+b", buffering=0) as file:
                if os.pwrite(file.fileno(), value, at) != len(value):
                    raise OSError(f"No space left on device: {path}")
                # The mark of a block that a power cut took would be believed.
                os.fdatasync(file.fileno())


def _open(url: str) -> tuple[Any, str]:
    """(file system, path in it) of an address."""
    scheme = url.partition("://")[0]
    if scheme not in _EXTRAS:
        raise UserError(
            f"--model={url}: models are not read from {scheme}://.",
            f"Expected a directory, or {' or '.join(f'{name}://' for name in _EXTRAS)}.",
        )
    try:
        import fsspec

        return fsspec.core.url_to_fs(url.rstrip("/"))
    except ImportError as error:
        raise UserError(
            f"--model={url} cannot be read: {error}.",
            f"What reads {scheme}:// comes with the extra `{_EXTRAS[scheme]}`.",
            f"pip install 'kernjax[{_EXTRAS[scheme]}]'.",
        ) from None
    except Exception as error:  # credentials are looked for here
        raise _unreadable(f"open {url}", error) from error


def _tried(what: str, read: Callable[[], T]) -> T:
    """What `read` gives, at the third attempt at the latest."""
    for pause in (*_PAUSES_S, None):
        try:
            return read()
        except (FileNotFoundError, PermissionError) as error:
            raise _unreadable(what, error) from error
        except Exception as error:  # every client has errors of its own
            if pause is None:
                raise _unreadable(what, error) from error
            time.sleep(pause)
    raise AssertionError("unreachable")


def _unreadable(what: str, error: Exception) -> UserError:
    reason = next((line for line in str(error).splitlines() if line.strip()), "no reason given")
    return UserError(
        f"Could not {what}: {type(error).__name__}: {reason.rstrip('.')[:300]}.",
        "Expected a model's directory that this host may read.",
        "Check the address and the credentials, and run the same command again.",
    )


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_THREADS, thread_name_prefix="fetch")

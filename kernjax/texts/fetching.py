"""Downloads pinned sources: resumed where they stopped, verified, and whole or not there at all."""

from __future__ import annotations

import dataclasses
import http.client
import os
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

from kernjax.base.errors import UserError
from kernjax.base.hashing import sha256_file
from kernjax.texts.sources import Mirror, Source

_BLOCK = 1 << 16
_ATTEMPTS = 4
_TIMEOUT_S = 30.0
# Worth another try: the server is busy or in trouble, not the address wrong.
_PASSING_STATUS = (408, 425, 429, 500, 502, 503, 504)

Progress = Callable[[int], None]


class _Interrupted(Exception):
    """The connection ended before the file did; what came is kept for the next attempt."""


@dataclasses.dataclass(frozen=True)
class Fetched:
    """How one source came to be in the cache: `how` is present, mirror or network."""

    source: Source
    path: Path
    how: str
    size: int


def fetch_all(
    sources: Sequence[Source],
    cache_dir: Path,
    mirror: Mirror | None = None,
    on_bytes: Progress = lambda count: None,
    on_file: Callable[[Fetched], None] = lambda fetched: None,
    pause_s: float = 1.0,
) -> list[Fetched]:
    """Brings every source into `cache_dir`, from there, the mirror or the network, in this order.

    `on_bytes` hears of bytes as they arrive (negative when some had to be thrown away), `on_file`
    of each finished file. `pause_s` is the wait before the second attempt; it doubles. Stops at the
    first source that cannot be had, with a UserError; what was fetched stays.
    """
    done = []
    for source in sources:
        fetched = _fetch(source, cache_dir, mirror, on_bytes, pause_s)
        on_file(fetched)
        done.append(fetched)
    return done


def _fetch(
    source: Source, cache_dir: Path, mirror: Mirror | None, on_bytes: Progress, pause_s: float
) -> Fetched:
    target = cache_dir / source.key
    if target.is_file() and sha256_file(target) == source.sha256:
        size = target.stat().st_size
        on_bytes(size)
        return Fetched(source, target, "present", size)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    if mirror is not None and (found := mirror.find(source)):
        shutil.copyfile(found, part)
        how = "mirror"
        on_bytes(part.stat().st_size)
        if sha256_file(part) != source.sha256:  # it changed under our hands
            part.unlink()
            raise UserError(f"{found} changed while it was copied.", todo="Run it again.")
    else:
        _download(source, part, on_bytes, pause_s)
        how = "network"
    os.replace(part, target)
    return Fetched(source, target, how, target.stat().st_size)


def _download(source: Source, part: Path, on_bytes: Progress, pause_s: float) -> None:
    """Fills `part` with the source's verified bytes, or raises UserError."""
    reason = ""
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(pause_s * 2 ** (attempt - 1))
        counter = _Counter(on_bytes)
        resumed_from = part.stat().st_size if part.is_file() else 0
        try:
            _receive(source, part, resumed_from, counter.add)
        except urllib.error.HTTPError as error:
            reason = f"HTTP {error.code} {error.reason}"
            if error.code == 416:  # what is here is longer than the file: not this file's start
                part.unlink(missing_ok=True)
            elif error.code not in _PASSING_STATUS:
                break
        except urllib.error.URLError as error:
            reason = str(getattr(error.reason, "strerror", None) or error.reason)
        except (_Interrupted, http.client.HTTPException, TimeoutError, ConnectionError) as error:
            reason = str(error) or type(error).__name__
        else:
            found = sha256_file(part)
            if found == source.sha256:
                return
            part.unlink()
            reason = f"its sha256 is {found}"
            if not resumed_from:
                counter.take_back()
                raise UserError(
                    f"{source.address}: {reason}, and was thrown away.",
                    f"Expected {source.sha256}.",
                    "The address serves other bytes than were pinned (a proxy's page, perhaps); "
                    "--mirror=DIR takes the file from a directory.",
                )
            # The first bytes were an earlier run's: once more from the start.
        counter.take_back()
    raise UserError(
        f"{source.address} could not be fetched: {reason}.",
        "Expected the pinned file.",
        "What arrived is kept: the same command resumes it. "
        "Without a network, --mirror=DIR takes the files from a directory.",
    )


class _Counter:
    """Bytes of one attempt, so that a failed one can be taken back from the progress."""

    def __init__(self, on_bytes: Progress) -> None:
        self._on_bytes, self._total = on_bytes, 0

    def add(self, count: int) -> None:
        self._total += count
        self._on_bytes(count)

    def take_back(self) -> None:
        self._on_bytes(-self._total)
        self._total = 0


def _receive(source: Source, part: Path, start: int, on_bytes: Progress) -> None:
    """Appends to `part` from byte `start`; starts over where the server does not resume."""
    if not source.address.startswith(("http://", "https://")):
        raise UserError(f"{source.address!r} is no address.", "Expected http:// or https://.")
    if source.size is not None and start == source.size:
        on_bytes(start)  # complete, and the process died before it was verified
        return
    headers = {"User-Agent": "kernjax", "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    request = urllib.request.Request(source.address, headers=headers)
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
        resumes = start > 0 and response.status == 206
        if resumes and not response.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
            part.unlink()
            raise _Interrupted("the server resumed at another byte than it was asked for")
        length = response.headers.get("Content-Length")
        expected = source.size
        if expected is None and length and length.isdigit():
            expected = int(length) + (start if resumes else 0)
        received = start if resumes else 0
        on_bytes(received)
        with open(part, "ab" if resumes else "wb") as file:
            while block := response.read(_BLOCK):
                file.write(block)
                received += len(block)
                on_bytes(len(block))
                if expected is not None and received > expected:
                    break  # longer than pinned: the hash will say so
        if expected is not None and received < expected:
            raise _Interrupted(f"the connection ended after {received:,} of {expected:,} bytes")

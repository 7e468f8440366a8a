"""Content hashes: the identities that recordings are matched by."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_BLOCK = 1 << 20


def sha256_file(path: str | Path) -> str:
    """Hex SHA-256 of a file's bytes, read in blocks."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def sha256_bytes(*parts: bytes) -> str:
    """Hex SHA-256 of the concatenated parts."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def sha256_json(value: Any) -> str:
    """Hex SHA-256 of a value's canonical JSON (sorted keys, no blanks)."""
    return sha256_bytes(json.dumps(value, sort_keys=True, separators=(",", ":")).encode())


def sha256_files(paths: Iterable[Path]) -> str:
    """One hash over several files: of their names and contents, in name order."""
    entries = sorted((path.name, sha256_file(path)) for path in paths)
    return sha256_json(entries)

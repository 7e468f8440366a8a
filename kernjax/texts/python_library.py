"""This machine's Python as a text: the standard library's code, and its manual's topics as prose.

The texts depend on the Python version, so a corpus made of them is compared with recordings made
on the same machine; its sha256 says so.
"""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
from pathlib import Path

from kernjax.base.errors import UserError

# Test suites repeat themselves; encodings and _sysconfigdata are generated tables; site-packages
# are not the standard library; pydoc_data is the prose.
_SKIPPED_DIRS = {
    "__pycache__",
    "dist-packages",
    "encodings",
    "idle_test",
    "lib-dynload",
    "pydoc_data",
    "site-packages",
    "test",
    "tests",
}
_SMALLEST, _LARGEST = 2_000, 300_000  # bytes
_LONGEST_LINE = 400


def code_documents(max_chars: int) -> list[str]:
    """Python files of the standard library, about `max_chars` characters of them (all, if fewer).

    In an order drawn from their names, the same for every run, so that the first few come from all
    over the library.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    documents: list[str] = []
    taken = 0
    for path in sorted(_files(root), key=lambda path: _shuffled(path.relative_to(root))):
        text = _read(path)
        if text is not None:
            documents.append(text)
            taken += len(text)
            if taken >= max_chars:
                break
    if not documents:
        raise UserError(
            f"{root} holds no Python source files.",
            "Expected the standard library of this Python.",
            "Use another Python, or another corpus.",
        )
    return documents


def prose_documents() -> list[str]:
    """The topics of Python's manual (`pydoc_data`), in order of their names.

    Topics quote each other at length; a paragraph that an earlier topic had is left out, so that
    segments cut from different places stay independent.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        version = ".".join(map(str, sys.version_info[:3]))
        raise UserError(
            f"Python {version} here comes without pydoc_data.",
            "Expected the manual's topics that `help()` reads.",
            "Use another Python, or another corpus.",
        ) from None
    seen: set[str] = set()
    documents = []
    for name in sorted(topics):
        kept = []
        for paragraph in topics[name].strip("\n").split("\n\n"):
            words = " ".join(paragraph.split())
            if words and words not in seen:
                seen.add(words)
                kept.append(paragraph)
        if kept:
            documents.append("\n\n".join(kept) + "\n")
    return documents


def _files(root: Path) -> list[Path]:
    chosen = []
    for directory, subdirectories, names in os.walk(root):
        subdirectories[:] = [name for name in subdirectories if name not in _SKIPPED_DIRS]
        for name in names:
            if name.endswith(".py") and not name.startswith("_sysconfigdata"):
                chosen.append(Path(directory, name))
    return chosen


def _shuffled(name: Path) -> str:
    return hashlib.sha256(name.as_posix().encode()).hexdigest()


def _read(path: Path) -> str | None:
    """The file's text, or None for a tiny or huge one, a table, or not UTF-8."""
    data = path.read_bytes()
    if not _SMALLEST <= len(data) <= _LARGEST:
        return None
    try:
        text = data.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError:
        return None
    return text if max(map(len, text.split("\n"))) <= _LONGEST_LINE else None

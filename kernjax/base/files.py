"""Files that are whole or not there."""

from __future__ import annotations

import os
from pathlib import Path

from kernjax.base.errors import UserError


def check_writable(folder: str | os.PathLike[str]) -> None:
    """UserError unless files can be written there: before a long run, not after it."""
    folder = Path(folder)
    probe = folder / f".probe.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        # Another host may have a process of this number, and the same folder.
        probe.unlink(missing_ok=True)
    except OSError as error:
        raise cannot_write(folder, error) from error


def cannot_write(folder: Path, error: OSError) -> UserError:
    """What to raise for a folder in which nothing can be written."""
    return UserError(
        f"Could not write to {folder}: {error.strerror or error}.",
        todo="Check the flag that names it, its permissions and the free space.",
    )


def write_text(path: Path, text: str) -> Path:
    """Writes the file, whole or not at all; OSError as it comes."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return path

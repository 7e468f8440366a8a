"""One recording as one file: for a repository, a wheel or a mail."""

from __future__ import annotations

import os
import tempfile
import zipfile
from pathlib import Path

from kernjax.base.errors import UserError
from kernjax.recording.files import MARKERS, STAGED
from kernjax.recording.reader import load_recording, locate
from kernjax.recording.storage import storage_errors

# Chunks are compressed already, and a fixed date keeps equal recordings equal byte for byte.
_DATE = (1980, 1, 1, 0, 0, 0)


def pack_recording(path: str | os.PathLike[str], out: str | os.PathLike[str]) -> None:
    """Writes the complete recording at `path` as the local file `out` (.zip), atomically.

    `load_recording(out)` reads it in place. UserError where `path` is no complete recording, or
    `out` exists or is no .zip.
    """
    target = Path(out)
    if target.suffix != ".zip":
        raise UserError(f"{target} does not end in .zip.", "A packed recording is a .zip file.")
    if target.exists():
        raise UserError(f"{target} exists.", todo="Delete it, or choose another name.")
    load_recording(path)  # whole, or nothing is packed
    _, store = locate(path)
    keys = [key for key in store.keys() if not key.startswith((MARKERS, STAGED))]
    with (
        storage_errors("write", str(target)),
        tempfile.NamedTemporaryFile(dir=target.parent, prefix=target.name, delete=False) as file,
    ):
        try:
            with zipfile.ZipFile(file, "w") as archive:
                for key in keys:
                    value = store.read(key)
                    assert value is not None, key
                    archive.writestr(zipfile.ZipInfo(key, _DATE), value)
            file.flush()
            os.fsync(file.fileno())
            os.chmod(file.name, 0o644)
            os.replace(file.name, target)
        except BaseException:
            os.unlink(file.name)
            raise

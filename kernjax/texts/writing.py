"""A corpus on disk: NAME.toml and NAME.npz, small and the same bytes for the same corpus."""

from __future__ import annotations

import io
import json
import os
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import numpy as np

from kernjax.base.errors import UserError
from kernjax.texts.segments import Corpus, Segment


def write_corpus(
    corpus: Corpus, directory: str | Path, *, description: str = "", overwrite: bool = False
) -> Path:
    """Writes the corpus as token ids and returns its manifest's path.

    Ids go into one compressed archive, a member a segment, as uint16 where all are below 65536.
    The manifest is put in place last and names the corpus's sha256, so a half-written corpus is
    never taken for a whole one.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", corpus.name):
        raise UserError(
            f"The corpus name {corpus.name!r} cannot be a file's.",
            "Expected letters, digits, '.', '_' and '-', a letter or digit first.",
        )
    directory = Path(directory)
    manifest, archive = directory / f"{corpus.name}.toml", directory / f"{corpus.name}.npz"
    if manifest.exists() and not overwrite:
        raise UserError(f"{manifest} exists.", todo="--overwrite replaces it.")
    directory.mkdir(parents=True, exist_ok=True)
    manifest.unlink(missing_ok=True)
    narrow = all(segment.tokens.max() < 1 << 16 for segment in corpus.segments)
    dtype = np.uint16 if narrow else np.int32
    arrays = {segment.id: segment.tokens.astype(dtype) for segment in corpus.segments}
    _replace(archive, lambda file: _write_arrays(file, arrays))
    text = _manifest(corpus, archive.name, description)
    _replace(manifest, lambda file: file.write(text.encode("utf-8")))
    return manifest


def _write_arrays(file: BinaryIO, arrays: dict[str, np.ndarray]) -> None:
    """An .npz. Not by np.savez, whose own parameter names could not be segment ids."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, array in arrays.items():
            entry = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            entry.compress_type = zipfile.ZIP_DEFLATED
            data = io.BytesIO()
            np.lib.format.write_array(data, array, allow_pickle=False)
            archive.writestr(entry, data.getvalue(), compresslevel=9)


def _manifest(corpus: Corpus, archive: str, description: str) -> str:
    lines = [f"name = {_quoted(corpus.name)}"]
    if description:
        lines.append(f"description = {_quoted(description)}")
    lines.append(f'sha256 = "{corpus.sha256}"')
    if corpus.tokenizer_sha256:
        lines.append(f'tokenizer_sha256 = "{corpus.tokenizer_sha256}"')
    for segment in corpus.segments:
        lines += ["", *_table(segment, archive)]
    return "\n".join(lines) + "\n"


def _table(segment: Segment, archive: str) -> list[str]:
    lines = [
        "[[segment]]",
        f"id = {_quoted(segment.id)}",
        f"kind = {_quoted(segment.kind)}",
        f"context_len = {segment.context_len}",
        f"score_len = {segment.score_len}",
        f"tokens = {_quoted(f'{archive}#{segment.id}')}",
    ]
    if segment.documents != (0,):
        lines.append(f"documents = {list(segment.documents)}")
    return lines


def _quoted(text: str) -> str:
    # A JSON string is a TOML basic string, but for DEL.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _replace(path: Path, write: Callable[[BinaryIO], object]) -> None:
    part = path.with_name(path.name + ".part")
    try:
        with open(part, "wb") as file:
            write(file)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)

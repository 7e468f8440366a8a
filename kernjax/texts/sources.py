"""Where texts come from: pinned public files, local files, and how they are cleaned."""

from __future__ import annotations

import csv
import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path

from kernjax.base.errors import UserError
from kernjax.base.hashing import sha256_file
from kernjax.base.remote import default_cache_dir as default_cache_dir

_COLUMNS = ("kind", "repository", "revision", "path", "bytes", "sha256")
# Project Gutenberg's own lines around a book; the licence after END names the marks once more.
_BOOK_START = re.compile(r"^\*\*\* ?START OF .*?\*\*\*[ \t]*$", re.MULTILINE)
_BOOK_END = re.compile(r"^(End of (the )?Project Gutenberg|\*\*\* ?END OF )", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Source:
    """One public file, pinned: its bytes are those of `sha256` or it is not used.

    `key` is its path below a cache or mirror directory, `size` its bytes where known, `group` what
    it belongs with (a repository, a book): segments of one depth come from different groups.
    """

    address: str
    sha256: str
    key: str
    kind: str = ""
    group: str = ""
    size: int | None = None

    @classmethod
    def at(cls, address: str, sha256: str) -> Source:
        """A single address outside a table."""
        return cls(address, sha256, key=f"addresses/{sha256}")


def read_table(path: Path, address: str) -> list[Source]:
    """The rows of a tab-separated table with columns kind, repository, revision, path, bytes and
    sha256 (others are ignored). `address` is a template with {repository}, {revision}, {path}.

    Raises UserError naming file and line for missing columns and rows that cannot be right.
    """
    try:
        with open(path, newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{path} cannot be read: {error}.", "Expected a table of sources."
        ) from None
    if not rows:
        raise UserError(f"{path} lists no source.", f"Expected columns {', '.join(_COLUMNS)}.")
    if missing := [column for column in _COLUMNS if column not in rows[0]]:
        raise UserError(
            f"{path} has no column {', '.join(missing)}.",
            f"Expected the tab-separated columns {', '.join(_COLUMNS)}.",
        )
    sources = []
    for line, row in enumerate(rows, start=2):
        where = f"{path}, line {line}"
        values = [row[column] for column in _COLUMNS]
        if any(not value for value in values):
            raise UserError(f"{where} has an empty field.", f"Expected {', '.join(_COLUMNS)}.")
        if not re.fullmatch(r"[0-9a-f]{64}", row["sha256"]) or not row["bytes"].isdigit():
            raise UserError(
                f"{where}: bytes={row['bytes']!r}, sha256={row['sha256']!r}.",
                "Expected a whole number and 64 hexadecimal digits.",
            )
        key = f"{row['repository']}/{row['revision']}/{row['path']}"
        if ".." in Path(key).parts or Path(key).is_absolute():
            raise UserError(f"{where}: {key!r} leaves its directory.", "Expected a relative path.")
        try:
            full = address.format(
                **{name: row[name] for name in ("repository", "revision", "path")}
            )
        except (KeyError, IndexError, ValueError):
            raise UserError(
                f"The address template {address!r} cannot be filled in.",
                "Expected {repository}, {revision} and {path} as its only fields.",
            ) from None
        sources.append(
            Source(full, row["sha256"], key, row["kind"], row["repository"], int(row["bytes"]))
        )
    return sources


class Mirror:
    """A local directory that stands in for the network.

    A file is found under its key (repository/revision/path), or anywhere below the directory under
    any name by its size and sha256.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        if not self.directory.is_dir():
            raise UserError(
                f"--mirror={str(directory)!r} is not a directory.",
                "Expected one with the sources as repository/revision/path, or in any layout.",
            )
        self._by_size: dict[int, list[Path]] | None = None

    def find(self, source: Source) -> Path | None:
        """The file with the source's bytes, or None."""
        direct = self.directory / source.key
        if direct.is_file() and sha256_file(direct) == source.sha256:
            return direct
        if self._by_size is None:
            self._by_size = {}
            for path in sorted(self.directory.rglob("*")):
                if path.is_file():
                    self._by_size.setdefault(path.stat().st_size, []).append(path)
        if source.size is None:
            candidates = [path for paths in self._by_size.values() for path in paths]
        else:
            candidates = self._by_size.get(source.size, [])
        return next((path for path in candidates if sha256_file(path) == source.sha256), None)


def locate(
    sources: Iterable[Source], cache_dir: Path, mirror: Mirror | None, corpus: str
) -> dict[Source, Path]:
    """Source -> verified local file, from the mirror or the cache; never the network.

    Raises UserError that says how many are missing and how to fetch them.
    """
    found: dict[Source, Path] = {}
    missing: list[Source] = []
    for source in sources:
        path = mirror.find(source) if mirror else None
        cached = cache_dir / source.key
        if path is None and cached.is_file() and sha256_file(cached) == source.sha256:
            path = cached
        if path is None:
            missing.append(source)
        else:
            found[source] = path
    if missing:
        total = len(missing) + len(found)
        raise UserError(
            f"Corpus {corpus!r}: {len(missing)} of {total} sources are not on this machine "
            f"(first: {missing[0].key}; looked in {cache_dir}"
            f"{f' and {mirror.directory}' if mirror else ''}).",
            todo=f"`python -m kernjax.corpus fetch --corpus={corpus}` downloads them; "
            "--mirror=DIR takes them from a directory.",
        )
    return found


def read_text(path: Path) -> str:
    """A file's text: UTF-8 without byte order mark, lines ending in \\n, and a Project Gutenberg
    book without the header and licence around it."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 text (byte {error.start}).", "Expected a text file."
        ) from None
    return cut_book(text.replace("\r\n", "\n").replace("\r", "\n"))


def cut_book(text: str) -> str:
    """The book between Project Gutenberg's START and END lines; any other text as it is.

    Raises UserError when only one of the two lines is there: the file is cut.
    """
    start = _BOOK_START.search(text)
    if start is None:
        return text
    end = _BOOK_END.search(text, start.end())
    if end is None:
        raise UserError(
            f"The book has {start[0]!r} but no END line.",
            "Expected Project Gutenberg's two lines around it.",
            "The file seems to be cut; fetch it again.",
        )
    return text[start.end() : end.start()].strip("\n") + "\n"

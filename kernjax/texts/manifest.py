"""Corpus manifests: what a corpus is made of, read from TOML and checked.

Three ways to say what a segment is, which may not be mixed in one manifest but the first two:

    name = "mine"
    tokenizer_sha256 = "..."         # optional: of the tokenizer.json the ids came from
    sha256 = "..."                   # optional: the corpus's own, checked when it is loaded

    [[segment]]                      # 1. token ids
    id = "letter"
    kind = "prose"
    context_len = 512                # prefilled
    score_len = 128                  # decoded one by one
    tokens = "ids.npy"               # int32 [context_len + score_len + 1]; "ids.npz#member" too
    documents = [0, 77]              # optional: where documents start

    [[segment]]                      # 2. a text, which needs the model's tokenizer
    id = "source"
    kind = "code"
    context_len = 2048
    score_len = 128
    source = "module.py"             # a file beside the manifest, or an address
    sha256 = "..."                   # of the file's bytes; an address must have it
    offset = 1000                    # optional: characters to skip

    [sources]                        # 3. many segments cut from many texts
    table = "sources.tsv"            # kind, repository, revision, path, bytes, sha256
    address = "https://host/{repository}/{revision}/{path}"
    # or: python = true              # this machine's standard library and manual

    [[cut]]                          # how many, how long; see texts/cutting.py
    kind = "prose"
    context_len = 2048
    score_len = 512
    count = 2
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kernjax.base.errors import UserError
from kernjax.base.resources import data_dir
from kernjax.texts.cutting import Cut
from kernjax.texts.sources import Source, read_table

_TOP = ("name", "description", "sha256", "tokenizer_sha256", "segment", "sources", "cut")
_LAYOUT = ("id", "kind", "context_len", "score_len")
_IDS = (*_LAYOUT, "tokens", "documents")
_TEXT = (*_LAYOUT, "source", "sha256", "offset")
_CUT = ("kind", "context_len", "score_len", "count")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclasses.dataclass(frozen=True)
class Entry:
    """One [[segment]] as written: `tokens` names ids, or `source` a text."""

    id: str
    kind: str
    context_len: int
    score_len: int
    tokens: str | None = None
    documents: tuple[int, ...] = (0,)
    source: str | None = None
    sha256: str | None = None
    offset: int = 0

    @property
    def length(self) -> int:
        """Tokens of the segment."""
        return self.context_len + self.score_len + 1

    @property
    def public_source(self) -> Source | None:
        """The source to fetch, None where it is a file or ids."""
        if self.source is None or "://" not in self.source or self.sha256 is None:
            return None
        return Source.at(self.source, self.sha256)


@dataclasses.dataclass(frozen=True)
class Manifest:
    """A manifest as written. Either `entries` or `cuts` is empty."""

    path: Path
    name: str
    description: str = ""
    sha256: str | None = None
    tokenizer_sha256: str | None = None
    entries: tuple[Entry, ...] = ()
    cuts: tuple[Cut, ...] = ()
    table: str | None = None
    address: str | None = None
    is_python: bool = False

    @property
    def needs_tokenizer(self) -> bool:
        """Whether some of it is text."""
        return bool(self.cuts) or any(entry.source is not None for entry in self.entries)

    def public_sources(self) -> list[Source]:
        """Everything that is fetched from a public address, in order, each once."""
        if self.table is not None and self.address is not None:
            return read_table(self.path.parent / self.table, self.address)
        found = (entry.public_source for entry in self.entries)
        return list(dict.fromkeys(source for source in found if source is not None))

    def strata(self) -> dict[tuple[str, int], tuple[int, int]]:
        """(kind, context_len) -> (number of segments, tokens), by kind, then depth."""
        table: dict[tuple[str, int], tuple[int, int]] = {}
        pieces = [(cut.kind, cut.context_len, cut.count, cut.length) for cut in self.cuts]
        pieces += [(entry.kind, entry.context_len, 1, entry.length) for entry in self.entries]
        for kind, context_len, count, length in pieces:
            segments, tokens = table.get((kind, context_len), (0, 0))
            table[kind, context_len] = (segments + count, tokens + count * length)
        return dict(sorted(table.items()))


def known_corpora() -> dict[str, Path]:
    """Name -> manifest of the corpora that come with kernjax."""
    return {path.stem: path for path in sorted(data_dir("corpora").glob("*.toml"))}


def find_manifest(name_or_path: str | Path) -> Path:
    """The manifest of a known corpus, a manifest's own path, or a directory's only manifest."""
    known = known_corpora()
    if str(name_or_path) in known:
        return known[str(name_or_path)]
    path = Path(name_or_path)
    if path.is_file():
        return path
    if path.is_dir():
        inside = sorted(path.glob("*.toml"))
        if len(inside) == 1:
            return inside[0]
        raise UserError(
            f"{path} holds {len(inside)} manifests.",
            "Expected one .toml file in a corpus's directory.",
            "Name the manifest itself.",
        )
    near = difflib.get_close_matches(str(name_or_path), known, n=1)
    raise UserError(
        f"There is no corpus {str(name_or_path)!r}.",
        f"Known: {', '.join(known) or 'none'}; or the path of a manifest.",
        f"Did you mean {near[0]!r}?" if near else "",
    )


def read_manifest(path: Path) -> Manifest:
    """The manifest in a TOML file. Raises UserError for whatever is not as described above."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not TOML: {error}.", "Expected a corpus manifest.") from None
    _check_keys(data, _TOP, ("name",), str(path))
    for key in ("name", "description", "sha256", "tokenizer_sha256"):
        if key in data:
            _check_type(data[key], str, key, str(path))
    for key in ("sha256", "tokenizer_sha256"):
        _check_sha256(data.get(key), key, str(path))
    segments, cuts = data.get("segment", []), data.get("cut", [])
    for key, value in (("segment", segments), ("cut", cuts)):
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise UserError(f"{path}: {key} is no list of tables.", f"Expected [[{key}]].")
    if bool(segments) == bool(cuts) or bool(cuts) != ("sources" in data):
        raise UserError(
            f"{path} has {len(segments)} [[segment]], {len(cuts)} [[cut]] and "
            f"{'a' if 'sources' in data else 'no'} [sources].",
            "Expected either [[segment]] tables, or [sources] with [[cut]] tables.",
        )
    return Manifest(
        path=path,
        name=data["name"],
        description=data.get("description", ""),
        sha256=data.get("sha256"),
        tokenizer_sha256=data.get("tokenizer_sha256"),
        entries=tuple(_entry(table, path, index) for index, table in enumerate(segments)),
        cuts=tuple(_cut(table, path, index) for index, table in enumerate(cuts)),
        **_sources(data.get("sources"), path),
    )


def _entry(table: Mapping[str, Any], path: Path, index: int) -> Entry:
    where = f"{path}, segment {table.get('id', index)!r}"
    if ("tokens" in table) == ("source" in table):
        raise UserError(
            f"{where} has {'both' if 'tokens' in table else 'neither'} tokens and source.".replace(
                "neither tokens and", "neither tokens nor"
            ),
            "Expected one of the two.",
        )
    if "tokens" in table:
        _check_keys(table, _IDS, (*_LAYOUT, "tokens"), where)
        _check_type(table["tokens"], str, "tokens", where)
    else:
        _check_keys(table, _TEXT, (*_LAYOUT, "source"), where)
        _check_type(table["source"], str, "source", where)
        _check_sha256(table.get("sha256"), "sha256", where)
        _check_count(table.get("offset", 0), "offset", where, 0)
        if "://" in table["source"] and "sha256" not in table:
            raise UserError(
                f"{where}: {table['source']} has no sha256.",
                "A public address is used only when its bytes are pinned.",
            )
    _check_layout(table, where)
    documents = table.get("documents", [0])
    _check_type(documents, list, "documents", where)
    return Entry(**{**table, "documents": tuple(documents)})


def _cut(table: Mapping[str, Any], path: Path, index: int) -> Cut:
    where = f"{path}, cut {index}"
    _check_keys(table, _CUT, _CUT, where)
    _check_layout(table, where)
    _check_count(table["count"], "count", where, 1)
    return Cut(**table)


def _sources(table: Any, path: Path) -> dict[str, Any]:
    if table is None:
        return {}
    where = f"{path}, sources"
    _check_type(table, dict, "sources", where)
    if "python" in table:
        _check_keys(table, ("python",), ("python",), where)
        if table["python"] is not True:
            raise UserError(f"{where}: python={table['python']!r}.", "Expected true.")
        return {"is_python": True}
    _check_keys(table, ("table", "address"), ("table", "address"), where)
    for key in ("table", "address"):
        _check_type(table[key], str, key, where)
    return {"table": table["table"], "address": table["address"]}


def _check_keys(
    table: Mapping[str, Any], known: Sequence[str], required: Sequence[str], where: str
) -> None:
    if missing := [key for key in required if key not in table]:
        raise UserError(f"{where} has no {', '.join(missing)}.", f"Expected {', '.join(known)}.")
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            raise UserError(
                f"{where}: unknown key {key!r}.",
                f"Did you mean {near[0]!r}?" if near else f"Expected {', '.join(known)}.",
            )


def _check_layout(table: Mapping[str, Any], where: str) -> None:
    for key in ("id", "kind"):
        if key in table:
            _check_type(table[key], str, key, where)
    _check_count(table["context_len"], "context_len", where, 1)
    _check_count(table["score_len"], "score_len", where, 0)


def _check_count(value: Any, key: str, where: str, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UserError(f"{where}: {key}={value!r}.", f"Expected a whole number from {least} up.")


def _check_type(value: Any, kind: type, key: str, where: str) -> None:
    if not isinstance(value, kind):
        names: dict[type, str] = {str: "text", list: "a list", dict: "a table"}
        raise UserError(f"{where}: {key}={value!r}.", f"Expected {names[kind]}.")


def _check_sha256(value: Any, key: str, where: str) -> None:
    if value is not None and not (isinstance(value, str) and _SHA256.fullmatch(value)):
        raise UserError(f"{where}: {key}={value!r}.", "Expected 64 hexadecimal digits.")

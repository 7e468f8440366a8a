"""From a manifest to the corpus: reads ids, or tokenises and cuts texts."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np

from kernjax.base.errors import UserError
from kernjax.base.hashing import sha256_file
from kernjax.texts import python_library
from kernjax.texts.cutting import Group, cut_segments
from kernjax.texts.manifest import Entry, Manifest, find_manifest, read_manifest
from kernjax.texts.segments import Corpus, Segment
from kernjax.texts.sources import Mirror, Source, default_cache_dir, locate, read_text
from kernjax.texts.tokenizing import Tokenizer, load_tokenizer

# More than any tokenizer packs into a token on average, so that there is always text enough.
_CHARS_PER_TOKEN = 8


def load_corpus(
    name_or_path: str | Path,
    tokenizer: str | Path | Tokenizer | None = None,
    *,
    vocab_size: int | None = None,
    cache_dir: str | Path | None = None,
    mirror: str | Path | None = None,
) -> Corpus:
    """The corpus of a known name or a manifest.

    `tokenizer`: a model directory or tokenizer.json (or one already loaded). A corpus of texts
    needs it; for one of ids it may lack, and where both it and the manifest name a tokenizer the
    two must be the same. `vocab_size` is the model's: ids must lie below it. Fetched sources are
    read from `mirror` and `cache_dir` (default: the user's cache), never from the network.
    """
    manifest = read_manifest(find_manifest(name_or_path))
    if manifest.needs_tokenizer:
        corpus = _from_texts(
            manifest,
            _loaded(manifest, tokenizer),
            Path(cache_dir) if cache_dir else default_cache_dir(),
            Mirror(mirror) if mirror else None,
        )
    else:
        if mirror:
            raise UserError(
                f"--mirror={mirror} is given, and corpus {manifest.name!r} is of ids.",
                "A mirror stands for the addresses that a corpus of texts is fetched from.",
                "Drop it.",
            )
        _check_tokenizer(manifest, _tokenizer_hash(tokenizer))
        arrays = _Arrays(manifest.path.parent)
        segments = [_from_ids(entry, arrays) for entry in manifest.entries]
        corpus = Corpus.build(manifest.name, segments, manifest.tokenizer_sha256)
    if manifest.sha256 is not None and corpus.sha256 != manifest.sha256:
        raise UserError(
            f"Corpus {manifest.name!r} has sha256 {corpus.sha256}.",
            f"Expected {manifest.sha256}, which {manifest.path} names.",
            "The ids were changed or damaged: take the corpus's files anew.",
        )
    if vocab_size is not None:
        corpus.check_vocabulary(vocab_size)
    return corpus


def _from_texts(
    manifest: Manifest, tokenizer: Tokenizer, cache_dir: Path, mirror: Mirror | None
) -> Corpus:
    sources = locate(manifest.public_sources(), cache_dir, mirror, manifest.name)
    if manifest.cuts:
        groups = (
            _python_groups(manifest, tokenizer)
            if manifest.is_python
            else _table_groups(sources, tokenizer)
        )
        segments = cut_segments(manifest.cuts, groups)
    else:
        segments = _from_entries(manifest, tokenizer, sources)
    return Corpus.build(manifest.name, segments, tokenizer.sha256)


def _python_groups(manifest: Manifest, tokenizer: Tokenizer) -> dict[str, list[Group]]:
    groups = {}
    for kind in dict.fromkeys(cut.kind for cut in manifest.cuts):
        needed = sum(cut.count * cut.length for cut in manifest.cuts if cut.kind == kind)
        if kind == "code":
            documents = python_library.code_documents(needed * _CHARS_PER_TOKEN)
        elif kind == "prose":
            documents = python_library.prose_documents()
        else:
            raise UserError(f"{manifest.path}: kind={kind!r}.", "Python has prose and code only.")
        groups[kind] = [Group("python", tokenizer.encode_all(documents))]
    return groups


def _table_groups(sources: dict[Source, Path], tokenizer: Tokenizer) -> dict[str, list[Group]]:
    """kind -> groups in the table's order, each with its files in the table's order."""
    files: dict[tuple[str, str], list[Path]] = {}
    for source, path in sources.items():
        files.setdefault((source.kind, source.group), []).append(path)
    groups: dict[str, list[Group]] = {}
    for (kind, name), paths in files.items():
        documents = tokenizer.encode_all([read_text(path) for path in paths])
        groups.setdefault(kind, []).append(Group(name, documents))
    return groups


def _from_entries(
    manifest: Manifest, tokenizer: Tokenizer, sources: dict[Source, Path]
) -> list[Segment]:
    arrays = _Arrays(manifest.path.parent)
    segments = []
    taken: dict[Path, list[tuple[int, int, str]]] = {}  # file -> (first, last character, id)
    for entry in manifest.entries:
        if entry.source is None:
            segments.append(_from_ids(entry, arrays))
            continue
        public = entry.public_source
        path = sources[public] if public else _local_file(manifest, entry)
        ids, chars = tokenizer.encode_start(read_text(path)[entry.offset :], entry.length)
        if len(ids) < entry.length:
            raise UserError(
                f"Segment {entry.id!r}: {entry.source} has {len(ids):,} tokens from character "
                f"{entry.offset:,} on.",
                f"Expected {entry.length:,}: context_len + score_len + 1.",
                "Use a longer text or a shorter context.",
            )
        span = (entry.offset, entry.offset + chars, entry.id)
        for first, last, other in taken.setdefault(path, []):
            if span[0] < last and first < span[1]:
                raise UserError(
                    f"Segments {other!r} and {entry.id!r} overlap in {entry.source} (characters "
                    f"{first:,} to {last:,} and {span[0]:,} to {span[1]:,}).",
                    "Expected each from its own place in the text.",
                    f"Give {entry.id!r} an offset of at least {last:,}.",
                )
        taken[path].append(span)
        segments.append(Segment(entry.id, entry.kind, entry.context_len, entry.score_len, ids))
    return segments


def _from_ids(entry: Entry, arrays: _Arrays) -> Segment:
    assert entry.tokens is not None
    tokens = arrays.read(entry.tokens, entry.id)
    return Segment(
        entry.id, entry.kind, entry.context_len, entry.score_len, tokens, entry.documents
    )


def _local_file(manifest: Manifest, entry: Entry) -> Path:
    assert entry.source is not None
    path = manifest.path.parent / entry.source
    if not path.is_file():
        raise UserError(
            f"Segment {entry.id!r}: {path} does not exist.",
            "Expected a file beside the manifest, or an address.",
        )
    if entry.sha256 is not None and (found := sha256_file(path)) != entry.sha256:
        raise UserError(
            f"Segment {entry.id!r}: {path} has sha256 {found}.",
            f"Expected {entry.sha256}.",
            "The file was changed: restore it, or pin the new one.",
        )
    return path


def _loaded(manifest: Manifest, tokenizer: str | Path | Tokenizer | None) -> Tokenizer:
    if tokenizer is None:
        raise UserError(
            f"Corpus {manifest.name!r} is made of texts.",
            "Expected a model whose tokenizer.json turns them into ids.",
            "Name the model (--model), or build the corpus once (kernjax.corpus build).",
        )
    loaded = tokenizer if isinstance(tokenizer, Tokenizer) else load_tokenizer(tokenizer)
    _check_tokenizer(manifest, loaded.sha256)
    return loaded


def _tokenizer_hash(tokenizer: str | Path | Tokenizer | None) -> str | None:
    if tokenizer is None or isinstance(tokenizer, Tokenizer):
        return tokenizer.sha256 if tokenizer else None
    path = Path(tokenizer)
    file = path / "tokenizer.json" if path.is_dir() else path
    return sha256_file(file) if file.is_file() else None


def _check_tokenizer(manifest: Manifest, found: str | None) -> None:
    expected = manifest.tokenizer_sha256
    if found is not None and expected is not None and found != expected:
        raise UserError(
            f"The model's tokenizer.json has sha256 {found}.",
            f"Corpus {manifest.name!r} was made with {expected}: its ids mean other words.",
            "Build the corpus with this model's tokenizer (kernjax.corpus build), or use the "
            "model it was made for.",
        )


class _Arrays:
    """Reads `ids.npy` and `ids.npz#member` beside a manifest, each file once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[Path, dict[str, np.ndarray]] = {}

    def read(self, reference: str, segment: str) -> np.ndarray:
        name, _, member = reference.partition("#")
        path = self._directory / name
        where = f"Segment {segment!r}: {path}"
        if path not in self._files:
            if not path.is_file():
                raise UserError(f"{where} does not exist.", "Expected the segment's token ids.")
            try:
                self._files[path] = _members(path)
            except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
                raise UserError(
                    f"{where} cannot be read: {reason}.", "Expected a NumPy array of token ids."
                ) from None
        members = self._files[path]
        if member not in members:
            if "" in members:
                raise UserError(f"{where} is one array, without member {member!r}.")
            names = list(members)
            raise UserError(
                f"{where} has no member {member!r}.",
                f"It holds {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}.",
                f"Write the reference as {name}#MEMBER.",
            )
        return members[member]


def _members(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an .npz by name; that of an .npy under the empty name."""
    loaded = np.load(path, allow_pickle=False)
    if isinstance(loaded, np.ndarray):
        return {"": loaded}
    with loaded:
        return dict(loaded)

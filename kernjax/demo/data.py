"""The demo's training text: public-domain books as prose, the standard library as code.

Both kinds are split into training and held-out text by rules that depend on names only: the last
part of the alphabetically first book, and every module whose name's hash falls in one class of
many. Tokens are cached as uint16 arrays beside a data card with counts by source.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import sys
import sysconfig
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from kernjax.base.errors import UserError
from kernjax.base.hashing import sha256_bytes
from kernjax.demo.tokenizer import encode_documents, save_tokenizer, train_tokenizer

KINDS = ("prose", "code")
HELD_OUT_TAIL = 0.08  # of the first book
HELD_OUT_CLASSES = 25  # one module in so many is held out
# Not code written to be read (tests, generated tables), or not part of every installation.
SKIPPED = (
    "test",
    "tests",
    "idle_test",
    "idlelib",
    "lib2to3",
    "pydoc_data",
    "encodings",
    "site-packages",
    "dist-packages",
    "__pycache__",
)
_START = re.compile(r"\*\*\* ?START OF (?:THE|THIS) PROJECT GUTENBERG.*?\*\*\*", re.S)
_END = re.compile(r"\*\*\* ?END OF (?:THE|THIS) PROJECT GUTENBERG")


@dataclasses.dataclass(frozen=True)
class Document:
    """One book (or a part of one) or one module."""

    name: str
    kind: str
    held_out: bool
    text: str


@dataclasses.dataclass(frozen=True)
class TokenData:
    """Token streams uint16 [tokens] by kind, the tokenizer, and the data card."""

    train: dict[str, np.ndarray]
    held_out: dict[str, np.ndarray]
    tokenizer: Tokenizer
    card: dict


def read_books(directory: Path) -> list[Document]:
    """The `*.txt` books of a directory without Project Gutenberg's header and licence."""
    paths = sorted(directory.glob("*.txt")) if directory.is_dir() else []
    if not paths:
        raise UserError(
            f"--books={directory} holds no *.txt files.",
            "Expected plain-text books.",
            "Fetch them with `python -m kernjax.corpus fetch article`, or name another directory.",
        )
    documents = []
    for path in paths:
        text = book_body(path.read_text(encoding="utf-8", errors="replace"))
        if path == paths[0]:
            cut = text.rfind("\n\n", 0, int(len(text) * (1 - HELD_OUT_TAIL))) + 2
            documents.append(Document(f"{path.stem} (end)", "prose", True, text[cut:]))
            text = text[:cut]
        documents.append(Document(path.stem, "prose", False, text))
    return documents


def book_body(text: str) -> str:
    """What stands between Project Gutenberg's START and END lines; all of it where there are none.

    Line ends become "\\n", and runs of blank lines shrink to two.
    """
    text = text.replace("\r\n", "\n").removeprefix("\ufeff")
    start, end = _START.search(text), _END.search(text)
    body = text[start.end() if start else 0 : end.start() if end else len(text)]
    return re.sub(r"\n{4,}", "\n\n\n", body).strip() + "\n"


def read_modules(directory: Path | None = None) -> list[Document]:
    """The Python modules under `directory` (default: the running interpreter's library)."""
    root = directory or Path(sysconfig.get_path("stdlib"))
    documents = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        parts = name.split("/")
        # config-*/ and _sysconfigdata hold the build machine's paths.
        if any(part in SKIPPED or part.startswith(("config-", "_sysconfigdata")) for part in parts):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip():
            digest = int(hashlib.sha256(name.encode()).hexdigest(), 16)
            held_out = digest % HELD_OUT_CLASSES == 0
            documents.append(Document(name, "code", held_out, text))
    if not documents:
        raise UserError(f"{root} holds no Python modules.", "Expected source files.")
    return documents


def prepare(
    books: Path, cache: Path, *, seed: int, vocab_size: int, modules: Path | None = None
) -> TokenData:
    """Token streams for training, from `cache` when it was made from the same texts and settings.

    Writes tokenizer.json, {train,held_out}.{prose,code}.npy and data.json there; data.json is
    written last and names the texts' hash, so that an interrupted preparation is repeated.
    """
    documents = read_books(books) + read_modules(modules)
    identity = sha256_bytes(
        json.dumps([seed, vocab_size]).encode(),
        *(f"{d.name}\0{d.held_out}\0{d.text}\0".encode() for d in documents),
    )
    card_path = cache / "data.json"
    if not card_path.exists() or json.loads(card_path.read_text())["texts_sha256"] != identity:
        card_path.unlink(missing_ok=True)
        _write_cache(documents, cache, seed=seed, vocab_size=vocab_size, identity=identity)

    def streams(split: str) -> dict[str, np.ndarray]:
        return {kind: np.load(cache / f"{split}.{kind}.npy", mmap_mode="r") for kind in KINDS}

    return TokenData(
        streams("train"),
        streams("held_out"),
        Tokenizer.from_file(str(cache / "tokenizer.json")),
        json.loads(card_path.read_text()),
    )


def _write_cache(
    documents: list[Document], cache: Path, *, seed: int, vocab_size: int, identity: str
) -> None:
    texts = [[d.text for d in documents if d.kind == k and not d.held_out] for k in KINDS]
    tokenizer = train_tokenizer(texts, seed=seed, vocab_size=vocab_size)
    save_tokenizer(tokenizer, cache)
    sources = []
    for split, held_out in (("train", False), ("held_out", True)):
        for kind in KINDS:
            chosen = [d for d in documents if d.kind == kind and d.held_out == held_out]
            tokens = encode_documents(tokenizer, [d.text for d in chosen])
            np.save(cache / f"{split}.{kind}.npy", tokens)
            row = {
                "split": split,
                "kind": kind,
                "documents": len(chosen),
                "bytes": sum(len(d.text.encode()) for d in chosen),
                "tokens": len(tokens),
            }
            if kind == "prose" or held_out:
                row["names"] = [d.name for d in chosen]
            sources.append(row)
    version = ".".join(map(str, sys.version_info[:3]))
    card = {
        "prose": "books in plain text, Project Gutenberg's header and licence removed",
        "code": f"the standard library of CPython {version}, without tests and generated tables",
        "seed": seed,
        "vocab_size": vocab_size,
        "texts_sha256": identity,
        "sources": sources,
    }
    (cache / "data.json").write_text(json.dumps(card, indent=1))


def sample_windows(tokens: np.ndarray, first: int, count: int, length: int) -> np.ndarray:
    """int32 [count, length + 1]: windows number `first`, `first + 1`, ... of a fixed sequence.

    Offsets follow the multiples of the golden ratio modulo one: they cover the stream evenly from
    any start, without state, so a resumed run sees the windows it would have seen.
    """
    room = len(tokens) - length - 1
    if room < 0:
        raise UserError(
            f"The text has {len(tokens)} tokens.", f"Expected more than {length + 1} for a window."
        )
    golden = (5**0.5 - 1) / 2
    starts = [int((index * golden) % 1.0 * (room + 1)) for index in range(first, first + count)]
    return np.stack([np.asarray(tokens[s : s + length + 1], np.int32) for s in starts])

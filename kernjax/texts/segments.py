"""Segments and corpora: the token ids a recording is made on, and their identity."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from kernjax.base.errors import UserError
from kernjax.base.hashing import sha256_json

_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclasses.dataclass(frozen=True, eq=False)
class Segment:
    """One independent piece of text: `context_len` tokens are prefilled, `score_len` decoded.

    `tokens` int32 [context_len + score_len + 1], read-only: every scored row has a target, the
    prefill's last position (row `context_len - 1`) and the decode steps (rows `context_len` to
    `context_len + score_len - 1`). `documents` are the token indices where a document, or the rest
    of one, starts; 0 is always the first.
    """

    id: str
    kind: str
    context_len: int
    score_len: int
    tokens: np.ndarray
    documents: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        for field in ("id", "kind"):
            value = getattr(self, field)
            if not isinstance(value, str) or not _WORD.fullmatch(value):
                raise UserError(
                    f"Segment {self.id!r}: {field}={value!r}.",
                    "Expected letters, digits, '.', '_' and '-', a letter or digit first.",
                )
        for field, least in (("context_len", 1), ("score_len", 0)):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise UserError(
                    f"Segment {self.id!r}: {field}={value!r}.",
                    f"Expected a whole number of at least {least}.",
                )
        object.__setattr__(self, "tokens", self._checked_tokens())
        object.__setattr__(self, "documents", self._checked_documents())

    @property
    def length(self) -> int:
        """Tokens held: context_len + score_len + 1."""
        return self.context_len + self.score_len + 1

    def to_dict(self) -> dict[str, Any]:
        """The segment without its tokens, as a recording's manifest keeps it."""
        return {
            "id": self.id,
            "kind": self.kind,
            "context_len": self.context_len,
            "score_len": self.score_len,
            "documents": list(self.documents),
        }

    def _checked_tokens(self) -> np.ndarray:
        tokens = np.asarray(self.tokens)
        where = f"Segment {self.id!r}: tokens"
        if tokens.dtype not in (np.int32, np.uint16):
            raise UserError(f"{where} have dtype {tokens.dtype}.", "Expected int32 (or uint16).")
        if tokens.shape != (self.length,):
            raise UserError(
                f"{where} have shape {list(tokens.shape)}.",
                f"Expected [{self.length}]: context_len={self.context_len} + "
                f"score_len={self.score_len} + 1, so that the last scored row has a target.",
            )
        tokens = tokens.astype(np.int32)
        if tokens.min() < 0:
            raise UserError(f"{where} hold {tokens.min()}.", "Expected ids of at least 0.")
        tokens.setflags(write=False)
        return tokens

    def _checked_documents(self) -> tuple[int, ...]:
        starts = tuple(self.documents)
        good = all(isinstance(s, int) and 0 <= s < self.length for s in starts)
        if not good or list(starts) != sorted(set(starts)) or starts[:1] != (0,):
            raise UserError(
                f"Segment {self.id!r}: documents={list(starts)}.",
                f"Expected token indices from 0 to {self.length - 1}, ascending, 0 first.",
            )
        return starts


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """Segments of one name. `sha256` is over ids and layout, whatever the files were called.

    `tokenizer_sha256` is that of the tokenizer.json the ids came from, None where unknown.
    """

    name: str
    segments: tuple[Segment, ...]
    sha256: str
    tokenizer_sha256: str | None = None

    @classmethod
    def build(
        cls, name: str, segments: Sequence[Segment], tokenizer_sha256: str | None = None
    ) -> Corpus:
        """A corpus with its hash; refuses an empty one, a repeated id or repeated tokens."""
        if not segments:
            raise UserError(f"Corpus {name!r} has no segments.", "Expected at least one.")
        by_id: dict[str, Segment] = {}
        by_tokens: dict[bytes, str] = {}
        for segment in segments:
            if segment.id in by_id:
                raise UserError(
                    f"Corpus {name!r}: the segment id {segment.id!r} occurs twice.",
                    "Expected every segment to have an id of its own.",
                )
            by_id[segment.id] = segment
            other = by_tokens.setdefault(segment.tokens.tobytes(), segment.id)
            if other != segment.id:
                raise UserError(
                    f"Corpus {name!r}: segments {other!r} and {segment.id!r} hold the same tokens.",
                    "Expected each to come from its own place in the text: the statistics count "
                    "segments as independent.",
                )
        return cls(name, tuple(segments), corpus_sha256(segments), tokenizer_sha256)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises UserError when an id is not below the model's `vocab_size`."""
        for segment in self.segments:
            index = int(segment.tokens.argmax())
            if segment.tokens[index] >= vocab_size:
                raise UserError(
                    f"Corpus {self.name!r}, segment {segment.id!r}: token id "
                    f"{segment.tokens[index]} at index {index} is outside the model's vocabulary.",
                    f"Expected ids below {vocab_size}.",
                    "Build the corpus with this model's tokenizer (kernjax.corpus build).",
                )

    def strata(self) -> dict[tuple[str, int], list[Segment]]:
        """(kind, context_len) -> its segments, in order of kind, then depth."""
        table: dict[tuple[str, int], list[Segment]] = {}
        for segment in self.segments:
            table.setdefault((segment.kind, segment.context_len), []).append(segment)
        return dict(sorted(table.items()))


def corpus_sha256(segments: Sequence[Segment]) -> str:
    """Hex SHA-256 over the segments' layout and ids (int32, little endian), in order."""
    layout = []
    for segment in segments:
        ids = hashlib.sha256(segment.tokens.astype("<i4").tobytes()).hexdigest()
        layout.append({**segment.to_dict(), "tokens": ids})
    return sha256_json(layout)

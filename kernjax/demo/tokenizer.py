"""The demo's tokenizer: byte-level BPE of a small vocabulary, trained on prose and code alike.

A small vocabulary (all 256 bytes, one special token, the most frequent merges) keeps most of the
probability mass inside a position's top 20, which is what recordings keep.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
VOCAB_SIZE = 384
SAMPLE_BYTES = 2_000_000  # per kind of text
_PIECE = 4096  # characters a sampled piece has
_ENCODE_PIECE = 1 << 16  # characters encoded in one call


def train_tokenizer(
    texts: Sequence[Sequence[str]], *, seed: int, vocab_size: int = VOCAB_SIZE
) -> Tokenizer:
    """A byte-level BPE tokenizer; the same texts and seed give the same merges.

    `texts` holds one list of documents per kind; each kind gives the same number of characters.
    Id 0 is the end of text.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    rng = np.random.default_rng(seed)
    pieces = [piece for documents in texts for piece in _sample(documents, rng)]
    tokenizer.train_from_iterator(pieces, trainer=trainer)
    return tokenizer


def _sample(documents: Sequence[str], rng: np.random.Generator) -> Iterable[str]:
    """Pieces from places drawn evenly over all characters of the documents."""
    ends = np.cumsum([len(text) for text in documents])
    for place in rng.integers(0, ends[-1], SAMPLE_BYTES // _PIECE):
        index = int(np.searchsorted(ends, place, side="right"))
        start = int(place) - (int(ends[index - 1]) if index else 0)
        yield documents[index][start : start + _PIECE]


def encode_documents(tokenizer: Tokenizer, documents: Sequence[str]) -> np.ndarray:
    """uint16 ids of the documents, each followed by the end of text.

    Long documents are encoded in pieces cut at line ends, which keeps memory small.
    """
    end = np.array([tokenizer.token_to_id(END_OF_TEXT)], np.uint16)
    parts: list[np.ndarray] = []
    for text in documents:
        for piece in tokenizer.encode_batch(_pieces(text), add_special_tokens=False):
            parts.append(np.asarray(piece.ids, np.uint16))
        parts.append(end)
    return np.concatenate(parts)


def _pieces(text: str) -> list[str]:
    pieces, start = [], 0
    while start < len(text):
        stop = min(start + _ENCODE_PIECE, len(text))
        if stop < len(text):
            line_end = text.rfind("\n", start, stop)
            stop = line_end + 1 if line_end > start else stop
        pieces.append(text[start:stop])
        start = stop
    return pieces


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Writes `directory/tokenizer.json`, which tokenizers and transformers read."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))

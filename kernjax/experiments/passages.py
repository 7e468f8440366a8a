"""Passages longer than a corpus's segments: its texts of one kind, end to end."""

from __future__ import annotations

import numpy as np

from kernjax.base.errors import UserError
from kernjax.base.resources import model_directory
from kernjax.scoring.producer import Checkpoint
from kernjax.texts import Corpus, load_corpus


def opened(
    model: str, corpus: str, length: int, count: int
) -> tuple[Checkpoint, np.ndarray, np.ndarray]:
    """What an experiment runs on: the model's files, `count` passages of each kind, their kinds.

    `model` and `corpus` as --model and --corpus name them; see `passages` and `stacked`.
    """
    directory = model_directory(model)
    tokens, kinds = stacked(passages(load_corpus(corpus, directory), length, count))
    return Checkpoint(directory), tokens, kinds


def passages(corpus: Corpus, length: int, count: int) -> dict[str, np.ndarray]:
    """Kind -> int32 [n, length + 1]: passages of `length` tokens and the target of the last one.

    The deepest segments come first, and no text is used twice; n is `count`, or what the corpus
    has text for. UserError when some kind has too little for one.
    """
    found = {}
    for kind in dict.fromkeys(segment.kind for segment in corpus.segments):
        own = [segment for segment in corpus.segments if segment.kind == kind]
        own.sort(key=lambda segment: -segment.context_len)  # stable: the corpus's order otherwise
        text = np.concatenate([segment.tokens for segment in own])
        fitting = min(count, len(text) // (length + 1))
        if fitting < 1:
            raise UserError(
                f"Corpus {corpus.name!r} has {len(text):,} tokens of {kind}.",
                f"A passage takes {length + 1:,}.",
                "Shorten the passages, or name a corpus with more text.",
            )
        found[kind] = text[: fitting * (length + 1)].reshape(fitting, length + 1)
    return found


def stacked(texts: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """All passages int32 [B, length + 1], and the kind of each [B]."""
    kinds = np.repeat(list(texts), [len(text) for text in texts.values()])
    return np.concatenate(list(texts.values())), kinds

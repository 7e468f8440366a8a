"""Small tokenizers, manifests and recordings for the tests of texts."""

from __future__ import annotations

import types
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from kernjax.texts import Corpus, Segment


def byte_tokenizer(directory: Path, *, merges: tuple[tuple[str, str], ...] = ()) -> Path:
    """A model directory with nothing but a tokenizer.json: one token a byte, plus the merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = alphabet + ["".join(pair) for pair in merges]
    vocab = {word: index for index, word in enumerate(words)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    directory.mkdir(parents=True, exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    return directory


def make_segment(
    id="a", kind="prose", context_len=8, score_len=4, seed=0, vocab_size=100, **fields
) -> Segment:
    """A segment of random tokens."""
    tokens = np.random.default_rng(seed).integers(0, vocab_size, context_len + score_len + 1)
    return Segment(id, kind, context_len, score_len, tokens.astype(np.int32), **fields)


def make_corpus(count=2, **fields) -> Corpus:
    """A corpus of `count` random segments named a0, a1, ..."""
    return Corpus.build("tiny", [make_segment(f"a{i}", seed=i, **fields) for i in range(count)])


def make_recording(corpus: Corpus, *, vocab_size=100, sharpness=8.0, seed=0):
    """The rows of every segment (prefill's last position and the decode steps), logits drawn from
    a normal distribution times `sharpness`."""
    generator = np.random.default_rng(seed)
    columns = {name: [] for name in ("segment", "pos", "phase", "target_ids")}
    for index, segment in enumerate(corpus.segments):
        for pos in range(segment.context_len - 1, segment.context_len + segment.score_len):
            columns["segment"].append(index)
            columns["pos"].append(pos)
            columns["phase"].append(0 if pos < segment.context_len else 1)
            columns["target_ids"].append(segment.tokens[pos + 1])
    rows = len(columns["pos"])
    logits = generator.normal(size=(rows, vocab_size)) * sharpness
    logprobs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    order = np.argsort(-logprobs, axis=1)
    ranked = np.take_along_axis(logprobs, order, 1)
    return types.SimpleNamespace(
        **{name: np.asarray(values, np.int32) for name, values in columns.items()},
        top_ids=order[:, :20].astype(np.int32),
        top_logprobs=ranked[:, :20].astype(np.float32),
        tail_logprob=np.log(np.exp(ranked[:, 20:]).sum(1)).astype(np.float32),
        margins=(ranked[:, 0] - ranked[:, 1]).astype(np.float32),
        manifest={
            "corpus": {"name": corpus.name, "sha256": corpus.sha256},
            "model": {"vocab_size": vocab_size},
        },
    )

"""Makes the demo's corpora out of the demo model's own text.

  python -m kernjax.demo.corpora --model=demo --out=corpora

The model continues the prompts of `corpora/demo_prompts.jsonl` (written for this) at temperature
1: so every prefix is one that the reference itself could have written, and the mass outside its
top 20 is its own. A document is one sampled text; a segment is as many documents as its context
holds, joined as in training, of which the last is still being written where decoding begins.
No document is used twice, so that segments are independent.

Writes demo.toml/.npz (512 and 2048 tokens) and demo-deep.toml/.npz (512 to 16384). Exit codes: 0
written, 3 could not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from kernjax.base import command, shared_flags

DOCUMENT_LEN = 1024  # longest sampled document, in tokens
SCORE_LEN = 128
# (context, segments of each kind): sixteen where a verdict is decided
SHAPES = {
    "demo": {512: 16, 2048: 16},
    "demo-deep": {512: 16, 2048: 16, 8192: 16, 16384: 16},
}
KINDS = ("prose", "code")

FLAGS = command.Flags("demo.corpora", __doc__)
_MODEL = shared_flags.model(FLAGS)
_PROMPTS = FLAGS.string("prompts", None, "JSONL of prompts; default: the bundled ones.")
_OUT = FLAGS.string("out", None, "Directory to write to.", required=True)
_CORPORA = FLAGS.comma_list("corpora", list(SHAPES), "Which of them to make.")
_SEED = FLAGS.integer("seed", 0, "Of the sampling.", lower_bound=0)
_BATCH_SIZE = FLAGS.integer("batch_size", 256, "Documents sampled together.", lower_bound=1)
_OVERWRITE = FLAGS.boolean("overwrite", False, "Replaces corpora that are there already.")


def plan_lengths(context_len: int) -> list[int]:
    """Lengths of the documents of one segment, the last one to be written on while decoding.

    Each but the last is followed by a separator: sum + separators = context + decoded + 1.
    """
    total = context_len + SCORE_LEN + 1
    lengths = []
    while total > DOCUMENT_LEN + SCORE_LEN + 1:
        lengths.append(min(DOCUMENT_LEN, total - SCORE_LEN - 2))
        total -= lengths[-1] + 1
    return [*lengths, total]


def pack(documents: Iterator[np.ndarray], lengths: Sequence[int], separator: int) -> Any:
    """One segment's tokens and its document starts."""
    pieces, starts, at = [], [], 0
    for number, length in enumerate(lengths):
        if number:
            pieces.append(np.asarray([separator], np.int32))
            at += 1
        starts.append(at)
        pieces.append(next(documents)[:length])
        at += length
    return np.concatenate(pieces), tuple(starts)


def main(args: list[str]) -> int:
    del args
    from kernjax import texts
    from kernjax.base.errors import UserError
    from kernjax.base.resources import data_dir, model_directory
    from kernjax.demo.tokenizer import END_OF_TEXT
    from kernjax.scoring.sampling import sample_segments

    if unknown := set(_CORPORA.value) - set(SHAPES):
        raise UserError(f"--corpora: {sorted(unknown)}.", f"Known: {', '.join(SHAPES)}.")
    model = model_directory(_MODEL.value)
    tokenizer = texts.load_tokenizer(model)
    separator = int(tokenizer.encode(END_OF_TEXT)[0])
    prompts = texts.read_prompts(
        _PROMPTS.value or data_dir("corpora") / "demo_prompts.jsonl", tokenizer
    )
    lines = []
    for number, name in enumerate(_CORPORA.value):
        segments = []
        for kind in KINDS:
            openings = [prompt for prompt in prompts if prompt.kind == kind]
            plans = [
                (context_len, plan_lengths(context_len))
                for context_len, count in SHAPES[name].items()
                for _ in range(count)
            ]
            count = sum(len(lengths) for _, lengths in plans)
            longest = max(length for _, lengths in plans for length in lengths)
            asked = [
                dataclasses.replace(openings[i % len(openings)], id=f"{name}-{kind}-{i}")
                for i in range(count)
            ]
            command.log.info("%s: sampling %d %s documents of %d", name, count, kind, longest)
            sampled = sample_segments(
                model,
                asked,
                context_len=longest - 1,
                score_len=0,
                temperature=1.0,
                # A stream of its own for every corpus and kind.
                seed=_SEED.value + 1000 * number + KINDS.index(kind),
                batch_size=_BATCH_SIZE.value,
            )
            documents = iter(segment.tokens for segment in sampled)
            for index, (context_len, lengths) in enumerate(plans):
                tokens, starts = pack(documents, lengths, separator)
                segments.append(
                    texts.Segment(
                        f"{kind}-{context_len}-{index % SHAPES[name][context_len]:02d}",
                        kind,
                        context_len,
                        SCORE_LEN,
                        tokens,
                        starts,
                    )
                )
        corpus = texts.Corpus.build(name, segments, tokenizer.sha256)
        path = texts.write_corpus(
            corpus,
            _OUT.value,
            description=f"Sampled by the demo model from its prompts, seed {_SEED.value}.",
            overwrite=_OVERWRITE.value,
        )
        lines.append({"corpus": name, "manifest": str(path), "sha256": corpus.sha256})
        print(f"{path}: {len(segments)} segments, sha256 {corpus.sha256}")
    command.print_json({"corpora": lines})
    return command.EXIT_PASS


if __name__ == "__main__":
    command.run(main, FLAGS)

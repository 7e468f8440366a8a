"""What formats of P lose: probability mass, and the signed bias of attention's output.

    python -m kernjax.experiments.lost_mass --formats='bf16,fp8*448,fp8' --depth=8192
    python -m kernjax.experiments.lost_mass --model=DIR --corpus=MANIFEST --policy=bf16

Passages of --depth tokens (the corpus's texts of one kind, end to end) are prefilled under --policy
in windows of --window. At the end of every window and at every attention layer the last 32 queries
are computed again on the layer's own operands, with P in each of --formats (`/rounded` behind one:
row sums from the rounded P) and in float32.

- mass lost: 1 - sum(rounded P) / sum(P).
- bias: the part of the output's error along the output, <e, o> / <o, o>; a row that loses its mass
  evenly shrinks by it. noise: the part across the output, over its size.

All are means over queries and heads, in percent. The last line is one JSON object. Exit codes: 0
measured, 3 could not.
"""

from __future__ import annotations

import time

from kernjax.base import command, shared_flags

FLAGS = command.Flags("experiments.lost_mass", __doc__)
_MODEL = shared_flags.model(FLAGS)
_CORPUS = shared_flags.corpus(FLAGS)
_POLICY = FLAGS.string("policy", "f32", "What the model runs: the operands are its own.")
_FORMATS = FLAGS.comma_list("formats", ["bf16", "fp8*448", "fp8*256", "fp8"], "Formats of P.")
_DEPTH = FLAGS.integer("depth", 8192, "Tokens of a passage.", lower_bound=2)
_WINDOW = FLAGS.integer("window", 512, "Tokens of a prefill window.", lower_bound=1)
_PASSAGES = FLAGS.integer("passages", 2, "Passages of each kind.", lower_bound=1)


def main(args: list[str]) -> int:
    del args
    from kernjax.experiments.attention import measure
    from kernjax.experiments.passages import opened
    from kernjax.experiments.tables import effect_markdown, effect_rows
    from kernjax.precision import parse_policy

    began = time.monotonic()
    checkpoint, tokens, kinds = opened(_MODEL.value, _CORPUS.value, _DEPTH.value, _PASSAGES.value)
    effect = measure(
        checkpoint,
        parse_policy(_POLICY.value),
        tuple(_FORMATS.value),
        tokens[:, :-1],
        _WINDOW.value,
    )
    found = effect_rows(effect, kinds)
    print(effect_markdown(found))
    command.print_json({**found, "wall_s": time.monotonic() - began})
    return command.EXIT_PASS


if __name__ == "__main__":
    command.run(main, FLAGS)

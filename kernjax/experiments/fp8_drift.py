"""Why P in direct fp8 drifts with depth: its bias, its row sums, or what it drops?

    python -m kernjax.experiments.fp8_drift --depth=8192
    python -m kernjax.experiments.fp8_drift --model=DIR --corpus=MANIFEST --passages=4

P alone is rounded, on float32, and passages of --depth tokens (the corpus's texts of one kind, end
to end) are prefilled in windows of --window. KL to float32 over the whole vocabulary, on the last
64 positions before every doubling of the depth:

- `fp8`: e4m3 of P itself; everything below 2^-10 becomes zero. `fp8*448`: e4m3(448 P) / 448.
- `/rounded`: row sums from the rounded P, so that what was lost is no longer in the denominator.
- `stochastic`: e4m3 of P, up or down by chance: the same grid, no bias, more noise.

Beside it what the same formats do to attention's own output (`kernjax.experiments.lost_mass`). The
last line is one JSON object. Exit codes: 0 measured, 3 could not.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from kernjax.base import command, shared_flags

if TYPE_CHECKING:
    from kernjax.experiments.drift import Drift

FLAGS = command.Flags("experiments.fp8_drift", __doc__)
_MODEL = shared_flags.model(FLAGS)
_CORPUS = shared_flags.corpus(FLAGS)
_DEPTH = FLAGS.integer("depth", 8192, "Tokens of a passage.", lower_bound=64)
_WINDOW = FLAGS.integer("window", 512, "Tokens of a prefill window.", lower_bound=64)
_PASSAGES = FLAGS.integer("passages", 2, "Passages of each kind.", lower_bound=1)

FORMATS = ("bf16", "fp8*448", "fp8", "fp8/rounded", "stochastic", "stochastic/rounded")


def main(args: list[str]) -> int:
    del args
    from kernjax.experiments import attention, drift
    from kernjax.experiments.passages import opened
    from kernjax.experiments.tables import effect_markdown, effect_rows
    from kernjax.precision import parse_policy

    began = time.monotonic()
    checkpoint, tokens, kinds = opened(_MODEL.value, _CORPUS.value, _DEPTH.value, _PASSAGES.value)
    tokens = tokens[:, :-1]
    effect = attention.measure(checkpoint, parse_policy("f32"), FORMATS, tokens, _WINDOW.value)
    local = effect_rows(effect, kinds)

    def announce(name: str, kl: float) -> None:
        seconds = time.monotonic() - began
        command.log.info("P in %s: KL %.2e at the last window, %.0f s so far", name, kl, seconds)

    found = summarise(drift.measure(checkpoint, FORMATS, tokens, _WINDOW.value, announce), kinds)
    print(markdown(found))
    print()
    print(effect_markdown(local))
    command.print_json({**found, "attention": local, "wall_s": time.monotonic() - began})
    return command.EXIT_PASS


def summarise(found: Drift, kinds: np.ndarray) -> dict[str, Any]:
    """Rows by kind and format: mean KL at each doubling of the depth, and its growth a doubling."""
    from kernjax.experiments.tables import doublings

    at = doublings(found.depths)
    octaves = np.log2([found.depths[i] for i in at])
    rows = []
    for kind in dict.fromkeys(kinds.tolist()):
        for index, name in enumerate(found.formats):
            by_passage = found.kl[index][kinds == kind][:, at].mean(axis=-1)
            mean = by_passage.mean(axis=0)
            slope = np.polyfit(octaves, np.log(mean), 1)[0] if len(at) > 1 and all(mean) else 0.0
            rows.append({"kind": kind, "format": name, "kl": mean, "growth": float(np.exp(slope))})
    return {
        "depths": [found.depths[i] for i in at],
        "passages": int(len(kinds)),
        "rows": rows,
    }


def markdown(found: dict[str, Any]) -> str:
    """The table as it stands in the documents."""
    from kernjax.reporting.layout import ratio
    from kernjax.reporting.markdown import nats, table

    rows = [
        [row["kind"], row["format"], *map(nats, row["kl"]), ratio(row["growth"])]
        for row in found["rows"]
    ]
    header = ["kind", "P", *map(str, found["depths"]), "a doubling"]
    caption = (
        f"Mean KL to float32 by depth, {found['passages']} passages, nats; what a doubling of the "
        "depth multiplies it by (least squares):"
    )
    return f"{caption}\n\n{table(header, rows, left=2)}"


if __name__ == "__main__":
    command.run(main, FLAGS)

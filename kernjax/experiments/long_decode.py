"""Thousands of decode steps with a rounded recurrent state: does the error grow, or settle?

    python -m kernjax.experiments.long_decode --steps=4096 --formats=bf16,m6,m4
    python -m kernjax.experiments.long_decode --model=DIR --corpus=MANIFEST --formats=m7,m6

--context tokens of a passage (the corpus's texts of one kind, end to end) are prefilled and the
next --steps decoded one by one, each on the passage's own token, by the ground truth, by --policy,
and by both with the state rounded to each of --formats after every step. All of them advance in one
compiled program. Tables by decode step: KL to the ground truth over the whole vocabulary; that KL
over --policy's own; the distance of the recurrent state from the same run without the rounding,
at the first, the middle and the last recurrent layer.

`isolated` is float32 but for the state, `in place` --policy with the state rounded. The last line
is one JSON object. Exit codes: 0 measured, 3 could not.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from kernjax.base import command, shared_flags

if TYPE_CHECKING:
    from kernjax.experiments.state import Decoded

FLAGS = command.Flags("experiments.long_decode", __doc__)
_MODEL = shared_flags.model(FLAGS)
_CORPUS = shared_flags.corpus(FLAGS)
_POLICY = FLAGS.string("policy", "bf16", "The production policy.")
_FORMATS = FLAGS.comma_list("formats", ["bf16", "m6", "m4"], "Formats of the state.")
_CONTEXT = FLAGS.integer("context", 512, "Tokens prefilled.", lower_bound=1)
_STEPS = FLAGS.integer("steps", 4096, "Tokens decoded.", lower_bound=2)
_PASSAGES = FLAGS.integer("passages", 2, "Passages of each kind.", lower_bound=1)


def main(args: list[str]) -> int:
    del args
    from kernjax.base.progress import Meter
    from kernjax.experiments.passages import opened
    from kernjax.experiments.state import decode, lanes
    from kernjax.precision import parse_policy
    from kernjax.scoring.recorder import Progress

    length = _CONTEXT.value + _STEPS.value
    checkpoint, tokens, kinds = opened(_MODEL.value, _CORPUS.value, length, _PASSAGES.value)
    chosen = lanes(parse_policy(_POLICY.value), _FORMATS.value)
    meter, began = Meter("decode", "step"), time.monotonic()

    def progress(steps: int) -> None:
        done = int(steps == _STEPS.value)
        seconds = time.monotonic() - began
        meter(Progress(done, 1, steps, _STEPS.value, seconds, f"step {steps}"))

    found = decode(checkpoint, chosen, tokens[:, :-1], _CONTEXT.value, progress)
    tables = summarise(found, kinds)
    print(markdown(tables))
    command.print_json({**tables, "wall_s": time.monotonic() - began})
    return command.EXIT_PASS


def summarise(found: Decoded, kinds: np.ndarray) -> dict[str, Any]:
    """Per kind and lane: KL and state distance in ranges of decode steps, and how they grow."""
    from kernjax.judge.sweep import step_ranges

    ranges = step_ranges(found.kl.shape[-1])
    middle = found.state.shape[1] // 2
    layers = dict(zip(("first", "middle", "last"), (0, middle, -1), strict=True))
    base = next(i for i, lane in enumerate(found.lanes) if lane.lens == "in place")
    rows = []
    for kind in dict.fromkeys(kinds.tolist()):
        own = kinds == kind
        for index, lane in enumerate(found.lanes):
            kl = _by_range(found.kl[index][own], ranges)
            over = kl / _by_range(found.kl[base][own], ranges)
            state = {
                name: _by_range(found.state[index, at][own], ranges) for name, at in layers.items()
            }
            rows.append(
                {
                    "kind": kind,
                    "lane": lane.name,
                    "kl": kl.mean(axis=0),
                    "over_production": np.exp(np.log(over).mean(axis=0)),
                    "state": {name: values.mean(axis=0) for name, values in state.items()},
                    "flips": int(found.flipped[index][own].sum()),
                }
            )
    return {"ranges": ranges, "passages": int(len(kinds)), "rows": rows}


def _by_range(values: np.ndarray, ranges: list[tuple[int, int]]) -> np.ndarray:
    """[B, ranges]: means of [B, steps] over ranges of steps counted from 1."""
    return np.stack([values[:, first - 1 : last].mean(axis=1) for first, last in ranges], axis=1)


def markdown(tables: dict[str, Any]) -> str:
    """The tables as they stand in the documents."""
    from kernjax.reporting.layout import ratio
    from kernjax.reporting.markdown import nats, table

    labels = [str(a) if a == b else f"{a}-{b}" for a, b in tables["ranges"]]
    rows = tables["rows"]

    def by_step(cells: Any, chosen: list[dict[str, Any]]) -> str:
        lines = [[r["kind"], r["lane"], *cells(r)] for r in chosen]
        return table(["kind", "state", *labels], lines, left=2)

    rounded = [row for row in rows if any(row["state"]["first"])]
    in_place = [row for row in rows if row["lane"].startswith("in place")]
    parts = [
        f"KL to the ground truth by decode step, mean over {tables['passages']} passages, nats:",
        by_step(lambda r: map(nats, r["kl"]), rows),
        "The same over production with an unrounded state, geometric mean over passages:",
        by_step(lambda r: map(ratio, r["over_production"]), in_place),
    ]
    for layer in ("first", "middle", "last"):
        caption = f"Relative distance of the recurrent state, {layer} recurrent layer:"
        parts += [caption, by_step(lambda r, at=layer: map(nats, r["state"][at]), rounded)]
    return "\n\n".join(parts)


if __name__ == "__main__":
    command.run(main, FLAGS)

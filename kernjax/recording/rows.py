"""Checks of one segment's rows before they are stored: a producer's mistake stops here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kernjax.base.errors import UserError
from kernjax.recording.layout import COLUMNS, Layout

PHASES = ("prefill", "decode", "rescore")
# float32 logprobs sum to 1 within 1e-6; other engines' quantised ones within 1e-3.
_MASS_TOLERANCE = 1e-2


def check_rows(
    manifest: Mapping[str, Any],
    index: int,
    rows: Mapping[str, Any],
    extras: Mapping[str, Any] | None,
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The segment's rows and extras as NumPy arrays; UserError names segment, array and value."""
    segment = manifest["segments"][index]
    layout = Layout.of(manifest)
    here = f"Segment {segment['id']}"
    n = segment["rows"]
    shapes = {name: (n, layout.top_k) if wide else (n,) for name, (_, wide) in COLUMNS.items()}
    base = _arrays(
        here, "row", rows, {name: (COLUMNS[name][0], shape) for name, shape in shapes.items()}
    )
    further = _arrays(
        here,
        "extra",
        extras or {},
        {
            name: (dtype, (layout.lengths(name)[index], *shape))
            for name, (dtype, shape) in layout.extras.items()
        },
    )
    _check_order(here, segment, base)
    _check_ids(here, manifest["model"].get("vocab_size"), base)
    if manifest["reference"] is None:
        _check_reference(here, base, further)
    return base, further


def non_finite(arrays: Mapping[str, np.ndarray]) -> dict[str, int]:
    """How many values of each float array are NaN or infinite; only those that have some."""
    counts = {
        name: int(array.size - np.count_nonzero(np.isfinite(array)))
        for name, array in arrays.items()
        if array.dtype.kind == "f"
    }
    return {name: count for name, count in counts.items() if count}


def _arrays(
    here: str, what: str, given: Mapping[str, Any], wanted: Mapping[str, tuple[str, tuple]]
) -> dict[str, np.ndarray]:
    missing, unknown = sorted(wanted.keys() - given.keys()), sorted(given.keys() - wanted.keys())
    if missing or unknown:
        raise UserError(
            f"{here}: {what} arrays missing: {', '.join(missing) or 'none'};"
            f" unexpected: {', '.join(unknown) or 'none'}.",
            f"Expected {', '.join(wanted) or 'none'}.",
            "Extras are declared in the manifest." if what == "extra" else "",
        )
    arrays = {name: np.asarray(given[name]) for name in wanted}
    for name, (dtype, shape) in wanted.items():
        array = arrays[name]
        if array.dtype != dtype or array.shape != shape:
            raise UserError(
                f"{here}: {name} is {array.dtype} {list(array.shape)}.",
                f"Expected {dtype} {list(shape)}: the plan has {shape[0]} rows here.",
            )
    return arrays


def _check_order(here: str, segment: Mapping[str, Any], rows: Mapping[str, np.ndarray]) -> None:
    pos, phase = rows["pos"].astype(np.int64), rows["phase"].astype(np.int64)
    if phase.max() >= len(PHASES):
        raise UserError(f"{here}: phase={phase.max()}.", "0 is prefill, 1 decode, 2 rescore.")
    end = segment["context_len"] + segment["score_len"]
    if pos.min() < 0 or pos.max() >= end:
        bad = pos[(pos < 0) | (pos >= end)][0]
        raise UserError(f"{here}: pos={bad}.", f"Positions lie in 0..{end - 1}.")
    steps = np.diff(phase * (1 << 32) + pos)
    if (steps <= 0).any():
        row = int(np.argmax(steps <= 0))
        before, after = ((int(phase[i]), int(pos[i])) for i in (row, row + 1))
        raise UserError(
            f"{here}: row {row + 1} has (phase, pos)={after} after {before}.",
            "Rows ascend by phase, then position, each once.",
        )


def _check_ids(here: str, vocab_size: int | None, rows: Mapping[str, np.ndarray]) -> None:
    limit = vocab_size if vocab_size is not None else np.iinfo(np.int32).max
    for name in ("top_ids", "target_ids", "top1_ids"):
        ids = rows[name]
        if (outside := ids[(ids < 0) | (ids >= limit)]).size:
            raise UserError(
                f"{here}: {name} holds {outside[0]}.", f"Ids lie in the vocabulary, 0..{limit - 1}."
            )
    ordered = np.sort(rows["top_ids"], axis=1)
    if (twice := (ordered[:, 1:] == ordered[:, :-1]).any(axis=1)).any():
        row = int(np.argmax(twice))
        raise UserError(
            f"{here}: top_ids of row {row} (pos {rows['pos'][row]}) hold an id twice.",
            "The ids of a row are unique.",
        )


def _check_reference(
    here: str, rows: Mapping[str, np.ndarray], extras: Mapping[str, np.ndarray]
) -> None:
    everything = {**rows, **extras}
    if counts := non_finite(everything):
        name, count = next(iter(counts.items()))
        bad = ~np.isfinite(everything[name].reshape(len(rows["pos"]), -1))
        row = int(np.argmax(bad.any(axis=1)))
        raise UserError(
            f"{here}: {name} has {count} NaN or infinite values, first at pos {rows['pos'][row]}.",
            "A recording of a producer's own top ids (one without --reference) is finite.",
            "The producer is broken; record it with --reference to have it judged.",
        )
    logprobs, pos = rows["top_logprobs"].astype(np.float64), rows["pos"]
    if (rising := (np.diff(logprobs, axis=1) > 0).any(axis=1)).any():
        raise UserError(
            f"{here}: top_logprobs rise within the row of pos {pos[np.argmax(rising)]}.",
            "A producer's own top logprobs descend.",
        )
    top1 = np.where(rows["top_ids"] == rows["top1_ids"][:, None], logprobs, -np.inf).max(axis=1)
    if (other := top1 != logprobs[:, 0]).any():  # equality, not the id: ties may go either way
        raise UserError(
            f"{here}: top1_ids of pos {pos[np.argmax(other)]} is not among the most likely ids.",
            "The top-1 id has the row's largest logprob.",
        )
    if (negative := rows["margins"] < 0).any():
        raise UserError(
            f"{here}: margins of pos {pos[np.argmax(negative)]} is negative.",
            "A margin is the largest logit minus the second largest.",
        )
    mass = np.exp(logprobs).sum(axis=1) + np.exp(rows["tail_logprob"].astype(np.float64))
    if (off := np.abs(mass - 1) > _MASS_TOLERANCE).any():
        row = int(np.argmax(off))
        raise UserError(
            f"{here}: the probabilities of pos {pos[row]} (top ids and tail) sum to"
            f" {mass[row]:.6g}.",
            "They sum to 1.",
            "Logprobs are natural logarithms over the true vocabulary; the tail is all the rest.",
        )

"""What a comparison comes down to, per segment: the unit of every interval.

Positions inside a segment are not independent, so each segment gives one number per statistic,
and all uncertainty comes from how these numbers differ between segments. A band stores these
summaries of its normal recordings, which is what makes pairing possible later without them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kernjax.judge.comparison import DECODE, PREFILL, RESCORE, Comparison
from kernjax.judge.metrics import KL_FLOOR, MARGIN_LABELS, log_floored, margin_bin

EDGE_REACH = 64
"""Positions after an edge that count as "just after" it: a lost state can be gone after 64."""

START_STEPS = 4
"""Decode steps after the prompt that count as its start: a stale convolution lasts that long."""

_BLOCK = 64
"""Blocks of keys, pages and chunks end at multiples of this, or of a part of it."""

GROUPS = (
    "level",  # the rows that decide: decode, or prefill where nothing was decoded
    "early",  # first half of a segment's decode steps
    "late",  # second half
    "rescore",  # the decoded tokens scored a second time, by one prefill
    "last",  # the prompt's last position, from prefill
    "edge_window",  # prefill rows just after a prefill-window edge
    "edge_document",  # prefill rows just after a document start, the prompt's first tokens too
    "edge_chunk",  # the other prefill rows before the last: chunk edges
    "edge_start",  # the first decode steps, on what prefill left
    "edge_block",  # the other decode steps that fill a block of keys, or begin one
    "self",  # decode against one-shot prefill of the same tokens, of one producer
)


@dataclass(frozen=True, eq=False)
class Summary:
    """Per-segment statistics of one recording against the reference; arrays over segments S.

    `log_mean[group]` is ln of the mean KL (floored), `mean_log[group]` the mean of ln KL (each
    floored), both NaN where a segment has no such rows.
    """

    log_mean: dict[str, np.ndarray]
    mean_log: dict[str, np.ndarray]
    tail_change: np.ndarray  # [S] mean change of the mass in "other", level rows
    flips: np.ndarray  # [S, 7] flips by margin bin, level rows
    floored: int  # level rows whose KL is below the floor

    def take(self, index: np.ndarray) -> Summary:
        """The summary of some segments, in the order of `index`."""
        return Summary(
            {name: values[index] for name, values in self.log_mean.items()},
            {name: values[index] for name, values in self.mean_log.items()},
            self.tail_change[index],
            self.flips[index],
            self.floored,
        )


def level_phase(phase: np.ndarray) -> int:
    """The phase whose rows decide: decode where there is any, else prefill."""
    return DECODE if np.any(phase == DECODE) else PREFILL


def summarise(comparison: Comparison, level: int) -> Summary:
    """Reduces a comparison to its segments; `level` is the deciding phase (`level_phase`).

    Rows that are not finite are left out: the verdict on them is a rule of its own.
    """
    groups = row_groups(comparison, level)
    log_kl = log_floored(comparison.kl)
    log_mean, mean_log = {}, {}
    for name, rows in groups.items():
        values = comparison.self_kl if name == "self" else comparison.kl
        logs = log_floored(values[rows]) if name == "self" else log_kl[rows]
        arithmetic = _segment_mean(comparison, rows, values[rows])
        log_mean[name] = np.log(np.maximum(arithmetic, KL_FLOOR))
        mean_log[name] = _segment_mean(comparison, rows, logs)
    rows = groups["level"]
    size = len(MARGIN_LABELS)
    cell = comparison.segment[rows] * size + margin_bin(comparison.margin[rows])
    other_top1 = comparison.flipped[rows] | comparison.tie_flipped[rows]
    flips = np.bincount(cell, other_top1, minlength=len(comparison.segments) * size)
    return Summary(
        log_mean=log_mean,
        mean_log=mean_log,
        tail_change=_segment_mean(comparison, rows, comparison.tail_change[rows]),
        flips=np.asarray(flips.reshape(-1, size), np.int64),
        floored=int(np.sum(comparison.kl[rows] < KL_FLOOR)),
    )


def row_groups(comparison: Comparison, level: int) -> dict[str, np.ndarray]:
    """Row numbers of each group (finite rows only); groups without rows are left out."""
    phase, pos, finite = comparison.phase, comparison.pos, comparison.finite
    context = np.array([s.context_len for s in comparison.segments])[comparison.segment]
    score = np.array([s.score_len for s in comparison.segments])[comparison.segment]
    prefill = (phase == PREFILL) & finite
    last = prefill & (pos == context - 1)
    masks = {"level": (phase == level) & finite}
    if level == DECODE:
        step = pos - context
        masks["early"] = masks["level"] & (2 * step < score)
        masks["late"] = masks["level"] & (2 * step >= score)
        start = masks["level"] & (step < START_STEPS)
        block = (pos % _BLOCK == 0) | (pos % _BLOCK == _BLOCK - 1)
        masks["edge_start"] = start
        masks["edge_block"] = masks["level"] & block & ~start
        masks["rescore"] = (phase == RESCORE) & finite
        masks["last"] = last
        edge = prefill & ~last
        window = np.zeros_like(edge)
        if comparison.prefill_window:
            past = pos >= comparison.prefill_window
            window = edge & past & (pos % comparison.prefill_window < EDGE_REACH)
        document = edge & ~window & _after_document_start(comparison)
        masks["edge_window"] = window
        masks["edge_document"] = document
        masks["edge_chunk"] = edge & ~window & ~document
    masks["self"] = np.isfinite(comparison.self_kl)  # decode rows
    rows = {name: np.nonzero(mask)[0] for name, mask in masks.items()}
    return {name: index for name, index in rows.items() if name == "level" or len(index)}


def _after_document_start(comparison: Comparison) -> np.ndarray:
    """[R] bool: at most 63 positions after a document's start, the segment's own included."""
    near = np.zeros(len(comparison.pos), dtype=bool)
    for index, segment in enumerate(comparison.segments):
        starts = np.array(segment.documents)
        if starts.size:
            rows = np.nonzero(comparison.segment == index)[0]
            distance = comparison.pos[rows, None] - starts[None, :]
            near[rows] = np.any((distance >= 0) & (distance < EDGE_REACH), axis=1)
    return near


def _segment_mean(comparison: Comparison, rows: np.ndarray, values: np.ndarray) -> np.ndarray:
    """[S] mean of `values` over each segment's rows; NaN where it has none."""
    size = len(comparison.segments)
    segment = comparison.segment[rows]
    count = np.bincount(segment, minlength=size)
    total = np.bincount(segment, values, minlength=size)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def ratio_statistics(subject: Summary, normals: Sequence[Summary]) -> dict[str, np.ndarray]:
    """Per-segment statistics of a subject relative to the normals on the same rows, each `[S]`.

    `arithmetic`, `geometric`: ln R. `excess`: 2 ln((1 + R)/2) of the geometric R, equal to ln R to
    first order at R = 1 and constant far below it, so that growth is growth of the damage: a
    candidate much better than normal may grow as it likes. `step`: excess of the late half of the
    decode steps less that of the early half. `tail`: change of mass. `last`, `edge_*`: ln R on
    those rows. `rescore` (geometric), `rescore_arithmetic`: ln R on the rescored rows.
    `self`: ln of KL(one-shot prefill || decode) over twice the normals' KL to the truth, which is
    how far apart two equally right producers with errors of their own are. The normals' own two
    phases are closer, since they round alike: a kernel that rounds in one phase only (a state
    stored by decode, an operand of the chunked form) is no worse for that.
    """
    result = {
        "arithmetic": _log_ratio(subject, normals, "log_mean", "level"),
        "geometric": _log_ratio(subject, normals, "mean_log", "level"),
    }
    result["excess"] = _excess(result["geometric"])

    def both_have(mean: str, *names: str) -> bool:
        """A producer lacks a group where none of its rows is finite."""
        return all(name in getattr(s, mean) for s in (subject, *normals) for name in names)

    if both_have("mean_log", "early", "late"):
        halves = [_log_ratio(subject, normals, "mean_log", name) for name in ("early", "late")]
        result["step"] = _excess(halves[1]) - _excess(halves[0])
        result["late"] = halves[1]
    for name in GROUPS:
        if name.startswith("edge_") and both_have("log_mean", name):
            result[name] = _log_ratio(subject, normals, "log_mean", name)
    if both_have("log_mean", "rescore"):
        result["rescore"] = _log_ratio(subject, normals, "mean_log", "rescore")
        result["rescore_arithmetic"] = _log_ratio(subject, normals, "log_mean", "rescore")
    if "self" in subject.log_mean:
        result["self"] = subject.log_mean["self"] - np.log(
            2.0 * np.mean([np.exp(normal.log_mean["level"]) for normal in normals], axis=0)
        )
    if both_have("mean_log", "last"):
        result["last"] = _log_ratio(subject, normals, "mean_log", "last")
    result["tail"] = subject.tail_change - np.mean([n.tail_change for n in normals], axis=0)
    return result


def _excess(log_ratio: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # NaN: the segment has no such rows
        return 2.0 * (np.logaddexp(0.0, log_ratio) - np.log(2.0))


def _log_ratio(subject: Summary, normals: Sequence[Summary], mean: str, group: str) -> np.ndarray:
    """ln of the subject's mean KL over the normals' (arithmetic or geometric, all through)."""
    own = getattr(subject, mean)[group]
    others = np.stack([getattr(normal, mean)[group] for normal in normals])
    if mean == "log_mean":
        return own - np.log(np.mean(np.exp(others), axis=0))
    return own - np.mean(others, axis=0)

"""The predeclared gates: what is tested, on which rows, and how tests become outcomes.

Eight gates are tested; each may have several rows (kinds, depths, bins). A row compares one
number of the candidate with the largest the band allows:

| gate | observed | rows |
| --- | --- | --- |
| level | R against normal, arithmetic and geometric | kind x (all depths, each depth) |
| growth_context | R per doubling of the context | kind |
| growth_decode | R in the late half of the decode steps over R in the early half | kind |
| flips | flips over the normals' flips on the same positions | merged margin bins |
| tail_mass | change of the mass outside the top 20, either sign | kind |
| edges | R just after prefill-window, document and chunk edges; | class of edge |
| | at decode's first steps, and where a block of keys is full or begins | |
| decode_vs_prefill | KL(one-shot prefill || decode) over that of two right producers | all |
| | R of the decoded tokens rescored by one prefill, arithmetic and geometric | as of level |
| prefill_last | R at the prompt's last position | all |

Two more are rules without a p-value: `nonfinite` and `confident_flips`.

PASS of a row: the one-sided 95 % upper bound is below the allowed value (an intersection-union
test needs no correction). FAIL: the row's p-value for "not above the allowed value" survives
Bonferroni over the gate's rows and Holm over the gates, 5 % in all. A growth row says "worse and
growing": it fails only where the ratio it grows to is itself above 1 with confidence, and passes
where that ratio is below 1 with confidence.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from kernjax.judge import intervals
from kernjax.judge.comparison import Segment
from kernjax.judge.intervals import Estimate
from kernjax.judge.metrics import MARGIN_LABELS
from kernjax.judge.quantiles import t_quantile
from kernjax.judge.summaries import Summary, ratio_statistics

CONFIDENCE = 0.95
MIN_EXPECTED_FLIPS = 20.0
"""Bins are merged until the normals have this many flips in them."""

TESTED = (
    "level",
    "growth_context",
    "growth_decode",
    "flips",
    "tail_mass",
    "edges",
    "decode_vs_prefill",
    "prefill_last",
)
RULES = ("nonfinite", "confident_flips")
_MEANS = {
    "geometric": "geometric",
    "arithmetic": "arithmetic",
    "rescore": "geometric",
    "rescore_arithmetic": "arithmetic",
}
_EDGES = {
    "edge_window": "prefill window",
    "edge_document": "document",
    "edge_chunk": "chunk",
    "edge_start": "decode start",
    "edge_block": "decode block",
}


class Outcome(enum.StrEnum):
    """What a gate row, or the whole verdict, came to."""

    PASS = "PASS"
    FAIL = "FAIL"
    INCONCLUSIVE = "INCONCLUSIVE"
    NOT_TESTED = "NOT TESTED"


@dataclass(frozen=True)
class Row:
    """One comparison of a gate: which statistic, combined how, over which segments."""

    gate: str
    stratum: str
    statistic: str  # a key of `ratio_statistics`, or "flips"
    contrast: str = "mean"  # "mean", "slope" (over log2 context) or "counts"
    quantity: str = "ratio"  # "ratio" and "ratio per doubling" are kept as ln; "mass" as it is
    kind: str | None = None  # None: all kinds
    context: int | None = None  # None: all depths
    bins: tuple[int, ...] = ()

    @property
    def mean(self) -> str | None:
        """Over positions: geometric or arithmetic, of rows of level and of rescored tokens."""
        return _MEANS.get(self.statistic)

    @property
    def key(self) -> str:
        """Its name in the band file."""
        return f"{self.gate}: {self.stratum}"

    @property
    def sides(self) -> int:
        """Changes of mass are wrong in either direction."""
        return 2 if self.quantity == "mass" else 1

    def shown(self, value: float) -> float:
        """The value in the unit people read: a ratio, or a mass."""
        return value if self.quantity == "mass" else math.exp(min(value, 700.0))


@dataclass(frozen=True)
class Limit:
    """What the band allows in a row, in the row's own scale (`is_log`: ln of a ratio), and why."""

    allowed: float
    tolerance: float  # 95/95 tolerance bound over the normal producers
    resolution: float  # what this many segments resolve; the larger of the two is allowed
    detectable: float  # smallest effect that FAILs with 95 % probability
    is_log: bool = True

    def values(self) -> dict[str, float]:
        """The four numbers by name."""
        return {
            "allowed": self.allowed,
            "tolerance": self.tolerance,
            "resolution": self.resolution,
            "detectable": self.detectable,
        }


@dataclass(frozen=True)
class Gate:
    """One row of the gate table, in the unit people read; None where it was not computed."""

    name: str
    stratum: str
    quantity: str
    observed: float | None
    low: float | None
    high: float | None
    allowed: float | None
    outcome: Outcome
    segments: int = 0
    p_value: float | None = None  # adjusted over the gate's rows and over the gates
    detectable: float | None = None
    segments_needed: int | None = None  # in the row, in all, to decide at this effect
    note: str = ""
    kind: str | None = None  # None: all
    context_len: int | None = None
    mean: str | None = None  # of rows of level and of rescored tokens: geometric or arithmetic
    bootstrap_low: float | None = None  # of level rows with 20 segments: a second opinion
    bootstrap_high: float | None = None


class Evidence:
    """One recording's per-segment statistics against a set of normals, ready for estimates."""

    def __init__(
        self, segments: Sequence[Segment], subject: Summary, normals: Sequence[Summary]
    ) -> None:
        self.segments = segments
        self.flips = subject.flips
        self.expected_flips = np.mean([normal.flips for normal in normals], axis=0)
        self.statistics = ratio_statistics(subject, normals)
        self._complete = np.isfinite(self.statistics["geometric"])

    @cached_property
    def _cells(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Per segment: cell, kind and depth; per cell: log2 of the depth."""
        kinds = np.array([s.kind for s in self.segments])
        contexts = np.array([s.context_len for s in self.segments])
        pairs = sorted({(s.kind, s.context_len) for s in self.segments})
        number = {pair: i for i, pair in enumerate(pairs)}
        cell = np.array([number[(s.kind, s.context_len)] for s in self.segments])
        return cell, kinds, contexts, np.log2([context for _, context in pairs])

    def values(self, row: Row) -> np.ndarray:
        """[S] the row's statistic, NaN outside its stratum."""
        _, kinds, contexts, _ = self._cells
        wanted = np.ones(len(kinds), dtype=bool)
        if row.kind is not None:
            wanted &= kinds == row.kind
        if row.context is not None:
            wanted &= contexts == row.context
        missing = np.full(len(kinds), np.nan)
        return np.where(wanted, self.statistics.get(row.statistic, missing), np.nan)

    def estimate(self, row: Row) -> Estimate | None:
        """The row's number with its error; None where the segments cannot give one."""
        if row.contrast == "counts":
            bins = list(row.bins)
            expected = self.expected_flips[self._complete][:, bins].sum(axis=1)
            if expected.sum() < MIN_EXPECTED_FLIPS / 2:  # a part of the corpus
                return None
            flips = self.flips[self._complete][:, bins].sum(axis=1)
            return intervals.ratio_of_counts(flips, expected)
        cell, _, _, depth = self._cells
        if row.contrast == "slope":
            return intervals.slope_of(self.values(row), cell, depth)
        return intervals.mean_of(self.values(row), cell)

    def bootstrap(self, row: Row) -> tuple[float, float] | None:
        """One-sided bootstrap bounds of a level row; None elsewhere and for few segments."""
        if row.gate != "level":
            return None
        return intervals.bootstrap_of_mean(self.values(row), self._cells[0], CONFIDENCE)

    def guard(self, row: Row) -> Estimate | None:
        """ln of the ratio that a growth row grows to; None for rows that are no growth."""
        if row.gate == "growth_context":
            deepest = max(s.context_len for s in self.segments if s.kind == row.kind)
            return self.estimate(
                Row("level", "", "geometric", kind=row.kind, context=deepest)
            ) or self.estimate(Row("level", "", "geometric", kind=row.kind))
        if row.gate == "growth_decode":
            return self.estimate(Row("level", "", "late", kind=row.kind))
        return None


def predeclared(
    segments: Sequence[Segment],
    statistics: Sequence[str],
    flip_bins: Sequence[tuple[int, ...]],
) -> list[Row]:
    """All rows that a corpus with these segments and statistics gives, in table order."""
    rows: list[Row] = []
    kinds = sorted({s.kind for s in segments})
    rows += _level_rows(segments, "level", {"geometric": "geometric", "arithmetic": "arithmetic"})
    for kind in kinds:
        rows.append(Row("growth_context", kind, "excess", "slope", "ratio per doubling", kind))
    if "step" in statistics:
        rows += [Row("growth_decode", kind, "step", kind=kind) for kind in kinds]
    for bins in flip_bins:
        rows.append(Row("flips", f"margin {bins_label(bins)}", "flips", "counts", bins=bins))
    rows += [Row("tail_mass", kind, "tail", quantity="mass", kind=kind) for kind in kinds]
    rows += [Row("edges", name, key) for key, name in _EDGES.items() if key in statistics]
    if "self" in statistics:
        rows.append(Row("decode_vs_prefill", "all", "self"))
    if "rescore" in statistics:
        means = {"geometric": "rescore", "arithmetic": "rescore_arithmetic"}
        rows += _level_rows(segments, "decode_vs_prefill", means, "rescored ")
    if "last" in statistics:
        rows.append(Row("prefill_last", "all", "last"))
    return rows


def _level_rows(
    segments: Sequence[Segment], gate: str, means: Mapping[str, str], what: str = ""
) -> list[Row]:
    """kind x mean x (all depths, each depth); `means`: the statistic of each mean."""
    rows = []
    for kind in sorted({s.kind for s in segments}):
        depths = sorted({s.context_len for s in segments if s.kind == kind})
        for mean, statistic in means.items():
            name = f"{what}{kind}, {mean}"
            rows.append(Row(gate, name, statistic, kind=kind))  # all depths
            for depth in depths if len(depths) > 1 else []:
                rows.append(Row(gate, f"{name}, {depth}", statistic, kind=kind, context=depth))
    return rows


def bins_label(bins: Sequence[int]) -> str:
    """One label for neighbouring margin bins: (0.05,0.1] and (0.1,0.2] become (0.05,0.2]."""
    first, last = MARGIN_LABELS[bins[0]], MARGIN_LABELS[bins[-1]]
    if first == last:
        return first
    if not last.startswith(">"):
        return f"{first.split(',')[0]},{last.split(',')[1]}"
    return ">" + first.split(",")[0].lstrip("(")


def decide(evidence: Evidence, rows: Sequence[Row], limits: Mapping[str, Limit]) -> list[Gate]:
    """Every row's observed value, interval, allowed value and outcome, in the order of `rows`."""
    estimates = {row.key: evidence.estimate(row) for row in rows}
    adjusted = _adjusted_p(evidence, rows, limits, estimates)
    counts = {gate: sum(row.gate == gate for row in rows) for gate in TESTED}
    gates = []
    for row in rows:
        estimate, limit = estimates[row.key], limits[row.key]
        gate = Gate(
            row.gate,
            row.stratum,
            row.quantity,
            None,
            None,
            None,
            row.shown(limit.allowed),
            Outcome.NOT_TESTED,
            detectable=row.shown(limit.detectable),
            note="too few segments, or flips, for an interval",
            kind=row.kind,
            context_len=row.context,
            mean=row.mean,
        )
        if estimate is not None:
            low, high = estimate.bound(1 - CONFIDENCE), estimate.bound(CONFIDENCE)
            p = adjusted[row.key]
            outcome, note = _outcome(evidence, row, limit, low, high, p)
            needed = None
            if outcome is Outcome.INCONCLUSIVE:
                needed = segments_needed(row, estimate, limit, len(counts) * counts[row.gate])
            resampled = evidence.bootstrap(row)
            gate = replace(
                gate,
                bootstrap_low=row.shown(resampled[0]) if resampled else None,
                bootstrap_high=row.shown(resampled[1]) if resampled else None,
                observed=row.shown(estimate.value),
                low=row.shown(low),
                high=row.shown(high),
                outcome=outcome,
                segments=estimate.segments,
                p_value=p,
                segments_needed=needed,
                note=note,
            )
        gates.append(gate)
    return gates


def _outcome(
    evidence: Evidence, row: Row, limit: Limit, low: float, high: float, p: float
) -> tuple[Outcome, str]:
    if p <= 1 - CONFIDENCE:
        return Outcome.FAIL, ""
    inside = high < limit.allowed
    if row.quantity == "mass":
        inside = inside and low > -limit.allowed
    if inside:
        return Outcome.PASS, ""
    guard = evidence.guard(row)
    if guard is not None and guard.bound(CONFIDENCE) < 0:
        return Outcome.PASS, "grows, but stays below the normal difference at every depth measured"
    return Outcome.INCONCLUSIVE, ""


def _adjusted_p(
    evidence: Evidence,
    rows: Sequence[Row],
    limits: Mapping[str, Limit],
    estimates: Mapping[str, Estimate | None],
) -> dict[str, float]:
    """Bonferroni over a gate's rows, then Holm over the gates that were tested."""
    raw: dict[str, dict[str, float]] = {}
    for row in rows:
        estimate = estimates[row.key]
        if estimate is None:
            continue
        limit = limits[row.key].allowed
        p = estimate.p_above(limit)
        if row.quantity == "mass":
            mirrored = Estimate(-estimate.value, estimate.se, estimate.df, estimate.segments)
            p = min(1.0, 2.0 * min(p, mirrored.p_above(limit)))
        if (guard := evidence.guard(row)) is not None:
            p = max(p, guard.p_above(0.0))
        raw.setdefault(row.gate, {})[row.key] = p
    best = {gate: min(ps.values()) * len(ps) for gate, ps in raw.items()}
    adjusted: dict[str, float] = {}
    floor = 0.0
    for rank, gate in enumerate(sorted(best, key=lambda name: best[name])):
        factor = len(best) - rank
        floor = max(floor, factor * best[gate])
        for key, p in raw[gate].items():
            adjusted[key] = min(1.0, max(floor, factor * len(raw[gate]) * p))
    return adjusted


def segments_needed(row: Row, estimate: Estimate, limit: Limit, tests: int) -> int | None:
    """Segments in the row at which its present effect would PASS or FAIL; None: not within 100x.

    The standard error shrinks with the root of the segments; half the time the estimate falls on
    the wrong side of its own value, hence 80 % power is asked for.
    """
    value = abs(estimate.value) if row.quantity == "mass" else estimate.value
    gap = limit.allowed - value
    share = CONFIDENCE if gap > 0 else 1 - (1 - CONFIDENCE) / tests
    df = max(estimate.df, 30.0)
    critical = t_quantile(share, df) + t_quantile(0.8, df)
    if abs(gap) * 10.0 <= critical * estimate.se:
        return None
    return max(
        estimate.segments + 1, math.ceil(estimate.segments * (critical * estimate.se / gap) ** 2)
    )

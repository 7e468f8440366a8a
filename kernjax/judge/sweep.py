"""A sweep of one rounding site: where the rounding leaves the normal difference.

Each format's recording is set against the band's normals, per segment, as in a verdict. A format
is *above normal* when its ratio R is above 1 with 95 % confidence, on some kind and mean, against
what one more normal producer would do:

    t = ln R / sqrt(se^2 + s^2 (1 + 1/M))

se is the segments' standard error, s the normal producers' own spread (M of them), the degrees of
freedom are Satterthwaite's. Without s a normal producer itself would be "above normal" half the
time. Bonferroni over kinds and means.

The knee is found by a fixed sequence: formats are tested from the narrowest on, and the knee is
the widest format of the unbroken run of those above normal. Each is tested at the full 5 %, and
still the chance to name too wide a format is at most 5 % (a later hypothesis counts only when all
before it were rejected).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from kernjax.judge.band import Band
from kernjax.judge.case import Case
from kernjax.judge.comparison import DECODE, PREFILL, Comparison
from kernjax.judge.gates import CONFIDENCE, Row
from kernjax.judge.intervals import Estimate
from kernjax.judge.limits import leave_one_out
from kernjax.judge.strata import kl_summary

_MEANS = ("geometric", "arithmetic")
_GROWTH = 4
"""Decode steps are shown in buckets that end at 1, 8, 32, 128, ...: each four times the last."""


@dataclasses.dataclass(frozen=True)
class KindRatio:
    """R of one kind and mean against the normals, with one-sided 95 % bounds, and its p-value.

    p: that it is no larger than one more normal producer's; not corrected.
    """

    kind: str
    mean: str
    ratio: float
    low: float
    high: float
    p_value: float
    segments: int


@dataclasses.dataclass(frozen=True)
class Bucket:
    """KL of some decode steps (`first` to `last`, counted from 1); 0, 0: the prompt's last row."""

    first: int
    last: int
    positions: int
    kl_median: float | None
    kl_mean: float | None

    @property
    def label(self) -> str:
        """How a table's column is called."""
        if not self.last:
            return "prefill"
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"


@dataclasses.dataclass(frozen=True)
class Layer:
    """How far one layer is from the same policy without the site's rounding, after one decode step.

    Relative Frobenius distances, geometric mean over segments (0 where every one is 0); `state` of
    the recurrent state, None where the layer has none; `stream` of the residual stream.
    """

    layer: int
    state: float | None
    stream: float


@dataclasses.dataclass(frozen=True)
class Point:
    """One format of the sweep."""

    format: str
    policy: str
    kl: dict[str, float | None]
    flips: int
    non_finite: int
    ratios: tuple[KindRatio, ...]
    above: bool | None  # None: no interval could be computed
    buckets: tuple[Bucket, ...]
    layers: tuple[Layer, ...] = ()


@dataclasses.dataclass(frozen=True)
class Sweep:
    """All formats from the widest to the narrowest, and where the knee is."""

    site: str
    policy: str
    points: tuple[Point, ...]
    knee: str | None
    last_normal: str | None
    decided: bool
    sentence: str


def measure(
    comparison: Comparison, band: Band, name: str, policy: str, layers: Sequence[Layer] = ()
) -> Point:
    """The numbers of one format's comparison against the band's own reference."""
    case = Case(comparison, band)
    ratios = _ratios(case)
    bad = int((~comparison.finite).sum())
    above: bool | None = None
    if bad:
        above = True  # a value that is not finite is no rounding error any more
    elif ratios:
        above = min(entry.p_value for entry in ratios) * len(ratios) <= 1 - CONFIDENCE
    rows = case.rows
    return Point(
        name,
        policy,
        kl_summary(comparison.kl[rows]),
        int((comparison.flipped | comparison.tie_flipped)[rows].sum()),
        bad,
        ratios,
        above,
        tuple(buckets(comparison)),
        tuple(layers),
    )


def conclude(site: str, policy: str, points: Sequence[Point]) -> Sweep:
    """The knee of `points`, which are ordered from the widest format to the narrowest."""
    names = [point.format for point in points]
    run = len(points)
    while run and points[run - 1].above:
        run -= 1
    knee = points[run] if run < len(points) else None
    last_normal = points[run - 1] if run else None
    stray = [p.format for p in points[: max(run - 1, 0)] if p.above]
    decided = last_normal is None or last_normal.above is not None
    subject = f"{site} on {policy}"
    if knee is None and stray:
        decided = False
        sentence = (
            f"{subject}: no knee: {_listed(stray)} above the normal difference, but "
            f"{names[-1]}, the narrowest, is not."
        )
    elif knee is None:
        sentence = (
            f"{subject}: no format down to {names[-1]} is above the normal difference"
            f"{_shown(points[-1])}."
        )
    elif last_normal is None:
        sentence = (
            f"{subject}: {knee.format}, the widest that was tried, is above the normal "
            f"difference already{_shown(knee)}."
        )
    else:
        sentence = (
            f"{subject}: the knee is at {knee.format}, the first format above the normal "
            f"difference{_shown(knee)}; {last_normal.format} is not{_shown(last_normal)}."
        )
        if stray:
            sentence += f" By itself {_listed(stray)} above too, wider than formats that are not."
    if not decided and not stray:
        sentence = f"{subject}: {names[run - 1]} has too few segments for an interval."
    return Sweep(
        site,
        policy,
        tuple(points),
        knee.format if knee and decided else None,
        last_normal.format if last_normal and decided else None,
        decided,
        sentence,
    )


def buckets(comparison: Comparison) -> list[Bucket]:
    """KL of the prompt's last position, then of decode steps 1, 2-8, 9-32, 33-128, ..."""
    context = np.array([s.context_len for s in comparison.segments])[comparison.segment]
    step = comparison.pos - context + 1
    last_prefill = (comparison.phase == PREFILL) & (step == 0)
    result = [_bucket(comparison, last_prefill, 0, 0)] if last_prefill.any() else []
    decode = comparison.phase == DECODE
    for first, last in step_ranges(int(step[decode].max()) if decode.any() else 0):
        inside = decode & (step >= first) & (step <= last)
        result.append(_bucket(comparison, inside, first, last))
    return result


def step_ranges(deepest: int) -> list[tuple[int, int]]:
    """Decode steps 1 to `deepest` in ranges (first, last): 1, 2-8, 9-32, 33-128, ..."""
    ranges, first, end = [], 1, 1
    while first <= deepest:
        ranges.append((first, min(end, deepest)))
        first, end = end + 1, max(8, end * _GROWTH)
    return ranges


def layer_differences(
    subject: Sequence[Mapping[str, np.ndarray]],
    base: Sequence[Mapping[str, np.ndarray]],
    state_layers: Sequence[int],
) -> list[Layer]:
    """Distances by layer of runs on the same segments; `state_layers` number the states' layers.

    Each run has `stream` [layers, B, D] and, where the model has recurrent layers, `state`
    [state layers, B, ...].
    """
    stream = _distances([run["stream"] for run in subject], [run["stream"] for run in base])
    states: dict[int, float] = {}
    if state_layers:
        found = _distances([run["state"] for run in subject], [run["state"] for run in base])
        states = dict(zip(state_layers, found.tolist(), strict=True))
    return [Layer(i, states.get(i), float(value)) for i, value in enumerate(stream)]


def _distances(subject: Sequence[np.ndarray], base: Sequence[np.ndarray]) -> np.ndarray:
    """[layers] relative distance, geometric mean over all B of all runs."""
    parts = []
    for ours, theirs in zip(subject, base, strict=True):
        ours, theirs = (x.reshape(*x.shape[:2], -1).astype(np.float64) for x in (ours, theirs))
        size = np.maximum(np.linalg.norm(theirs, axis=2), np.finfo(np.float64).tiny)
        parts.append(np.linalg.norm(ours - theirs, axis=2) / size)
    values = np.concatenate(parts, axis=1)
    logs = np.log(np.where(values > 0, values, 1.0))
    counted = (values > 0).sum(axis=1)
    mean = np.exp(logs.sum(axis=1) / np.maximum(counted, 1))
    return np.where(counted > 0, mean, 0.0)


def _ratios(case: Case) -> tuple[KindRatio, ...]:
    kinds = sorted({segment.kind for segment in case.segments})
    rows = [Row("level", f"{kind}, {mean}", mean, kind=kind) for kind in kinds for mean in _MEANS]
    spread = leave_one_out(case.segments, case.normals, rows)
    result = []
    for row in rows:
        estimate = case.evidence.estimate(row)
        if estimate is None or row.key not in spread:
            continue
        wide = _beyond_producers(estimate, [e.value for e in spread[row.key]])
        result.append(
            KindRatio(
                str(row.kind),
                row.statistic,
                row.shown(estimate.value),
                row.shown(wide.bound(1 - CONFIDENCE)),
                row.shown(wide.bound(CONFIDENCE)),
                wide.p_above(0.0),
                estimate.segments,
            )
        )
    return tuple(result)


def _beyond_producers(estimate: Estimate, left_out: Sequence[float]) -> Estimate:
    """The estimate with the normals' own spread in its error.

    `left_out`: each normal against the others, which is M/(M-1) times its distance from the mean.
    """
    count = len(left_out)
    own = float(np.var(left_out, ddof=1)) * ((count - 1) / count) ** 2 * (1 + 1 / count)
    total = estimate.se**2 + own
    if total == 0:
        return estimate
    df = total**2 / (estimate.se**4 / estimate.df + own**2 / (count - 1))
    return Estimate(estimate.value, math.sqrt(total), df, estimate.segments)


def _bucket(comparison: Comparison, rows: np.ndarray, first: int, last: int) -> Bucket:
    kl = kl_summary(comparison.kl[rows])
    return Bucket(first, last, int(rows.sum()), kl["median"], kl["mean"])


def _shown(point: Point) -> str:
    """The clearest ratio in brackets, or what stands for it."""
    if point.non_finite:
        return f" ({point.non_finite} rows are not finite)"
    if not point.ratios:
        return ""
    best = min(point.ratios, key=lambda entry: (entry.p_value, -entry.ratio))
    return f" (R {best.ratio:.3g} [{best.low:.3g}, {best.high:.3g}], {best.kind}, {best.mean} mean)"


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'}"

"""How much the band allows: limits from what equally right producers do among themselves.

For a row of a gate, every normal is judged against the others (leave one out), which gives values
v_1..v_M with standard errors. With k the one-sided 95/95 tolerance factor of M values:

    tolerance  = mean(v) + k sd(v) (M-1)/M
    resolution = (t_0.95 + t_row sqrt(1 + 1/M)) se
    allowed    = max(tolerance, resolution, MINIMUM)

- (M-1)/M: a leave-one-out deviation is M/(M-1) times the deviation from the mean of all M, which
  is what a candidate is compared with; without it four producers would widen T by a third.
- resolution: a candidate exactly as good as normal must stay below T in all rows together with
  95 % probability, or the instrument drowns in INCONCLUSIVE. t_row is Student's quantile at
  1 - 0.05/rows. Where resolution is the larger, the corpus is the limit, not the producers: more
  segments tighten T. The band file keeps both.
- MINIMUM: below 2 % nothing is told apart, so that normals without any spread (all exactly equal
  at the prompt's last position, say) leave a limit that equality stays under.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from kernjax.judge.comparison import Comparison, Segment
from kernjax.judge.gates import (
    CONFIDENCE,
    MIN_EXPECTED_FLIPS,
    TESTED,
    Evidence,
    Limit,
    Row,
)
from kernjax.judge.intervals import Estimate
from kernjax.judge.metrics import MARGIN_EDGES, MARGIN_LABELS, TIE_BIN
from kernjax.judge.quantiles import t_quantile, tolerance_factor
from kernjax.judge.summaries import Summary

MINIMUM = {"mass": 1e-5}
"""By quantity; ratios: ln 1.02."""

CONFIDENT_EXPECTED = 0.02
"""Flips beyond the confident margin that a normal run of this corpus has on average."""


def each_against_others(segments: Sequence[Segment], normals: Sequence[Summary]) -> list[Evidence]:
    """Every normal as a subject whose normals are the others."""
    return [
        Evidence(segments, normal, [*normals[:index], *normals[index + 1 :]])
        for index, normal in enumerate(normals)
    ]


def leave_one_out(
    segments: Sequence[Segment], normals: Sequence[Summary], rows: Sequence[Row]
) -> dict[str, list[Estimate]]:
    """Each normal's estimate against the others, by row; rows that some normal lacks are left out.

    The spread of these values is M/(M-1) times that of the producers about their common mean.
    """
    found: dict[str, list[Estimate | None]] = {row.key: [] for row in rows}
    for evidence in each_against_others(segments, normals):
        for row in rows:
            found[row.key].append(evidence.estimate(row))
    return {key: [v for v in values if v] for key, values in found.items() if all(values)}


def limits_of(rows: Sequence[Row], loo: Mapping[str, Sequence[Estimate]]) -> dict[str, Limit]:
    """The limit of every row that has leave-one-out estimates, in the row's own scale."""
    tested = [row for row in rows if row.key in loo]
    share = (1 - CONFIDENCE) / max(len(tested), 1)
    limits = {}
    for row in tested:
        estimates = loo[row.key]
        count = len(estimates)
        values = np.array([estimate.value for estimate in estimates])
        se = math.sqrt(float(np.mean([estimate.se**2 for estimate in estimates])))
        df = max(float(np.mean([estimate.df for estimate in estimates])), 1.0)
        # Changes of mass may fail on either side: each gets half of what a ratio gets.
        sides = row.sides
        centre = abs(values.mean()) if sides == 2 else values.mean()
        spread = float(np.std(values, ddof=1)) * (count - 1) / count
        factor = tolerance_factor(count, 1 - (1 - CONFIDENCE) / sides)
        tolerance = float(centre + factor * spread)
        rise = t_quantile(CONFIDENCE, df) + t_quantile(1 - share / sides, df) * math.sqrt(
            1 + 1 / count
        )
        allowed = max(tolerance, rise * se, MINIMUM.get(row.quantity, math.log(1.02)))
        tests = len(TESTED) * sides * sum(other.gate == row.gate for other in tested)
        reach = t_quantile(1 - (1 - CONFIDENCE) / tests, df) + t_quantile(CONFIDENCE, df)
        limits[row.key] = Limit(
            allowed, tolerance, rise * se, allowed + reach * se, is_log=row.quantity != "mass"
        )
    return limits


def merge_flip_bins(expected: np.ndarray) -> list[tuple[int, ...]]:
    """Neighbouring margin bins merged, from the confident end, until each expects 20 flips.

    `expected` [7]: the normals' mean flips by bin. Ties are never a bin. What is left over at the
    near-tie end joins its neighbour; with fewer than 20 in all there is no bin to test.
    """
    groups: list[list[int]] = []
    current: list[int] = []
    for index in range(len(MARGIN_LABELS) - 1, TIE_BIN, -1):
        current.insert(0, index)
        if expected[current].sum() >= MIN_EXPECTED_FLIPS:
            groups.insert(0, current)
            current = []
    if current and groups:
        groups[0] = current + groups[0]
    return [tuple(group) for group in groups]


def flip_limits(normals: Sequence[Comparison]) -> dict[str, float]:
    """The largest margin at which a normal flipped, and the margin that counts as confident.

    The largest of M runs is exceeded by the next run with probability 1/(M+1): a limit there would
    make one honest run in five INCONCLUSIVE. The confident margin L is where a normal run is
    expected to have no more than 0.02 flips at or beyond it:

        sum over rows with margin >= L of P(margin change < -margin)

    with P from the recorded changes of the same kind of text, either sign, away from near ties:
    the empirical tail, no Gaussian. Never below the largest that was seen.
    """
    first = normals[0]
    flipped = np.concatenate([c.margin[c.flipped] for c in normals])
    largest = float(flipped.max()) if flipped.size else 0.0
    kinds = np.array([s.kind for s in first.segments])[first.segment]
    margins, chances = [], []
    for kind in np.unique(kinds):
        rows = (kinds == kind) & (first.margin > MARGIN_EDGES[1])
        changes = np.sort(np.abs(np.concatenate([c.margin_change[rows] for c in normals])))
        if changes.size:
            beyond = changes.size - np.searchsorted(changes, first.margin[rows])
            margins.append(first.margin[rows])
            chances.append(0.5 * beyond / changes.size)
    margin, chance = (
        np.concatenate(parts) if parts else np.zeros(0) for parts in (margins, chances)
    )
    order = np.argsort(-margin)
    expected = np.cumsum(chance[order])
    within = int(np.searchsorted(expected, CONFIDENT_EXPECTED, side="right"))
    # The first margin, from the confident end, that would bring the sum above the limit.
    confident = float(margin[order][within]) if within < margin.size else float(MARGIN_EDGES[1])
    return {"largest": largest, "confident": max(largest, confident)}

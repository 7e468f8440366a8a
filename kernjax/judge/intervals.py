"""Estimates with Student t intervals from per-segment numbers.

Segments fall into cells (kind x context depth). Every estimate is a linear combination of cell
means, sum_c w_c mean_c: the mean over the cells, the least-squares slope over log2(context) or the
fitted line's value at some depth. What differs between cells is thereby no noise. The variance is
sum_c w_c^2 s_c^2 / n_c with each cell's own s_c (depths differ in spread), its degrees of freedom
by Satterthwaite. A cell with one segment borrows the pooled spread of the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kernjax.judge.quantiles import t_quantile, t_upper_tail

BOOTSTRAP_SEGMENTS = 20
BOOTSTRAP_DRAWS = 2000


@dataclass(frozen=True)
class Estimate:
    """A number with its standard error: value, se, degrees of freedom, segments used."""

    value: float
    se: float
    df: float
    segments: int

    def bound(self, confidence: float) -> float:
        """One-sided upper bound at `confidence`; below 0.5 it is a lower bound."""
        return self.value + (t_quantile(confidence, self.df) * self.se if self.se > 0 else 0.0)

    def p_above(self, limit: float) -> float:
        """p-value of "the true value is at most `limit`"."""
        if self.se > 0:
            return t_upper_tail((self.value - limit) / self.se, self.df)
        return 0.0 if self.value > limit else 1.0


def mean_of(values: np.ndarray, cell: np.ndarray) -> Estimate | None:
    """The mean over all segments, cells being fixed effects. None: no spread can be told."""
    return _combine(values, cell, lambda count, _: count / count.sum())


def slope_of(values: np.ndarray, cell: np.ndarray, x: np.ndarray) -> Estimate | None:
    """Least-squares slope over `x` (one value a cell, `[cells]`). None below two depths."""

    def weights(count: np.ndarray, at: np.ndarray) -> np.ndarray | None:
        centred = at - np.sum(count * at) / count.sum()
        spread = float(np.sum(count * centred**2))
        return count * centred / spread if spread > 0 else None

    return _combine(values, cell, weights, x)


def line_at(values: np.ndarray, cell: np.ndarray, x: np.ndarray, where: float) -> Estimate | None:
    """The least-squares line over `x` (`[cells]`), evaluated at `where`."""

    def weights(count: np.ndarray, at: np.ndarray) -> np.ndarray | None:
        middle = np.sum(count * at) / count.sum()
        spread = float(np.sum(count * (at - middle) ** 2))
        if not spread > 0:
            return None
        return count / count.sum() + (where - middle) * count * (at - middle) / spread

    return _combine(values, cell, weights, x)


def _combine(
    values: np.ndarray,
    cell: np.ndarray,
    weights: Callable[[np.ndarray, np.ndarray], np.ndarray | None],
    x: np.ndarray | None = None,
) -> Estimate | None:
    """sum_c w_c mean_c; `weights` gives w from the cells' counts and places on `x`."""
    usable = np.isfinite(values)
    values, cell = values[usable], cell[usable]
    if not values.size:
        return None
    present, index = np.unique(cell, return_inverse=True)
    count = np.bincount(index).astype(np.float64)
    mean = np.bincount(index, values) / count
    square = np.bincount(index, (values - mean[index]) ** 2)
    pooled_df = values.size - count.size
    if pooled_df < 1:
        return None
    weight = weights(count, count if x is None else x[present])
    if weight is None:
        return None
    own = count > 1
    variance = np.where(own, square / np.maximum(count - 1, 1), square.sum() / pooled_df)
    part = weight**2 * variance / count
    total = float(part.sum())
    df = total**2 / float(np.sum(part**2 / np.where(own, count - 1, pooled_df))) if total else 1.0
    return Estimate(float(weight @ mean), math.sqrt(total), df, int(values.size))


def bootstrap_of_mean(
    values: np.ndarray, cell: np.ndarray, confidence: float, draws: int = BOOTSTRAP_DRAWS
) -> tuple[float, float] | None:
    """(low, high): one-sided bounds of `mean_of`, by resampling segments inside their cells.

    Percentiles; a second opinion on Student's t where segments are many and their spread is
    skewed. None below BOOTSTRAP_SEGMENTS segments, where percentiles are too narrow. Drawn from a
    fixed seed: the same values give the same bounds.
    """
    usable = np.isfinite(values)
    values, cell = values[usable], cell[usable]
    if values.size < BOOTSTRAP_SEGMENTS:
        return None
    rng = np.random.default_rng(0)
    total = np.zeros(draws)
    for one in np.unique(cell):
        members = values[cell == one]
        total += members[rng.integers(0, members.size, (draws, members.size))].sum(axis=1)
    low, high = np.quantile(total / values.size, [1 - confidence, confidence])
    return float(low), float(high)


def ratio_of_counts(subject: np.ndarray, expected: np.ndarray) -> Estimate | None:
    """ln of summed counts over summed expected counts, the segment `[S]` being the unit.

    Ratio estimator: the variance comes from the segments' residuals subject - R expected. Half a
    count is added to both sums, so that no flips at all is a finite ratio.
    """
    n = len(subject)
    if n < 2 or not expected.sum() > 0:
        return None
    total, base = float(subject.sum()) + 0.5, float(expected.sum()) + 0.5
    residual = subject - (total / base) * expected
    variance = n / (n - 1) * float(np.sum(residual**2)) / total**2
    # Independent flips alone scatter by 1/total; fewer segments than flips can hide it.
    return Estimate(math.log(total / base), math.sqrt(max(variance, 1.0 / total)), n - 1.0, n)

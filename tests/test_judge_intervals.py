"""Estimates and their intervals: against textbook formulas, scipy, and by coverage."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kernjax.judge import intervals
from kernjax.judge.quantiles import t_quantile


def test_one_cell_is_the_ordinary_t_interval():
    y = np.random.default_rng(0).normal(1, 2, 16)
    estimate = intervals.mean_of(y, np.zeros(16, int))
    assert estimate.value == pytest.approx(y.mean())
    assert estimate.se == pytest.approx(y.std(ddof=1) / 4)
    assert estimate.df == pytest.approx(15)
    half = t_quantile(0.95, 15) * y.std(ddof=1) / 4
    assert estimate.bound(0.95) - estimate.value == pytest.approx(half)
    assert estimate.value - estimate.bound(0.05) == pytest.approx(half)


def test_two_cells_are_welch():
    stats = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(1)
    a, b = rng.normal(0, 1, 12), rng.normal(0.4, 3, 20)
    y, cell = np.concatenate([a, b]), np.repeat([0, 1], [12, 20])
    slope = intervals.slope_of(y, cell, np.array([0.0, 1.0]))  # a difference of two means
    welch = stats.ttest_ind(b, a, equal_var=False, alternative="greater")
    assert slope.value / slope.se == pytest.approx(welch.statistic)
    assert slope.df == pytest.approx(welch.df)
    assert slope.p_above(0.0) == pytest.approx(welch.pvalue)


def test_slope_and_line_are_least_squares():
    rng = np.random.default_rng(2)
    cell = np.repeat(np.arange(4), [5, 9, 3, 7])
    x = np.array([9.0, 11.0, 13.0, 14.0])
    y = 0.3 + 0.05 * x[cell] + rng.normal(0, 0.1, cell.size)
    fit = np.polyfit(x[cell], y, 1)
    assert intervals.slope_of(y, cell, x).value == pytest.approx(fit[0])
    assert intervals.line_at(y, cell, x, 16.0).value == pytest.approx(np.polyval(fit, 16.0))


def test_what_differs_between_depths_is_no_noise():
    cell = np.repeat(np.arange(4), 8)
    y = 5.0 * cell + np.tile([0.0, 0.1], 16)
    assert intervals.mean_of(y, cell).se < 0.01


def test_missing_values_and_lonely_cells():
    y = np.array([1.0, 2.0, np.nan, 4.0])
    assert intervals.mean_of(np.full(3, np.nan), np.zeros(3, int)) is None
    assert intervals.mean_of(np.array([1.0, 2.0]), np.array([0, 1])) is None  # no spread anywhere
    lonely = intervals.mean_of(y, np.array([0, 0, 0, 1]))
    assert lonely.segments == 3 and lonely.se > 0
    assert intervals.slope_of(y, np.zeros(4, int), np.array([3.0])) is None
    assert intervals.line_at(y, np.zeros(4, int), np.array([3.0]), 4.0) is None


def test_no_spread_at_all():
    same = intervals.mean_of(np.zeros(8), np.zeros(8, int))
    assert same.se == 0 and same.bound(0.95) == 0
    assert same.p_above(0.1) == 1.0 and same.p_above(-0.1) == 0.0


def test_coverage_at_the_sample_sizes_in_use():
    """The 95 % upper bound holds 95 % of the time, depths of unequal spread, skewed values."""
    rng = np.random.default_rng(3)
    cell = np.repeat(np.arange(4), 16)
    spread = np.array([0.25, 0.15, 0.08, 0.04])[cell]
    x = np.array([9.0, 11.0, 13.0, 14.0])
    held = {"mean": 0, "slope": 0, "skewed": 0}
    draws = 800
    for _ in range(draws):
        y = spread * rng.standard_normal(64)
        held["mean"] += intervals.mean_of(y, cell).bound(0.95) > 0
        held["slope"] += intervals.slope_of(y, cell, x).bound(0.95) > 0
        skewed = 0.1 * (rng.exponential(1.0, 64) - 1.0)
        held["skewed"] += intervals.mean_of(skewed, cell).bound(0.95) > 0
    assert abs(held["mean"] / draws - 0.95) < 0.025
    assert abs(held["slope"] / draws - 0.95) < 0.025
    assert held["skewed"] / draws > 0.89  # long tails upwards cost a little


def test_ratio_of_counts():
    rng = np.random.default_rng(4)
    values, errors = [], []
    for _ in range(600):
        rate = rng.gamma(2.0, 0.5, 128)  # flips cluster in segments
        estimate = intervals.ratio_of_counts(rng.poisson(1.5 * rate), rate)
        values.append(estimate.value)
        errors.append(estimate.se)
    assert np.mean(values) == pytest.approx(math.log(1.5), abs=0.02)
    assert np.mean(errors) == pytest.approx(np.std(values), rel=0.15)
    none = intervals.ratio_of_counts(np.zeros(20), np.full(20, 2.0))
    assert none.value < -4 and none.bound(0.95) < math.log(1.2)
    assert intervals.ratio_of_counts(np.zeros(20), np.zeros(20)) is None
    # Exactly one flip a segment, as expected: no residual, and yet 16 flips are no more than 16.
    even = intervals.ratio_of_counts(np.ones(16), np.ones(16))
    assert even.value == 0.0 and even.se == pytest.approx(1 / math.sqrt(16.5))


def test_the_bootstrap_agrees_with_student_where_both_hold():
    rng = np.random.default_rng(3)
    cell = np.repeat(np.arange(2), 40)
    y = 3.0 * cell + rng.normal(0, 1, 80)
    low, high = intervals.bootstrap_of_mean(y, cell, 0.95)
    estimate = intervals.mean_of(y, cell)
    assert low == pytest.approx(estimate.bound(0.05), abs=0.15 * estimate.se)
    assert high == pytest.approx(estimate.bound(0.95), abs=0.15 * estimate.se)
    assert intervals.bootstrap_of_mean(y, cell, 0.95) == (low, high)
    assert intervals.bootstrap_of_mean(y[:19], cell[:19], 0.95) is None
    y[7] = 60.0  # one segment far out: the bootstrap's upper bound is further off than its lower
    low, high = intervals.bootstrap_of_mean(y, cell, 0.95)
    mean = intervals.mean_of(y, cell).value
    assert high - mean > 1.2 * (mean - low)

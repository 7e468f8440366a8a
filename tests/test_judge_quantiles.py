"""The quantiles against known tables, and against scipy where it is installed."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernjax.judge import quantiles


@pytest.mark.parametrize(
    ("probability", "df", "value"),
    [(0.95, 15, 1.75305), (0.975, 63, 1.99834), (0.95, 1, 6.31375), (0.9995, 4, 8.61030)],
)
def test_student_t_table(probability, df, value):
    assert quantiles.t_quantile(probability, df) == pytest.approx(value, abs=5e-6)


@pytest.mark.parametrize(("n", "k"), [(4, 5.144), (5, 4.203), (6, 3.708), (10, 2.911), (50, 2.065)])
def test_tolerance_factor_table(n, k):
    """One-sided 95/95 factors as printed in NIST's handbook and ISO 16269-6."""
    assert quantiles.tolerance_factor(n) == pytest.approx(k, abs=2e-3)


def test_tolerance_factor_by_simulation():
    rng = np.random.default_rng(0)
    sample = rng.standard_normal((20_000, 5))
    bound = sample.mean(axis=1) + quantiles.tolerance_factor(5) * sample.std(axis=1, ddof=1)
    assert np.mean(bound > quantiles.normal_quantile(0.95)) == pytest.approx(0.95, abs=0.005)


def test_binomial_bounds():
    assert quantiles.binomial_bounds(0, 59)[1] == pytest.approx(0.0495, abs=1e-4)
    assert quantiles.binomial_bounds(59, 59)[0] == pytest.approx(1 - 0.0495, abs=1e-4)
    low, high = quantiles.binomial_bounds(5, 100)
    assert low < 0.05 < high


@given(st.floats(0.001, 0.9999), st.floats(0.7, 400))
@settings(max_examples=60)
def test_quantile_inverts_tail(probability, df):
    value = quantiles.t_quantile(probability, df)
    assert quantiles.t_upper_tail(value, df) == pytest.approx(1 - probability, rel=1e-8)


def test_against_scipy():
    stats = pytest.importorskip("scipy.stats")
    for df in (1.0, 2.5, 15.0, 127.0, 1000.0):
        for p in (1e-6, 0.003, 0.2, 0.5, 0.9, 0.99999):
            assert quantiles.t_quantile(p, df) == pytest.approx(stats.t.ppf(p, df), rel=1e-9)
        for x in (-3.0, 0.0, 0.5, 40.0):
            assert quantiles.t_upper_tail(x, df) == pytest.approx(stats.t.sf(x, df), rel=1e-9)
    for n in (2, 4, 7, 30, 200):
        for content in (0.9, 0.95, 0.975):
            z = stats.norm.ppf(content)
            exact = stats.nct.ppf(0.95, n - 1, z * math.sqrt(n)) / math.sqrt(n)
            assert quantiles.tolerance_factor(n, content) == pytest.approx(exact, rel=1e-6)
    for successes, trials in ((0, 10), (3, 10), (10, 10), (7, 400)):
        low, high = quantiles.binomial_bounds(successes, trials)
        if successes:
            exact = stats.beta.ppf(0.05, successes, trials - successes + 1)
            assert low == pytest.approx(exact, rel=1e-6)
        if successes < trials:
            exact = stats.beta.ppf(0.95, successes + 1, trials - successes)
            assert high == pytest.approx(exact, rel=1e-6)
    grid = np.linspace(-8, 8, 33)
    assert np.allclose(quantiles.normal_cdf(grid), stats.norm.cdf(grid), rtol=1e-12)


@pytest.mark.parametrize(
    "call",
    [
        lambda: quantiles.t_quantile(1.0, 5),
        lambda: quantiles.t_quantile(0.5, 0),
        lambda: quantiles.t_upper_tail(math.nan, 5),
        lambda: quantiles.tolerance_factor(1),
        lambda: quantiles.binomial_bounds(5, 4),
    ],
)
def test_values_outside_the_domain_are_refused(call):
    with pytest.raises(ValueError):
        call()

"""Quantiles the verdict needs: normal, Student t, tolerance factors, binomial bounds.

NumPy and the standard library only: judging must not need scipy (tests compare with it).

- Student t from the regularised incomplete beta function, by Lentz's continued fraction
  (Abramowitz & Stegun 26.5.8), inverted by bracketed Newton steps on its logarithmic tail.
- One-sided tolerance factor k(n): with confidence C, at least a share P of a normal population
  lies below mean + k sd of a sample of n. P(k) = E[ Phi(sqrt(n) (k c - z_P)) ] with
  c = sqrt(chi2_{n-1} / (n-1)), i.e. the noncentral t distribution function (Owen 1963), integrated
  by Gauss-Legendre quadrature in panels.
- Clopper-Pearson bounds from the same incomplete beta function.
"""

from __future__ import annotations

import functools
import math
from statistics import NormalDist

import numpy as np

_NORMAL = NormalDist()
_TINY = 1e-300
_PANELS = 24


def normal_quantile(probability: float) -> float:
    """z with Phi(z) = probability, 0 < probability < 1."""
    return _NORMAL.inv_cdf(probability)


def normal_cdf(value: np.ndarray | float) -> np.ndarray:
    """Phi, elementwise, float64; accurate in the lower tail (through erfc)."""
    scaled = np.asarray(value, dtype=np.float64) / -math.sqrt(2.0)
    return np.asarray(0.5 * _erfc(scaled), dtype=np.float64)


def _erfc(value: np.ndarray) -> np.ndarray:
    return np.asarray(np.frompyfunc(math.erfc, 1, 1)(value)).astype(np.float64)


def incomplete_beta(a: float, b: float, x: float) -> float:
    """I_x(a, b), the regularised incomplete beta function, for a, b > 0 and 0 <= x <= 1."""
    if x <= 0.0:
        return 0.0
    if x >= 1.0:
        return 1.0
    log_front = (
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    )
    # The fraction converges fast only on this side of the mean; the other side by symmetry.
    if x < (a + 1.0) / (a + b + 2.0):
        return math.exp(log_front) * _beta_fraction(a, b, x) / a
    return 1.0 - math.exp(log_front) * _beta_fraction(b, a, 1.0 - x) / b


def _beta_fraction(a: float, b: float, x: float) -> float:
    """Lentz's method for the continued fraction of the incomplete beta function."""
    c, d = 1.0, 1.0 - (a + b) * x / (a + 1.0)
    d = 1.0 / (d if abs(d) > _TINY else _TINY)
    value = d
    for m in range(1, 400):
        for numerator in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1.0 + numerator * d
            d = 1.0 / (d if abs(d) > _TINY else _TINY)
            c = 1.0 + numerator / c
            c = c if abs(c) > _TINY else _TINY
            value *= c * d
        if abs(c * d - 1.0) < 3e-16:
            return value
    raise ArithmeticError(f"incomplete beta did not converge: {a=}, {b=}, {x=}")


def t_upper_tail(value: float, df: float) -> float:
    """P(T > value) for Student's t with `df` degrees of freedom (df > 0, any real)."""
    if math.isnan(value) or not df > 0:
        raise ValueError(f"t_upper_tail needs a number and df > 0, got {value=}, {df=}")
    if math.isinf(value):
        return 0.0 if value > 0 else 1.0
    tail = 0.5 * incomplete_beta(df / 2.0, 0.5, df / (df + value * value))
    return tail if value >= 0 else 1.0 - tail


@functools.lru_cache(maxsize=4096)
def t_quantile(probability: float, df: float) -> float:
    """t with P(T <= t) = probability, for 0 < probability < 1 and df > 0."""
    if not 0.0 < probability < 1.0 or not df > 0:
        raise ValueError(f"t_quantile needs 0 < probability < 1 and df > 0, got "
                         f"{probability=}, {df=}")  # fmt: skip
    if probability == 0.5:
        return 0.0
    if probability < 0.5:
        return -t_quantile(1.0 - probability, df)
    target = 1.0 - probability
    low, high = 0.0, 2.0
    while t_upper_tail(high, df) > target:
        low, high = high, high * 2.0
    guess = 0.5 * (low + high)
    log_constant = math.lgamma((df + 1) / 2) - math.lgamma(df / 2) - 0.5 * math.log(df * math.pi)
    for _ in range(200):
        tail = t_upper_tail(guess, df)
        low, high = (guess, high) if tail > target else (low, guess)
        density = math.exp(log_constant - (df + 1) / 2 * math.log1p(guess * guess / df))
        step = guess + (tail - target) / density if density > 0 else math.inf
        step = step if low < step < high else 0.5 * (low + high)
        if abs(step - guess) <= 1e-13 * max(1.0, abs(guess)):
            return step
        guess = step
    return guess


@functools.lru_cache(maxsize=256)
def tolerance_factor(n: int, content: float = 0.95, confidence: float = 0.95) -> float:
    """One-sided normal tolerance factor k for a sample of n >= 2 (4: 5.144, 6: 3.708)."""
    if n < 2:
        raise ValueError(f"a tolerance factor needs n >= 2 values, got {n=}")
    degrees = n - 1
    z = normal_quantile(content)
    # Density of c = chi/sqrt(degrees), on an interval that holds all but 1e-16 of it.
    spread = 9.0 / math.sqrt(2.0 * degrees)
    nodes, weights = np.polynomial.legendre.leggauss(16)
    edges = np.linspace(max(0.0, 1.0 - spread), 1.0 + spread, _PANELS + 1)
    half = 0.5 * (edges[1] - edges[0])
    c = (half * (nodes + 1.0) + edges[:-1, None]).ravel()
    weights = half * np.tile(weights, _PANELS)
    log_density = (
        math.log(2.0)
        + degrees / 2 * math.log(degrees / 2)
        - math.lgamma(degrees / 2)
        + (degrees - 1) * np.log(c)
        - degrees * c * c / 2
    )
    weights = weights * np.exp(log_density)

    low, high = 0.0, 1e4
    for _ in range(200):
        k = 0.5 * (low + high)
        reached = float(np.sum(weights * normal_cdf(math.sqrt(n) * (k * c - z))))
        low, high = (k, high) if reached < confidence else (low, k)
        if high - low < 1e-10 * high:
            break
    return 0.5 * (low + high)


def binomial_bounds(successes: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """Clopper-Pearson: one-sided lower and upper bounds, each at `confidence`."""
    if not 0 <= successes <= trials or trials < 1:
        raise ValueError(f"needs 0 <= successes <= trials >= 1, got {successes=}, {trials=}")
    alpha = 1.0 - confidence
    low = 0.0 if successes == 0 else _beta_quantile(alpha, successes, trials - successes + 1)
    high = (
        1.0
        if successes == trials
        else _beta_quantile(confidence, successes + 1, trials - successes)
    )
    return low, high


def _beta_quantile(probability: float, a: float, b: float) -> float:
    low, high = 0.0, 1.0
    for _ in range(100):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if incomplete_beta(a, b, middle) < probability else (low, middle)
    return 0.5 * (low + high)

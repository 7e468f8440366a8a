"""Every worked value of the design's metric table, and what must hold for any distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from kernjax.judge import metrics


def kl(p, q) -> float:
    return float(metrics.kl_divergence(*(metrics.cells(np.log([side])) for side in (p, q)))[0])


def test_kl_of_the_worked_example():
    p, q = (0.55, 0.30, 0.08, 0.07), (0.52, 0.16, 0.24, 0.08)
    assert kl(p, q) == pytest.approx(0.12219562, abs=5e-9)
    assert np.argmax(p[:3]) == np.argmax(q[:3])  # no flip


def test_what_moves_inside_the_tail_is_not_seen():
    top = np.array([0.6, 0.39])
    before = np.full(10, 0.001)
    after = np.where(np.arange(10) < 5, 0.0015, 0.0005)
    full = kl(np.concatenate([top, before]), np.concatenate([top, after]))
    assert full == pytest.approx(0.00143841, abs=5e-9)
    assert kl((*top, before.sum()), (*top, after.sum())) == pytest.approx(0.0, abs=1e-15)


@pytest.mark.parametrize(("margin", "per_cent"), [(0.1, 52.498), (1.0, 73.106)])
def test_two_words(margin, per_cent):
    assert 100 * metrics.two_word_probability(margin) == pytest.approx(per_cent, abs=5e-4)


@pytest.mark.parametrize(
    ("margin", "probability"), [(0.1, 0.23975), (0.5, 2.0348e-4), (1.0, 7.687e-13)]
)
def test_flip_probability(margin, probability):
    assert float(metrics.flip_probability(margin, 0.1)) == pytest.approx(probability, rel=1e-4)


def test_accuracy_bound():
    assert metrics.accuracy_bound(500 * 7e-4) == pytest.approx(0.41833, abs=5e-6)
    assert metrics.mean_kl_for_accuracy(0.02, 500) == pytest.approx(1.6e-6)


def test_same_bits_are_exactly_zero():
    rng = np.random.default_rng(0)
    raw = np.log(rng.dirichlet(np.ones(21), 500)).astype(np.float32)
    cells = metrics.cells(raw)
    assert np.all(metrics.kl_divergence(cells, metrics.cells(raw.copy())) == 0.0)


def test_a_negative_kl_is_an_internal_error():
    p = metrics.cells(np.log([[0.5, 0.3, 0.2]]))
    with pytest.raises(ArithmeticError, match="negative"):
        metrics.kl_divergence(p, p + 1e-8)  # not renormalised
    assert metrics.kl_divergence(p, p + 1e-10)[0] == 0.0


_ROWS = arrays(np.float64, (3, 21), elements=st.floats(-20, 0))


@given(_ROWS, _ROWS)
def test_kl_is_not_negative_and_ignores_normalisation(a, b):
    p, q = metrics.cells(a), metrics.cells(b)
    value = metrics.kl_divergence(p, q)
    assert np.all(value >= 0)
    assert np.allclose(np.exp(p).sum(axis=1), 1.0)
    shifted = metrics.kl_divergence(metrics.cells(a + 3.0), metrics.cells(b - 1.0))
    assert np.allclose(shifted, value, rtol=1e-6, atol=1e-12)


@given(arrays(np.float64, (2, 21), elements=st.floats(-8, 0)), st.integers(0, 2**31))
def test_second_order_kl(logits, seed):
    noise = 1e-3 * np.random.default_rng(seed).standard_normal(logits.shape)
    p = metrics.cells(logits)
    exact = metrics.kl_divergence(p, metrics.cells(logits + noise))
    assert np.allclose(metrics.second_order_kl(np.exp(p), noise), exact, rtol=0.02, atol=1e-12)


@given(st.floats(0, 5), st.floats(0.01, 2))
def test_the_bound_bounds_the_flip_probability(margin, sigma):
    assert metrics.flip_probability(margin, sigma) <= metrics.flip_probability_bound(margin, sigma)


def test_margin_bins_close_at_the_upper_end_in_float32():
    edges = np.array([0, 0.05, 0.1, 0.2, 0.5, 1.0], np.float32)
    assert metrics.margin_bin(edges).tolist() == [0, 1, 2, 3, 4, 5]
    above = np.nextafter(edges, np.float32(9), dtype=np.float32)
    assert metrics.margin_bin(above).tolist() == [1, 2, 3, 4, 5, 6]
    assert len(metrics.MARGIN_LABELS) == 7


def test_logit_noise_recovers_sigma():
    change = np.random.default_rng(0).normal(0, 0.1 * math.sqrt(2), 100_000)
    assert metrics.logit_noise(change) == pytest.approx(0.1, rel=0.01)
    assert metrics.logit_noise(np.zeros(0)) == 0.0


def test_floor():
    assert metrics.log_floored(np.array([0.0, 1e-12, 1.0])).tolist() == pytest.approx(
        [math.log(1e-10), math.log(1e-10), 0.0]
    )


def test_perplexity_and_its_error_by_segment():
    rng = np.random.default_rng(1)
    values = []
    for _ in range(300):
        segment = np.repeat(np.arange(20), 50)
        shift = rng.normal(0, 0.3, 20)[segment]  # a segment's tokens are alike
        values.append(metrics.perplexity(-2 + shift + rng.normal(0, 0.1, 1000), segment))
    spread = np.std([value for value, _ in values])
    assert np.mean([error for _, error in values]) == pytest.approx(spread, rel=0.1)
    assert metrics.perplexity(np.full(4, -1.0), np.zeros(4))[0] == pytest.approx(math.e)

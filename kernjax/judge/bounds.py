"""KL bounds for a candidate that was not scored at the reference's ids (an imported top-K list).

Of a row the candidate's own K ids and their log-probabilities are known, the mass of all others
(its tail T), and the target's. Let U be the reference's ids that the list lacks, m its smallest
probability, E the mass of listed ids that the reference does not list. Then

    KL = sum_known p ln(p/q) + sum_U p_i ln(p_i / q_i) + p_o ln(p_o / (E + r)),
    sum_U q_i + r = T,   0 <= q_i <= m

with q_i and r (the rest of the vocabulary) unknown.

- lower: the smallest KL that these allow. The problem is convex; its solution is
  q_i = min(m, p_i / x), E + r = max(E, p_o / x) with x such that the masses sum to T.
- upper: q_i as small as they may be. They may be 0, and KL infinite; so a floor is assumed: no
  missing token is less probable than the least probable token that the whole file records.
  The bound takes every term at its worst, q_i at the floor and r at its smallest.

The point that most tools report, q_i = m, is below the upper bound and need not be above the lower.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from kernjax.judge import metrics

_BISECTIONS = 80


@dataclass(frozen=True)
class Bounds:
    """Per row: the cells `[R, K + 1]` of the candidate at either end, KL, and what was missing."""

    lower: np.ndarray  # [R, K + 1] float64 cells at the reference's ids, at the lower bound
    kl_lower: np.ndarray  # [R]
    kl_upper: np.ndarray  # [R]
    tail_nearest: np.ndarray  # [R] the candidate's mass in "other", nearest to the reference's
    tail_farthest: np.ndarray  # [R] the farthest that is possible
    missing: np.ndarray  # [R] how many of the reference's ids the candidate lacks


def bound(
    reference: np.ndarray,
    reference_ids: np.ndarray,
    raw: np.ndarray,
    ids: np.ndarray,
    target_ids: np.ndarray,
    target_logprobs: np.ndarray,
    vocab_size: int,
) -> Bounds:
    """Bounds of every row; all rows finite.

    `reference` [R, K + 1] float64 cells at `reference_ids` [R, K]; `raw` [R, K' + 1] what the
    candidate recorded: log-probabilities at its own `ids` [R, K'], and its tail.
    """
    q = np.exp(metrics.cells(raw))
    listed, tail = q[:, :-1], q[:, -1]
    same = reference_ids[:, :, None] == ids[:, None, :]
    known = same.any(axis=2)
    mass = np.einsum("rij,rj->ri", same, listed)  # at the reference's ids, 0 where missing
    beyond = np.where(same.any(axis=1), 0.0, listed).sum(axis=1)  # E

    # The target's own log-probability was recorded too, listed or not.
    is_target = (reference_ids == target_ids[:, None]) & ~known
    target = np.exp(target_logprobs.astype(np.float64) - metrics.log_mass(raw))
    mass = np.where(is_target, np.minimum(target, tail)[:, None], mass)
    tail = np.maximum(tail - np.where(is_target.any(axis=1), np.minimum(target, tail), 0.0), 0.0)
    known |= is_target

    largest = listed.min(axis=1)  # m
    floor = math.exp(min(float(raw[:, :-1].min()), float(target_logprobs.min())))
    missing = (~known).sum(axis=1)
    rest = np.maximum(vocab_size - ids.shape[1] - missing - is_target.sum(axis=1), 0)

    p, other = np.exp(reference[:, :-1]), np.exp(reference[:, -1])
    least = np.minimum(floor, tail / np.maximum(missing + rest, 1))
    filled, lower_rest = _water_filling(p, other, known, tail, beyond, largest)
    lowest = np.where(known, mass, filled)
    lower = np.log(
        np.maximum(np.concatenate([lowest, lower_rest[:, None]], axis=1), np.finfo(np.float64).tiny)
    )
    smallest_rest = np.maximum(rest * least, tail - missing * largest)
    upper_other = np.maximum(beyond + smallest_rest, np.finfo(np.float64).tiny)
    worst = np.where(known, mass, np.maximum(least, np.finfo(np.float64).tiny)[:, None])
    kl_upper = np.sum(p * (reference[:, :-1] - _log(worst)), axis=1) + other * (
        reference[:, -1] - np.log(upper_other)
    )
    exact = missing == 0
    kl_lower = metrics.kl_divergence(reference, lower)
    kl_upper = np.where(exact, kl_lower, np.maximum(kl_upper, kl_lower))
    ends = np.stack([beyond + smallest_rest, beyond + tail])
    ends[:, exact] = (beyond + tail)[exact]
    nearest = np.clip(other, ends.min(axis=0), ends.max(axis=0))
    farthest = np.where(np.abs(ends[0] - other) > np.abs(ends[1] - other), ends[0], ends[1])
    return Bounds(lower, kl_lower, kl_upper, nearest, farthest, missing)


def _log(values: np.ndarray) -> np.ndarray:
    return np.log(np.maximum(values, np.finfo(np.float64).tiny))


def _water_filling(
    p: np.ndarray,
    other: np.ndarray,
    known: np.ndarray,
    tail: np.ndarray,
    beyond: np.ndarray,
    largest: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """(q [R, K] at missing ids, E + r [R]) of the smallest KL, by bisection on ln x."""
    unknown = np.where(known, 0.0, p)

    def at(log_x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        x = np.exp(log_x)[:, None]
        return np.minimum(largest[:, None], unknown / x), np.maximum(beyond, other / x[:, 0])

    low, high = np.full(len(p), -60.0), np.full(len(p), 60.0)
    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        filled, rest = at(middle)
        # Larger x, smaller masses.
        too_much = filled.sum(axis=1) + rest - beyond > tail
        low, high = np.where(too_much, middle, low), np.where(too_much, high, middle)
    filled, rest = at(0.5 * (low + high))
    # Whatever the bisection leaves over belongs to the rest.
    exact = np.where(known.all(axis=1), beyond + tail, rest)
    return filled, exact

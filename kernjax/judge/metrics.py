"""What is measured at a position: KL, flips, margins, and the quantities derived from them.

Everything is computed on the host in float64 from the recorded float32 log-probabilities.
Logarithms are natural, KL is in nats, the direction is always KL(reference || candidate).

A position's distribution is kept as 21 cells: the reference's top-20 ids and one cell for all the
rest ("other", the tail). The coarse KL over these cells is at most the full-vocabulary KL
(data-processing inequality); what moves inside the tail only is not seen.
"""

from __future__ import annotations

import math

import numpy as np

from kernjax.judge.quantiles import normal_cdf

KL_FLOOR = 1e-10
"""Ratios and logarithms of KL treat anything smaller as this; reports say where it happened."""

_NEGATIVE_KL = -1e-9
"""A renormalised KL below this cannot be rounding: it is a bug in this program."""

MARGIN_EDGES = np.array([0.0, 0.05, 0.1, 0.2, 0.5, 1.0], dtype=np.float32)
MARGIN_LABELS = ("0", "(0,0.05]", "(0.05,0.1]", "(0.1,0.2]", "(0.2,0.5]", "(0.5,1]", ">1")
TIE_BIN = 0


def cells(raw: np.ndarray) -> np.ndarray:
    """Log-probabilities of the K + 1 cells, float64 `[R, K+1]`, renormalised to sum to one.

    `raw`: the top-K log-probabilities and, last, the tail's. As float32 they err by about 1e-6,
    more than the true KL of confident text, which is why both sides are renormalised before they
    are compared.
    """
    raw = np.asarray(raw, np.float64)
    return raw - log_mass(raw)[:, None]


def log_mass(raw: np.ndarray) -> np.ndarray:
    """ln of the summed probability of each row of log-probabilities, `[R]`."""
    if not len(raw):
        return np.zeros(0)
    peak = np.max(raw, axis=1)
    return peak + np.log(np.sum(np.exp(raw - peak[:, None]), axis=1))


def kl_divergence(reference: np.ndarray, candidate: np.ndarray) -> np.ndarray:
    """KL(reference || candidate) per row, `[R]`, from two `[R, K+1]` arrays of `cells`.

    Rows with the same bits on both sides are exactly 0. Raises ArithmeticError for a result
    below -1e-9; rounding between that and 0 is returned as 0.
    """
    kl = np.sum(np.exp(reference) * (reference - candidate), axis=1)
    kl[np.all(reference == candidate, axis=1)] = 0.0
    return _not_negative(kl)


def _not_negative(kl: np.ndarray) -> np.ndarray:
    if np.any(kl < _NEGATIVE_KL):
        row = int(np.argmin(kl))
        raise ArithmeticError(
            f"internal error: KL {kl[row]:.3e} at row {row} is negative beyond rounding; "
            "both sides must be renormalised before they are compared"
        )
    return np.maximum(kl, 0.0)


def log_floored(kl: np.ndarray) -> np.ndarray:
    """ln max(KL, 1e-10)."""
    return np.log(np.maximum(kl, KL_FLOOR))


def margin_bin(margin: np.ndarray) -> np.ndarray:
    """Index into MARGIN_LABELS for each reference margin (float32 comparison, upper ends closed).

    Compared in float32, the type margins are recorded in, so that 0.05 is inside (0,0.05].
    """
    return np.searchsorted(MARGIN_EDGES, np.asarray(margin, np.float32), side="left")


def two_word_probability(margin: float) -> float:
    """Probability of the first of two words whose logits differ by `margin`, if no others exist."""
    return 1.0 / (1.0 + math.exp(-margin))


def flip_probability(margin: np.ndarray | float, sigma: float) -> np.ndarray:
    """Chance that independent Gaussian logit noise of size `sigma` swaps two words.

    The difference of two noises has standard deviation sqrt(2) sigma: Phi(-margin/(sqrt(2) sigma)).
    """
    return normal_cdf(-np.asarray(margin, np.float64) / (math.sqrt(2.0) * sigma))


def flip_probability_bound(margin: np.ndarray | float, sigma: float) -> np.ndarray:
    """exp(-margin^2 / (4 sigma^2)), the Chernoff bound on `flip_probability`."""
    scaled = np.asarray(margin, np.float64) / (2.0 * sigma)
    return np.exp(-scaled * scaled)


def logit_noise(margin_change: np.ndarray) -> float:
    """sigma of independent logit noise that explains the margin changes: rms / sqrt(2)."""
    change = np.asarray(margin_change, np.float64)
    return float(np.sqrt(np.mean(change * change) / 2.0)) if change.size else 0.0


def second_order_kl(probabilities: np.ndarray, logit_error: np.ndarray) -> np.ndarray:
    """KL to second order in the logit errors d: 1/2 (sum p d^2 - (sum p d)^2), over the last axis.

    Half the variance of the error under the reference's own probabilities: a shift common to all
    logits costs nothing, and errors on improbable words hardly count.
    """
    mean = np.sum(probabilities * logit_error, axis=-1)
    return 0.5 * (np.sum(probabilities * logit_error**2, axis=-1) - mean * mean)


def accuracy_bound(total_kl: float) -> float:
    """|change of accuracy| <= sqrt(KL_total / 2) (Pinsker, chain rule over the steps). Loose.

    Valid for sampled decoding on the reference's own samples and full-vocabulary KL only.
    """
    return math.sqrt(0.5 * total_kl)


def mean_kl_for_accuracy(change: float, steps: int) -> float:
    """The mean KL a step at which `accuracy_bound` over `steps` steps equals `change`."""
    return 2.0 * change * change / steps


def perplexity(target_logprobs: np.ndarray, segment: np.ndarray) -> tuple[float, float]:
    """Perplexity and its standard error, `segment` [R] being the unit that is sampled.

    A footnote: it cannot tell variants apart that KL separates easily, and decides nothing.
    """
    logprobs = np.asarray(target_logprobs, np.float64)
    _, index = np.unique(segment, return_inverse=True)
    count = np.bincount(index)
    mean = float(np.mean(logprobs))
    value = math.exp(-mean)
    if count.size < 2:
        return value, math.nan
    # Ratio estimator: the residual of a segment's sum against its length times the mean.
    residual = np.bincount(index, logprobs) - mean * count
    variance = count.size / (count.size - 1) * float(np.sum(residual**2)) / logprobs.size**2
    return value, value * math.sqrt(variance)

"""What the page draws that a verdict does not hold: numbers of rows, reduced to a small file.

Made once, where both recordings are at hand, and kept as `figures.json` beside the verdict, so that
a page is redrawn without them. KL in nats; `phase` is the deciding one. A sample of points is drawn
by rank and stride, never by chance: the same recordings give the same file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from kernjax.judge.band import Band
from kernjax.judge.comparison import DECODE, PHASES, Comparison
from kernjax.judge.metrics import KL_FLOOR, MARGIN_LABELS, flip_probability, margin_bin
from kernjax.reporting.layout import shorten
from kernjax.reporting.loading import FIGURES_VERSION

if TYPE_CHECKING:
    from kernjax.recording import Recording

TextOf = Callable[[int], str]

_SHARES = (*np.linspace(0.0, 0.98, 50), 0.99, 0.995, 0.998, 0.999, 0.9995, 1.0)
_CURVE = 40
_STEP_BUCKETS = 14
_POINTS = 1400
_RANKED = 60  # of the points: those of the largest KL, whatever the stride
_FLIPS = 400
_WORST = 10
_BEFORE, _AFTER = 28, 8
_TOP = 5
_TOKEN_LENGTH = 60


def figures(
    comparison: Comparison,
    band: Band,
    reference: Recording,
    candidate: Recording,
    text_of: TextOf | None = None,
) -> dict[str, Any]:
    """The numbers behind the page's charts and its worst positions; plain JSON values.

    `reference` and `candidate` are the recordings of the comparison; `text_of` turns a token id
    into text (without it the page shows ids).
    """
    rows = (comparison.phase == band.level) & comparison.finite
    kinds = np.array([s.kind for s in comparison.segments])[comparison.segment]
    names = sorted(set(kinds.tolist()))
    return {
        "schema_version": FIGURES_VERSION,
        "phase": PHASES[band.level],
        "kinds": names,
        "cdf": [_cdf(comparison, band, kind, rows & (kinds == kind)) for kind in names],
        "normal_strata": [
            {key: entry[key] for key in ("kind", "context_len", "mean", "p50")}
            for entry in band.strata
            if entry["phase"] == PHASES[band.level]
        ],
        "steps": [_steps(comparison, band, kind, rows & (kinds == kind)) for kind in names],
        "scatter": scatter(comparison, rows, kinds, names),
        "margins": _margins(comparison, band, rows),
        "worst": _worst(comparison, reference, candidate, text_of),
    }


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def _pairs(first: np.ndarray, second: np.ndarray) -> list[list[float]]:
    return [[_short(a), _short(b)] for a, b in zip(first, second, strict=True)]


def _cdf(comparison: Comparison, band: Band, kind: str, rows: np.ndarray) -> dict[str, Any]:
    """Share of the positions at or below a KL: the candidate's, and the normals' where known."""
    kl = comparison.kl[rows]
    known = [entry for entry in band.strata if entry["kind"] == kind]
    known = [entry for entry in known if entry["phase"] == PHASES[band.level]]
    return {
        "kind": kind,
        "zeros": int((kl <= KL_FLOOR).sum()),
        "candidate": _pairs(np.quantile(kl, _SHARES), np.array(_SHARES)) if kl.size else [],
        "normal": _normal_curve(known),
    }


def _normal_curve(strata: list[dict[str, Any]]) -> list[list[float]]:
    """The mixture of the strata's curves, from the largest of their lowest known quantiles on."""
    curves = []
    for entry in strata:
        points = [
            (float(name[1:]) / 100, float(value))
            for name, value in entry.items()
            if name.startswith("p") and name[1:].replace(".", "", 1).isdigit()
        ]
        points = sorted([*points, (1.0, float(entry["max"]))])
        shares, values = np.array(points).T
        curves.append((entry["positions"], shares, np.log(np.maximum(values, KL_FLOOR))))
    if not curves:
        return []
    low = max(logs[0] for _, _, logs in curves)
    high = max(logs[-1] for _, _, logs in curves)
    grid = np.linspace(low, high, _CURVE)
    mixed = sum(
        weight * np.interp(grid, logs, shares, right=1.0) for weight, shares, logs in curves
    )
    return _pairs(np.exp(grid), mixed / sum(weight for weight, _, _ in curves))


def _steps(comparison: Comparison, band: Band, kind: str, rows: np.ndarray) -> dict[str, Any]:
    """Mean KL by decode step, and the normals' over the first and the second half of the steps."""
    if band.level != DECODE or not rows.any():
        return {"kind": kind, "candidate": [], "normal": []}
    context = np.array([s.context_len for s in comparison.segments])[comparison.segment]
    step = comparison.pos[rows] - context[rows] + 1
    kl, last = comparison.kl[rows], int(step.max())
    edges = np.unique(np.round(np.geomspace(1, last + 1, _STEP_BUCKETS)).astype(int))
    buckets = []
    for first, end in zip(edges[:-1], edges[1:], strict=True):
        inside = (step >= first) & (step < end)
        if inside.any():
            buckets.append(
                {"first": int(first), "last": int(end) - 1, "mean": _short(kl[inside].mean())}
            )
    halves = []
    own = np.array([s.kind == kind for s in band.segments])
    for name, first, end in (("early", 1, last // 2), ("late", last // 2 + 1, last)):
        values = [np.exp(normal.log_mean[name][own]) for normal in band.normals]
        mean = np.nanmean(values) if np.isfinite(values).any() else None
        if mean is not None and first <= end:
            halves.append({"first": first, "last": end, "mean": _short(mean)})
    return {"kind": kind, "candidate": buckets, "normal": halves}


def scatter(
    comparison: Comparison, rows: np.ndarray, kinds: np.ndarray, names: list[str]
) -> dict[str, Any]:
    """[margin, KL, index of the kind, 1 for a flip] of some rows: flips and large KLs first."""
    index = np.nonzero(rows)[0]
    order = index[np.argsort(-comparison.kl[index], kind="stable")]
    flipped = comparison.flipped | comparison.tie_flipped
    chosen = [order[flipped[order]][:_FLIPS], order[:_RANKED]]
    rest = order[_RANKED:]
    stride = max(1, -(-rest.size // (_POINTS - _RANKED - _FLIPS)))
    picked = np.unique(np.concatenate([*chosen, rest[::stride]]))
    points = [
        [_short(comparison.margin[i]), _short(comparison.kl[i]), names.index(kinds[i])]
        + [int(flipped[i])]
        for i in picked
    ]
    return {"points": points, "of": int(index.size), "flips": int(flipped[index].sum())}


def _margins(comparison: Comparison, band: Band, rows: np.ndarray) -> dict[str, Any]:
    """By margin bin: the flips that independent logit noise of the normals' size would make."""
    sigma = band.margins.get("sigma")
    if not sigma:
        return {"sigma": None, "expected": []}
    margin = comparison.margin[rows]
    chance = flip_probability(margin, sigma)
    expected = np.bincount(margin_bin(margin), chance, minlength=len(MARGIN_LABELS))
    return {"sigma": _short(sigma), "expected": [_short(value) for value in expected]}


def _worst(
    comparison: Comparison,
    reference: Recording,
    candidate: Recording,
    text_of: TextOf | None,
) -> list[dict[str, Any]]:
    """The rows of the largest KL, of any phase, with what both said there; values that are not
    finite first."""
    size = np.where(comparison.finite, comparison.kl, np.inf)
    order = np.argsort(-size, kind="stable")[:_WORST]
    if len(reference) != len(comparison.pos):  # a part of the corpus
        reference = reference.select([s.id for s in comparison.segments])

    def token(number: int) -> list[Any]:
        text = None if text_of is None else shorten(text_of(int(number)), _TOKEN_LENGTH)
        return [int(number), text]

    return [
        _position(comparison, int(row), reference, candidate, token)
        for row in order
        if comparison.kl[row] > 0 or not comparison.finite[row]
    ]


def _position(
    comparison: Comparison,
    row: int,
    reference: Recording,
    candidate: Recording,
    token: Callable[[int], list[Any]],
) -> dict[str, Any]:
    segment = comparison.segments[comparison.segment[row]]
    near = np.nonzero(
        (comparison.segment == comparison.segment[row])
        & (comparison.phase == comparison.phase[row])
        & (comparison.pos > comparison.pos[row] - _BEFORE)
        & (comparison.pos <= comparison.pos[row] + _AFTER)
    )[0]
    return {
        "segment": segment.id,
        "kind": segment.kind,
        "context_len": segment.context_len,
        "pos": int(comparison.pos[row]),
        "phase": PHASES[comparison.phase[row]],
        "kl": _short(comparison.kl[row]) if comparison.finite[row] else None,
        "margin": _short(comparison.margin[row]),
        "flipped": bool(comparison.flipped[row] | comparison.tie_flipped[row]),
        "reference": _top(reference, row, token),
        "candidate": _top(candidate, row, token) if comparison.finite[row] else [],
        # The token that comes next in the text, with the KL of the row that predicts it.
        "strip": [
            [
                *token(reference.target_ids[i]),
                _short(comparison.kl[i]) if comparison.finite[i] else None,
                int(i == row),
            ]
            for i in near
        ],
    }


def _top(recording: Recording, row: int, token: Callable[[int], list[Any]]) -> list[list[Any]]:
    """[id, text, probability] of the five likeliest ids of those recorded; the top one always.

    A candidate is recorded at the reference's ids: its own first choice may be none of them, and
    has no probability then.
    """
    order = np.argsort(-recording.top_logprobs[row], kind="stable")[:_TOP]
    found = [
        [*token(recording.top_ids[row, i]), _short(np.exp(recording.top_logprobs[row, i]))]
        for i in order
    ]
    first = int(recording.top1_ids[row])
    if first not in recording.top_ids[row]:
        found = [[*token(first), None], *found[: _TOP - 1]]
    return found

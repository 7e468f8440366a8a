"""What was seen, by stratum and by margin bin: the tables of a report, no judgement in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kernjax.judge.comparison import PHASES, Comparison
from kernjax.judge.gates import CONFIDENCE, Evidence, Row
from kernjax.judge.metrics import MARGIN_LABELS, margin_bin, two_word_probability


@dataclass(frozen=True)
class Stratum:
    """One kind x context_len x phase; KL in nats over finite rows, R where the phase decides."""

    kind: str
    context_len: int
    phase: str
    segments: int
    positions: int
    kl_median: float | None
    kl_mean: float | None
    kl_p99: float | None
    kl_max: float | None
    ratio: float | None  # geometric R against normal
    ratio_low: float | None  # one-sided 95 % bounds
    ratio_high: float | None
    ratio_arithmetic: float | None
    ratio_arithmetic_low: float | None
    ratio_arithmetic_high: float | None
    flips: int
    normal_flips: float | None  # the normals' mean on the same segments
    tail_mass: float


@dataclass(frozen=True)
class MarginBin:
    """One bin of the reference's margin, deciding rows; bin "0" holds the ties."""

    margin: str
    positions: int
    flips: int
    normal_flips: float
    two_word_odds: float | None  # the better word's probability at the bin's upper edge


def kl_summary(kl: np.ndarray) -> dict[str, float | None]:
    """median, mean, p99 and max of the finite values; None where there are none."""
    kl = kl[np.isfinite(kl)]
    if not kl.size:
        return dict.fromkeys(("median", "mean", "p99", "max"))
    median, p99 = np.quantile(kl, [0.5, 0.99])
    return {
        "median": float(median),
        "mean": float(kl.mean()),
        "p99": float(p99),
        "max": float(kl.max()),
    }


def strata_of(comparison: Comparison, evidence: Evidence, level: int) -> list[Stratum]:
    """Every kind x context_len x phase that has rows, in that order."""
    kinds = np.array([s.kind for s in comparison.segments])
    contexts = np.array([s.context_len for s in comparison.segments])
    result = []
    for kind, context in sorted({(s.kind, s.context_len) for s in comparison.segments}):
        members = (kinds == kind) & (contexts == context)
        inside = members[comparison.segment]
        for phase, name in enumerate(PHASES):
            rows = inside & (comparison.phase == phase)
            if not rows.any():
                continue
            kl = kl_summary(comparison.kl[rows])
            bounds: list[float | None] = []
            for mean in ("geometric", "arithmetic"):
                row = Row("level", "", mean, kind=kind, context=context)
                estimate = evidence.estimate(row) if phase == level else None
                if estimate is None:
                    bounds += [None, None, None]
                    continue
                low, high = estimate.bound(1 - CONFIDENCE), estimate.bound(CONFIDENCE)
                bounds += [row.shown(value) for value in (estimate.value, low, high)]
            result.append(
                Stratum(
                    kind,
                    context,
                    name,
                    int(np.unique(comparison.segment[rows]).size),
                    int(rows.sum()),
                    kl["median"],
                    kl["mean"],
                    kl["p99"],
                    kl["max"],
                    *bounds,
                    int((comparison.flipped | comparison.tie_flipped)[rows].sum()),
                    float(evidence.expected_flips[members].sum()) if phase == level else None,
                    float(comparison.tail_mass[rows].mean()),
                )
            )
    return result


def margin_bins(comparison: Comparison, evidence: Evidence, level: int) -> list[MarginBin]:
    """Flips by the reference's margin, on the deciding rows of the segments that are there."""
    rows = comparison.phase == level
    size = len(MARGIN_LABELS)
    bins = margin_bin(comparison.margin[rows])
    positions = np.bincount(bins, minlength=size)
    other_top1 = (comparison.flipped | comparison.tie_flipped)[rows]
    flips = np.bincount(bins, other_top1, minlength=size)
    normal = evidence.expected_flips.sum(axis=0)
    edges: Sequence[float | None] = (0.0, 0.05, 0.1, 0.2, 0.5, 1.0, None)
    return [
        MarginBin(
            label,
            int(positions[i]),
            int(flips[i]),
            float(normal[i]),
            None if edges[i] is None else two_word_probability(float(edges[i])),
        )
        for i, label in enumerate(MARGIN_LABELS)
    ]


def manifest_differences(
    reference: Any, candidate: Any, prefix: str = ""
) -> list[tuple[str, str, str]]:
    """(field, reference's value, candidate's value) for every field that differs.

    A model's name is that of its directory: where the weights are the same it says nothing.
    """
    result = []
    for key in sorted(set(reference) | set(candidate)):
        if not prefix and key in ("segments", "reference", "schema_version", "extras"):
            continue
        name = f"{prefix}{key}"
        if name == "model.name" and _same_weights(reference, candidate):
            continue
        ours, theirs = reference.get(key), candidate.get(key)
        if isinstance(ours, dict) and isinstance(theirs, dict):
            result += manifest_differences(ours, theirs, f"{name}.")
        elif ours != theirs:
            result.append((name, str(ours), str(theirs)))
    return result


def _same_weights(ours: Any, theirs: Any) -> bool:
    hashes = ("weights_sha256", "config_sha256")
    return all(name in ours and ours[name] == theirs.get(name) for name in hashes)

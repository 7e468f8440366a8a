"""calibrate(reference, normals): vets the producers and makes the band.

A normal producer is an equally right implementation. Whatever is taken as normal is what a
candidate may do, so a producer is refused when it

- is not whole and finite, or repeats the reference's or another producer's numbers,
- is an outlier among its peers, in either direction,
- makes the allowed ratio so wide that little could be detected,

and the band is refused when a known-bad recording would stay below the allowed ratio everywhere.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kernjax.base.errors import UserError
from kernjax.judge.band import Band, identities, rounded
from kernjax.judge.band_checks import MIN_NORMALS, detection_floor, ratios_of
from kernjax.judge.comparison import PHASES, Comparison, Segment, compare, label
from kernjax.judge.gates import Evidence, Row, decide, predeclared
from kernjax.judge.intervals import Estimate
from kernjax.judge.limits import flip_limits, leave_one_out, limits_of, merge_flip_bins
from kernjax.judge.margin_tables import margin_tables
from kernjax.judge.metrics import MARGIN_LABELS, logit_noise, margin_bin
from kernjax.judge.quantiles import t_upper_tail
from kernjax.judge.summaries import Summary, level_phase, summarise
from kernjax.judge.verdict import judge

if TYPE_CHECKING:
    from kernjax.recording import Recording

MAX_PRODUCER_RATIO = 1.5
MAX_ALLOWED_RATIO = 2.0
_OUTLIER_P = 0.01
_NEAR_DUPLICATE = 0.5
"""Distance of two producers over theirs to the reference: 0.9 on the demo. With five at 0.35 the
floor that their band claims is half the true one, and no other right producer passes."""
_QUANTILES = (0.5, 0.9, 0.99, 0.999)
_LOWER_QUANTILES = (0.01, 0.1, 0.25)
"""Of the KL only, for the report's curve of the normal difference."""


def calibrate(
    reference: Recording | str | Path | None,
    normals: Sequence[Comparison | Recording | str | Path],
    bad: Sequence[Comparison | Recording | str | Path] = (),
    *,
    production_policy: str = "bf16",
    deploy_context: int | None = None,
    max_producer_ratio: float = MAX_PRODUCER_RATIO,
    max_allowed_ratio: float = MAX_ALLOWED_RATIO,
) -> Band:
    """The band of at least four normal recordings (or comparisons) against one reference.

    `bad`: recordings known to be wrong; each must exceed what the band allows in some gate.
    `max_producer_ratio`: a producer whose KL is this many times its peers' (or the inverse, beyond
    two standard errors) is an outlier whatever their spread. `max_allowed_ratio`: the widest level
    limit (all depths of a kind) of use; producers that spread further are refused, and where the
    corpus is too small to resolve it no PASS is given. Both are written into the band: widening
    one shows in review.
    Raises UserError naming the producer, the number found and what was allowed.
    """
    comparisons = [_compared(reference, normal) for normal in normals]
    bad_comparisons = [_compared(reference, recording) for recording in bad]
    check_enough(len(comparisons))
    _check_same_reference([*comparisons, *bad_comparisons])
    _check_whole(comparisons)
    _check_distinct(comparisons)
    first = comparisons[0]
    names = _names(comparisons)
    level = level_phase(first.phase)
    summaries = [rounded(summarise(c, level)) for c in comparisons]

    bins = merge_flip_bins(np.mean([s.flips.sum(axis=0) for s in summaries], axis=0))
    statistics = Evidence(first.segments, summaries[0], summaries[1:]).statistics
    rows = predeclared(first.segments, list(statistics), bins)
    loo = leave_one_out(first.segments, summaries, rows)
    levels = [row for row in rows if row.gate == "level" and row.context is None]
    ratios = [row for row in rows if row.quantity != "mass" and row.contrast == "mean"]
    _check_outliers(names, ratios, loo, max_producer_ratio)
    _check_by_peers(first.segments, names, rows, summaries)
    limits = limits_of(rows, loo)
    _check_width(levels, limits, max_allowed_ratio)

    band = Band(
        reference=identities(first.reference_manifest) | {"identity": first.reference_identity},
        producers=[
            identities(c.candidate_manifest)
            | {"name": names[index], "digest": c.candidate_digest}
            | {"ratio": ratios_of(rows, loo, index)}
            for index, c in enumerate(comparisons)
        ],
        segments=first.segments,
        level=level,
        normals=tuple(summaries),
        limits=limits,
        flip_bins=bins,
        margins=_margins(comparisons, level),
        strata=_strata(comparisons),
        detection_floor=detection_floor(rows, limits),
        production_policy=production_policy,
        deploy_context=deploy_context,
        settings={
            "max_producer_ratio": max_producer_ratio,
            "max_allowed_ratio": max_allowed_ratio,
            "tolerance": "95/95",
        },
    )
    band = _as_stored(band)
    band.bad.extend(_check_bad(band, c) for c in bad_comparisons)
    return _as_stored(band)


def _as_stored(band: Band) -> Band:
    """The band as its file gives it back, so that a verdict does not depend on saving."""
    return Band.from_dict(json.loads(json.dumps(band.to_dict(), allow_nan=False)))


def _compared(
    reference: Recording | str | Path | None,
    recording: Comparison | Recording | str | Path,
) -> Comparison:
    if isinstance(recording, Comparison):
        return recording
    if reference is None:
        raise UserError(
            "Recordings were given without their reference.",
            "calibrate takes a reference with recordings, or comparisons.",
        )
    return compare(reference, recording)


def _names(comparisons: Sequence[Comparison]) -> list[str]:
    """What the producers are called in the band: by policy, numbered where that is not enough."""
    labels = [label(c.candidate_manifest, c.candidate_name) for c in comparisons]
    return [
        name if labels.count(name) == 1 else f"{name} #{labels[: i + 1].count(name)}"
        for i, name in enumerate(labels)
    ]


def check_enough(count: int) -> None:
    """UserError where a band cannot be made of so many normal recordings."""
    if count < MIN_NORMALS:
        raise UserError(
            f"{count} normal recordings were given.",
            f"A band needs at least {MIN_NORMALS}: its limit is a tolerance bound over producers.",
            "Record further equally right variants: another chunk length, prefill window, batch "
            "size, P in float32, another backend.",
        )


def _check_same_reference(comparisons: Sequence[Comparison]) -> None:
    digests = {c.reference_identity for c in comparisons}
    if len(digests) > 1:
        raise UserError(
            f"The comparisons are against {len(digests)} different references.",
            "A band has one reference.",
            "Compare all of them with the same recording.",
        )


def _check_whole(comparisons: Sequence[Comparison]) -> None:
    for c in comparisons:
        if c.segments != comparisons[0].segments:
            raise UserError(
                f"Normal {c.candidate_name} covers other segments than "
                f"{comparisons[0].candidate_name}.",
                "Normals are recorded on the whole corpus.",
                "Record it again without --limit.",
            )
        if c.upper is not None:
            raise UserError(
                f"Normal {c.candidate_name} lists its own top ids: its KL is known within bounds.",
                "A normal producer is scored at the reference's ids.",
                "Record it with --reference.",
            )
        if not c.finite.all():
            raise UserError(
                f"Normal {c.candidate_name} has {int((~c.finite).sum())} rows that are not finite.",
                "A normal producer is right everywhere.",
                "Leave it out, and find out what it does there.",
            )


def _check_distinct(comparisons: Sequence[Comparison]) -> None:
    """No producer counts twice: equal bits, or numbers that hardly differ."""
    for index, c in enumerate(comparisons):
        if c.bitwise_reference:
            raise UserError(
                f"Normal {c.candidate_name} equals the reference bit for bit.",
                "A normal is another producer than the reference.",
                "Was the reference's own policy recorded again?",
            )
        for other in comparisons[:index]:
            pair = f"Normals {other.candidate_name} and {c.candidate_name}"
            if c.candidate_digest == other.candidate_digest:
                raise UserError(
                    f"{pair} are equal bit for bit.",
                    "Each normal is a producer of its own.",
                    "Leave one out: a producer counted twice makes the others' spread look small.",
                )
            size = math.sqrt(_typical(c.margin_change) * _typical(other.margin_change))
            apart = _typical(c.margin_change - other.margin_change)
            if apart < _NEAR_DUPLICATE * size:
                raise UserError(
                    f"{pair} differ from each other by only {apart / size:.1%} of what they differ "
                    "from the reference.",
                    f"Producers differ by at least {_NEAR_DUPLICATE:.0%}, or they are one.",
                    "Leave one out.",
                )


def _typical(changes: np.ndarray) -> float:
    """The median of the sizes: of heavy tails a mean of squares is one row, on which two producers
    agree by chance."""
    return float(np.median(np.abs(changes)))


def _check_outliers(
    names: Sequence[str],
    rows: Sequence[Row],
    loo: dict[str, list[Estimate]],
    max_ratio: float,
) -> None:
    """Each producer's mean ln R against its peers': a t test on the producers, and a plain limit.

    With four producers the test alone is blind (three peers say little about spread); the limit
    is what keeps one noisy producer from buying room for everybody. All gates that are ratios are
    looked at: a fault at edges only would widen what is allowed at edges.
    """
    tested = [row for row in rows if row.key in loo]
    count = len(names)
    for row in tested:
        deviation = np.array([e.value for e in loo[row.key]])  # from the mean of the others
        if row.statistic == "self":  # measured against the normals' level, not among themselves
            deviation = (deviation - deviation.mean()) * count / (count - 1)
        sampling = math.sqrt(float(np.mean([e.se**2 for e in loo[row.key]])))
        own = deviation * (count - 1) / count
        for index, name in enumerate(names):
            others = np.delete(own, index)
            spread = max(float(np.std(others, ddof=1)), sampling, 0.01)
            statistic = abs(deviation[index]) / (spread * math.sqrt(1 + 1 / (count - 1)))
            p = 2 * t_upper_tail(statistic, count - 2) * count * len(tested)
            apart = abs(own[index] - float(np.median(others)))
            if apart - 2 * sampling > math.log(max_ratio) or p < _OUTLIER_P:
                peers = ", ".join(
                    f"{other} {math.exp(value):.3g}"
                    for other, value in zip(names, own, strict=True)
                    if other != name
                )
                what = "its KL" if row.statistic != "self" else "KL(its prefill || its own decode)"
                raise UserError(
                    f"Normal {name} is an outlier: {what} is {math.exp(own[index]):.3g} times the "
                    f"mean of all (gate {row.gate}, {row.stratum}), its peers are at {peers}.",
                    f"Equally right producers agree within {max_ratio:g} times and are not told "
                    "apart from their peers' own spread.",
                    "Leave it out: a candidate may PASS and yet be unlike these normals in one "
                    "gate, where it would buy room for everybody. If it is right, give more "
                    "producers that do the same.",
                )


def _check_by_peers(
    segments: Sequence[Segment], names: Sequence[str], rows: Sequence[Row], all_: Sequence[Summary]
) -> None:
    """A producer that a band of the others would FAIL as a candidate buys room for what it does."""
    for index, name in enumerate(names):
        peers = [summary for i, summary in enumerate(all_) if i != index]
        limits = limits_of(rows, leave_one_out(segments, peers, rows))
        known = [row for row in rows if row.key in limits]
        for gate in decide(Evidence(segments, all_[index], peers), known, limits):
            if gate.outcome == "FAIL":
                raise UserError(
                    f"Normal {name} would FAIL by a band of its {len(peers)} peers: {gate.name}, "
                    f"{gate.stratum}, {gate.observed:.4g}, allowed {gate.allowed:.4g}.",
                    "What an equally right producer does is no worse than its peers allow.",
                    "Leave it out, or give more producers of its kind if it is right.",
                )


def _check_width(rows: Sequence[Row], limits: dict[str, Any], max_ratio: float) -> None:
    for row in rows:
        if row.key not in limits:
            raise UserError(
                f"Stratum {row.stratum} has too few segments for an interval.",
                "Every kind has at least two segments at some depth; a verdict wants 16.",
                "Record a larger corpus.",
            )
        limit = limits[row.key]
        if limit.tolerance > math.log(max_ratio):
            raise UserError(
                f"The producers' own spread would allow {math.exp(limit.tolerance):.3g} times the "
                f"normal difference ({row.stratum}).",
                f"A band of use allows at most {max_ratio:g}.",
                "Find out which producer is wrong, or give more of them: the factor on their "
                "spread falls from 5.1 with four to 2.9 with ten.",
            )


def _check_bad(band: Band, comparison: Comparison) -> dict[str, Any]:
    """The known-bad recording's verdict by this band; UserError if no gate shows it."""
    verdict = judge(comparison, band)
    name = comparison.candidate_name
    worst, excess = None, -math.inf
    for gate in verdict.gates:
        if gate.outcome == "FAIL" and gate.name in ("nonfinite", "confident_flips"):
            worst, excess = gate, math.inf
        elif gate.observed is not None and gate.allowed and gate.quantity != "count":
            above = abs(gate.observed) / gate.allowed
            if above > excess:
                worst, excess = gate, above
    if worst is None or excess <= 1:
        closest = (
            f"closest is gate {worst.name}, {worst.stratum}: {worst.observed:.4g} of "
            f"{worst.allowed:.4g} allowed, a gap of {1 / excess:.3g} times"
            if worst is not None and worst.observed is not None and worst.allowed is not None
            else "no gate could be computed"
        )
        raise UserError(
            f"The known-bad recording {name} stays below what this band allows everywhere; "
            f"{closest}.",
            "Every known-bad recording exceeds the allowed value of at least one gate.",
            "Narrower producers or more segments lower the limits; a deeper corpus may raise the "
            "bad one's effect.",
        )
    if verdict.outcome != "FAIL":
        raise UserError(
            f"The known-bad recording {name} is {verdict.outcome} by this band: {worst.name}, "
            f"{worst.stratum}, is {worst.observed:.4g} of {worst.allowed:.4g} allowed, within the "
            "chance of it.",
            "Every known-bad recording FAILs by the band that is made against it.",
            "Record it on the whole corpus, or on more segments; narrower producers lower the "
            "limits.",
        )
    return {
        "name": label(comparison.candidate_manifest, name),
        "digest": comparison.candidate_digest,
        "verdict": str(verdict.outcome),
        "gate": f"{worst.name}: {worst.stratum}",
        "observed": worst.observed,
        "allowed": worst.allowed,
    }


def _margins(comparisons: Sequence[Comparison], level: int) -> dict[str, Any]:
    """Flip rates by margin bin, flip limits, noise size and the empirical tail of changes."""
    first = comparisons[0]
    rows = first.phase == level
    bins = margin_bin(first.margin)
    size = len(MARGIN_LABELS)
    positions = np.bincount(bins[rows], minlength=size)
    flips = np.mean(
        [
            np.bincount(bins[rows], (c.flipped | c.tie_flipped)[rows], minlength=size)
            for c in comparisons
        ],
        axis=0,
    )
    changes = np.abs(np.concatenate([c.margin_change[rows] for c in comparisons]))
    limits = flip_limits(comparisons)
    return {
        "bins": [
            {"margin": label, "positions": int(n), "flips": float(f), "rate": _rate(f, n)}
            for label, n, f in zip(MARGIN_LABELS, positions, flips, strict=True)
        ],
        "largest_flip_margin": limits["largest"],
        "confident_margin": limits["confident"],
        "tables": margin_tables(comparisons),
        "sigma": float(f"{logit_noise(changes):.6g}"),
        "change_quantiles": {
            f"{q:g}": float(f"{np.quantile(changes, q):.6g}") for q in (*_QUANTILES, 1.0)
        },
    }


def _rate(flips: float, positions: int) -> float | None:
    return float(f"{flips / positions:.4g}") if positions else None


def _strata(comparisons: Sequence[Comparison]) -> list[dict[str, Any]]:
    """KL quantiles of the normals pooled, by kind x context_len x phase."""
    first = comparisons[0]
    kinds = np.array([s.kind for s in first.segments])[first.segment]
    contexts = np.array([s.context_len for s in first.segments])[first.segment]
    pooled = np.stack([c.kl for c in comparisons])
    result = []
    for kind, context in sorted({(s.kind, s.context_len) for s in first.segments}):
        for phase, phase_name in enumerate(PHASES):
            rows = (kinds == kind) & (contexts == context) & (first.phase == phase)
            if rows.any():
                kl = pooled[:, rows]
                result.append(
                    {"kind": kind, "context_len": context, "phase": phase_name}
                    | {"positions": int(rows.sum()), "mean": float(f"{kl.mean():.6g}")}
                    | {
                        f"p{q * 100:g}": float(f"{np.quantile(kl, q):.6g}")
                        for q in (*_LOWER_QUANTILES, *_QUANTILES)
                    }
                    | {"max": float(f"{kl.max():.6g}")}
                )
    return result

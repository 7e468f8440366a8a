"""What a reader should know of a verdict and nothing depends on: its band, its candidate."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from kernjax.judge import metrics
from kernjax.judge.case import LISTED, Case, Finding
from kernjax.judge.gates import CONFIDENCE, TESTED, Row

_BLIND = 4.0
"""A gate row that allows more than this many times the normal difference sees little."""

_TOO_GOOD = 0.1
"""R below which a candidate of the production precision is not to be expected."""


def notes(case: Case) -> Iterator[Finding]:
    """What a reader should know and nothing depends on."""
    c = case.comparison
    yield from _about_the_band(case)
    if case.twin_producer is not None:
        producer = case.band.producers[case.twin_producer]
        ours, theirs = (
            {key: one.get(key) for key in ("policy", "kernels", "engine")}
            for one in (c.candidate_manifest, producer)
        )
        yield Finding(
            "note" if ours == theirs else "warning",
            f"Every bit equals normal producer {producer.get('name')} of the band (the same code "
            "path?); it is compared with the others.",
            "" if ours == theirs else "Make sure that the change is what ran.",
        )
    elif not c.bitwise_reference and _is_too_good(case):
        yield Finding(
            "warning",
            f"The candidate is more than {1 / _TOO_GOOD:g} times nearer to the truth than any "
            "normal producer.",
            "Make sure that it ran at the production's precision.",
        )
    scored_twice = c.self_kl[np.isfinite(c.self_kl)]
    if scored_twice.size and not scored_twice.any():
        yield Finding(
            "warning",
            "Every decoded row equals the rescored one, in which a prefill of the same tokens "
            "scores it: decode did not run, or runs the same arithmetic.",
            "Make sure that the rows called decode were decoded token by token.",
        )
    own, window = c.candidate_manifest.get("prefill_window"), c.prefill_window
    if own and window and own != window:
        yield Finding(
            "warning",
            f"The candidate's prefill windows are {own} tokens long, the reference's {window}: "
            "what is scored just after window edges is not after its own.",
            "Record a reference with the candidate's prefill_window to test them.",
        )
    if case.subject.floored:
        yield Finding(
            "note",
            f"{case.subject.floored} of {int(case.rows.sum())} positions have a KL below "
            f"{metrics.KL_FLOOR:g}; ratios take that value there.",
        )
    if ties := int(c.tie_flipped[case.rows].sum()):
        yield Finding(
            "note",
            f"{ties} of the flips are at exact ties of the reference: shown, but no gate counts "
            "them.",
        )
    values = case.evidence.statistics["geometric"][case.measured]
    if values.size >= 8:
        above = values - np.median(values)
        spread = 1.4826 * float(np.median(np.abs(above)))
        odd = np.nonzero(case.measured)[0][above > max(6 * spread, math.log(2))]
        if odd.size:
            names = ", ".join(case.segments[i].id for i in odd[:LISTED])
            yield Finding(
                "warning",
                f"{odd.size} segments have a ratio far above all others': {names}.",
                "A stale state or slot shows in single segments.",
            )


def _is_too_good(case: Case) -> bool:
    highs = [
        estimate.bound(CONFIDENCE)
        for kind, mean in case.allowed
        if mean == "geometric"
        if (estimate := case.evidence.estimate(Row("level", "", mean, kind=kind))) is not None
    ]
    return bool(highs) and max(highs) < math.log(_TOO_GOOD)


_ABSENT = {
    "growth_context": "one depth only",
    "growth_decode": "no decode steps",
    "flips": "fewer than 20 flips of normal runs",
    "decode_vs_prefill": "no rescored tokens",
}


def _about_the_band(case: Case) -> Iterator[Finding]:
    """What this band cannot show, whatever the candidate."""
    band = case.band
    blind = [
        f"{row.gate}, {row.stratum} ({row.shown(band.limits[row.key].allowed):.3g})"
        for row in band.rows
        if row.quantity != "mass" and band.limits[row.key].allowed > math.log(_BLIND)
    ]
    if blind:
        yield Finding(
            "warning",
            f"{len(blind)} gate rows allow more than {_BLIND:g} times the normal difference: "
            + "; ".join(blind[:LISTED])
            + ("; ..." if len(blind) > LISTED else "."),
            "Record a larger corpus and calibrate on it.",
        )
    if absent := [gate for gate in TESTED if all(row.gate != gate for row in band.rows)]:
        why = "; ".join(f"{gate}: {_ABSENT.get(gate, 'no such rows')}" for gate in absent)
        yield Finding(
            "warning",
            f"What this corpus and reference cannot test is not tested: {why}.",
            "Record a reference that has it, and calibrate on that.",
        )
    if not band.bad:
        yield Finding(
            "note",
            "The band was calibrated without a known-bad recording: that it can tell one from "
            "normal rests on its detection floor alone.",
            "Calibrate with --bad.",
        )

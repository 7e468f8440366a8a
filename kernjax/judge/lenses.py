"""Two further looks at a candidate: its site in isolation, and itself against the incumbent.

Isolated: the f32 policy with only the change, against the same reference. KL of independent
causes adds, so that on the scale of the in-place ratio the change alone predicts

    R_iso(depth) = 1 + KL_isolated / KL_normal,      KL_isolated / KL_normal ~ context^exponent

The law is fitted log-log over at least four depths. It speaks for depths beyond those measured in
place (there the measurement itself decides) and may withhold a PASS, never grant one.

Incumbent: R(candidate)/R(incumbent) on the same rows. It is reported, and decides nothing but
identity: a candidate is held to the truth, not to what happens to be in main.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kernjax.judge import intervals
from kernjax.judge.comparison import Comparison
from kernjax.judge.gates import CONFIDENCE, Evidence, Row
from kernjax.judge.intervals import Estimate
from kernjax.judge.summaries import Summary, summarise

LAW_DEPTHS = 4
_MEANS = ("geometric", "arithmetic")


@dataclass(frozen=True)
class IsolatedDepth:
    """R_iso at one depth of one kind, with one-sided 95 % bounds."""

    kind: str
    mean: str  # geometric or arithmetic
    context_len: int
    ratio: float
    low: float
    high: float


@dataclass(frozen=True)
class IsolatedLaw:
    """How the isolated effect grows with the context, and where it would leave the band."""

    kind: str
    mean: str
    depths: int
    exponent: float | None  # KL_isolated/KL_normal ~ context^exponent; None below four depths
    exponent_low: float | None
    exponent_high: float | None
    at_context: int  # where the prediction is needed
    predicted_high: float  # upper 95 % bound of R_iso there
    allowed: float
    leaves_at: float | None  # context at which the fitted R_iso reaches the allowed ratio

    @property
    def leaves(self) -> bool:
        """Whether the effect may leave the band at or before `at_context`."""
        return self.predicted_high >= self.allowed


@dataclass(frozen=True)
class IncumbentRow:
    """One kind: R of both against normal, and their paired ratio with one-sided 95 % bounds."""

    kind: str
    mean: str
    candidate: float
    incumbent: float
    ratio: float
    low: float
    high: float


def isolated_lens(
    isolated: Comparison,
    normals: Sequence[Summary],
    level: int,
    allowed: dict[tuple[str, str], float],
    at_context: int,
) -> tuple[list[IsolatedDepth], list[IsolatedLaw]]:
    """R_iso by depth and its law up to `at_context`; `allowed` [kind, mean] is a ratio."""
    evidence = Evidence(isolated.segments, summarise(isolated, level), normals)
    depths, laws = [], []
    contexts = np.array([s.context_len for s in isolated.segments])
    for kind in sorted({s.kind for s in isolated.segments}):
        for mean in _MEANS:
            values = evidence.values(Row("level", "", mean, kind=kind))
            if not np.isfinite(values).any():
                continue
            known = sorted(set(contexts[np.isfinite(values)].tolist()))
            here = []
            for context in known:
                estimate = intervals.mean_of(
                    np.where(contexts == context, values, np.nan), contexts
                )
                if estimate is not None:
                    here.append(_depth(kind, mean, context, estimate))
            depths += here
            law = _law(kind, mean, values, contexts, here, allowed[kind, mean], at_context)
            if law is not None:
                laws.append(law)
    return depths, laws


def _depth(kind: str, mean: str, context: int, estimate: Estimate) -> IsolatedDepth:
    return IsolatedDepth(
        kind,
        mean,
        int(context),
        1 + math.exp(estimate.value),
        1 + math.exp(estimate.bound(1 - CONFIDENCE)),
        1 + math.exp(estimate.bound(CONFIDENCE)),
    )


def _law(
    kind: str,
    mean: str,
    values: np.ndarray,
    contexts: np.ndarray,
    depths: Sequence[IsolatedDepth],
    allowed: float,
    at_context: int,
) -> IsolatedLaw | None:
    """The fitted line's bound; below four depths the worst bound measured stands for it."""
    if not depths:
        return None
    known, cell = np.unique(contexts, return_inverse=True)
    logs = np.log2(known)
    slope = intervals.slope_of(values, cell, logs)
    line = intervals.line_at(values, cell, logs, math.log2(at_context))
    worst = max(depth.high for depth in depths)
    if len(depths) < LAW_DEPTHS or slope is None or line is None:
        return IsolatedLaw(
            kind, mean, len(depths), None, None, None, max(d.context_len for d in depths), worst,
            allowed, None,
        )  # fmt: skip
    leaves_at = None
    if allowed > 1 and slope.value > 0:
        gap = (math.log(allowed - 1) - line.value) / slope.value
        leaves_at = at_context * 2.0**gap if gap < 64 else None
    per_octave = math.log(2.0)  # ln per doubling -> exponent of the context
    return IsolatedLaw(
        kind,
        mean,
        len(depths),
        slope.value / per_octave,
        slope.bound(1 - CONFIDENCE) / per_octave,
        slope.bound(CONFIDENCE) / per_octave,
        at_context,
        1 + math.exp(line.bound(CONFIDENCE)),
        allowed,
        leaves_at,
    )


def incumbent_lens(
    subject: Summary, evidence: Evidence, incumbent: Comparison, level: int,
    normals: Sequence[Summary],
) -> list[IncumbentRow]:  # fmt: skip
    """R(candidate)/R(incumbent) by kind; all on the same segments."""
    other = summarise(incumbent, level)
    against_normal = Evidence(evidence.segments, other, normals)
    paired = Evidence(evidence.segments, subject, [other])
    rows = []
    for kind in sorted({s.kind for s in evidence.segments}):
        for mean in _MEANS:
            row = Row("level", "", mean, kind=kind)
            own, theirs, both = (e.estimate(row) for e in (evidence, against_normal, paired))
            if own is None or theirs is None or both is None:
                continue
            rows.append(
                IncumbentRow(
                    kind,
                    mean,
                    row.shown(own.value),
                    row.shown(theirs.value),
                    row.shown(both.value),
                    row.shown(both.bound(1 - CONFIDENCE)),
                    row.shown(both.bound(CONFIDENCE)),
                )
            )
    return rows

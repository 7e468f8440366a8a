"""judge(comparison, band): PASS, FAIL or INCONCLUSIVE, with every reason.

Never rounds towards PASS: a PASS needs every predeclared gate below its limit with 95 %
confidence, on the whole corpus, with enough independent segments. All gates are evaluated;
none stops at the first finding. The rules are NUMERICS section 5.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from kernjax.base.errors import EXIT_FAIL, EXIT_INCONCLUSIVE, EXIT_PASS
from kernjax.judge import concealed, metrics, rules
from kernjax.judge.band import Band
from kernjax.judge.case import SEVERITIES, Case, Finding
from kernjax.judge.changes import changes
from kernjax.judge.comparison import PHASES, Comparison, label
from kernjax.judge.gates import Gate, Outcome, decide
from kernjax.judge.lenses import (
    IncumbentRow,
    IsolatedDepth,
    IsolatedLaw,
    incumbent_lens,
    isolated_lens,
)
from kernjax.judge.notes import notes
from kernjax.judge.strata import (
    MarginBin,
    Stratum,
    kl_summary,
    manifest_differences,
    margin_bins,
    strata_of,
)


@dataclass(frozen=True, eq=False)
class Verdict:
    """The outcome as a value with its reasons."""

    outcome: Outcome
    reason: str
    gates: tuple[Gate, ...]
    findings: tuple[Finding, ...]  # worst first
    strata: tuple[Stratum, ...]
    margin_bins: tuple[MarginBin, ...]
    kl: dict[str, float | None]  # median, mean, p99, max over the deciding rows
    flips: int
    positions: int  # deciding rows
    segments: int  # those with a ratio to normal
    up_to_context: int  # the depth that every kind was measured to
    identical: bool = False  # every bit equals the incumbent's
    segments_to_decide: dict[str, int] = field(default_factory=dict)  # further ones, by gate row
    detection_floor: dict[str, float] = field(default_factory=dict)  # by kind
    allowed: dict[str, float] = field(default_factory=dict)  # by kind: the larger mean's T
    isolated: tuple[IsolatedDepth, ...] = ()
    isolated_laws: tuple[IsolatedLaw, ...] = ()
    incumbent: tuple[IncumbentRow, ...] = ()
    perplexity: dict[str, tuple[float, float]] = field(default_factory=dict)  # value, error
    # By kind: decoded steps a segment, and the largest change of accuracy that KL allows over them.
    accuracy_bound: dict[str, tuple[float, float]] = field(default_factory=dict)
    differences: tuple[tuple[str, str, str], ...] = ()  # manifest field, reference, candidate
    changed_from: str = ""  # what runs now: the incumbent, or the band's production policy
    changes: tuple[tuple[str, str, str], ...] = ()  # field, there, candidate
    parties: dict[str, dict[str, Any]] = field(default_factory=dict)  # reference, candidate, ...
    deciding_phase: str = "decode"
    kl_upper: dict[str, float | None] | None = None  # where ids are missing: `kl` is the lower
    missing_ids: int = 0  # rows in which the candidate lacks some of the reference's ids

    @property
    def exit_code(self) -> int:
        """0 PASS, 1 FAIL, 2 INCONCLUSIVE."""
        codes = {Outcome.PASS: EXIT_PASS, Outcome.FAIL: EXIT_FAIL}
        return codes.get(self.outcome, EXIT_INCONCLUSIVE)


def judge(
    comparison: Comparison,
    band: Band | str | os.PathLike[str],
    *,
    isolated: Comparison | None = None,
    incumbent: Comparison | None = None,
    repeat: Comparison | None = None,
    deploy_context: int | None = None,
    flags: Mapping[str, str] | None = None,
) -> Verdict:
    """The verdict on a candidate.

    `comparison`: candidate against the band's reference. `isolated`: the f32 policy with only the
    candidate's change, on the same corpus. `incumbent`: what is in production now, against the
    same reference. `repeat`: the candidate recorded once more, which must be bitwise equal.
    `deploy_context`: the depth it will serve, the band's own by default. `flags`: further ones of
    the commands that findings name (`model`, say). Raises UserError (exit 3) when the band belongs
    to another reference.
    """
    if not isinstance(band, Band):
        band = Band.load(band)
    deploy = band.deploy_context if deploy_context is None else deploy_context
    case = Case(comparison, band, isolated, incumbent, repeat, deploy, flags or {})
    verdict = _judged(case)
    if comparison.upper is None:
        return verdict
    above = _judged(replace(case, comparison=comparison.upper))
    return _between(comparison, verdict, above)


def _between(comparison: Comparison, lower: Verdict, upper: Verdict) -> Verdict:
    """One verdict from those at both bounds of the KL: FAIL by the lower, PASS by the upper."""
    rows = f"{comparison.missing_ids} of {comparison.finite.size} rows"
    text = (
        f"{rows} lack some of the reference's ids: the KL lies between a mean of "
        f"{_nats(lower.kl['mean'])} and one of {_nats(upper.kl['mean'])} nats"
    )
    if lower.outcome is Outcome.FAIL:
        finding = Finding("note", f"{text}; this verdict is that of the lower bound.")
        chosen = lower
    elif upper.outcome is Outcome.PASS:
        finding = Finding("note", f"{text}; this verdict is that of the upper bound.")
        chosen = upper
    else:
        finding = Finding(
            "inconclusive",
            f"{text}; the lower bound alone would be {lower.outcome}, the upper {upper.outcome}.",
            "Score the candidate at the reference's ids, or import a longer list of ids a row.",
        )
        chosen = lower
        if lower.outcome is Outcome.PASS:
            chosen = replace(chosen, outcome=Outcome.INCONCLUSIVE, reason=finding.text)
    findings = sorted(
        (finding, *chosen.findings), key=lambda entry: SEVERITIES.index(entry.severity)
    )
    return replace(
        chosen,
        findings=tuple(findings),
        kl=lower.kl,
        kl_upper=upper.kl,
        missing_ids=comparison.missing_ids,
    )


def _nats(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _judged(case: Case) -> Verdict:
    comparison, band = case.comparison, case.band
    nonfinite, findings = rules.nonfinite(case)
    flips, flip_findings = rules.confident_flips(case)
    gates = [nonfinite, *decide(case.evidence, band.rows, band.limits), flips]
    findings += [*flip_findings, *rules.gate_findings(case, gates)]
    findings += concealed.findings(case, gates)
    further = rules.further_segments(gates)
    depths, laws = _isolated(case)
    thin, thin_segments = rules.coverage(case)
    findings += thin
    further |= thin_segments
    findings += [*rules.isolated(case, laws), *rules.deployment(case, laws)]
    alone = _outcome(findings)
    if identical := _identical(case):
        findings = rules.identical(case, findings)
    findings += rules.run(case)
    incumbent_rows = _incumbent(case)
    findings += [*rules.against_incumbent(case, incumbent_rows), *notes(case)]
    if _outcome(findings) is Outcome.FAIL:
        findings = rules.with_next_steps(case, findings)
    findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))

    outcome = _outcome(findings)
    changed_from, changed = changes(case)
    return Verdict(
        outcome=outcome,
        reason=_reason(case, outcome, alone if identical else None, findings),
        gates=tuple(gates),
        findings=tuple(findings),
        strata=tuple(strata_of(comparison, case.evidence, band.level)),
        margin_bins=tuple(margin_bins(comparison, case.evidence, band.level)),
        kl=kl_summary(comparison.kl[case.rows]),
        flips=int((comparison.flipped | comparison.tie_flipped)[case.rows].sum()),
        positions=int(case.rows.sum()),
        segments=int(case.measured.sum()),
        up_to_context=case.depth,
        identical=identical,
        segments_to_decide={} if outcome is not Outcome.INCONCLUSIVE else further,
        detection_floor=dict(band.detection_floor),
        allowed=_largest_by_kind(case),
        isolated=tuple(depths),
        isolated_laws=tuple(laws),
        incumbent=tuple(incumbent_rows),
        perplexity=_perplexity(case),
        accuracy_bound=_accuracy_bound(comparison),
        differences=tuple(
            manifest_differences(comparison.reference_manifest, comparison.candidate_manifest)
        ),
        changed_from=changed_from,
        changes=changed,
        parties=_parties(case),
        deciding_phase=PHASES[band.level],
    )


def _outcome(findings: Sequence[Finding]) -> Outcome:
    severities = {finding.severity for finding in findings}
    if "fail" in severities:
        return Outcome.FAIL
    return Outcome.INCONCLUSIVE if "inconclusive" in severities else Outcome.PASS


def _identical(case: Case) -> bool:
    """Whether every bit of the whole corpus equals the incumbent's."""
    incumbent = case.incumbent
    return (
        incumbent is not None
        and not case.missing
        and incumbent.candidate_digest == case.comparison.candidate_digest
    )


def _isolated(case: Case) -> tuple[list[IsolatedDepth], list[IsolatedLaw]]:
    if case.isolated is None:
        return [], []
    at_context = max(max(s.context_len for s in case.segments), case.deploy_context or 0)
    normals = case.normals_on(case.isolated.segments)
    return isolated_lens(case.isolated, normals, case.band.level, case.allowed, at_context)


def _incumbent(case: Case) -> list[IncumbentRow]:
    if case.incumbent is None:
        return []
    return incumbent_lens(
        case.subject, case.evidence, case.incumbent, case.band.level, case.normals
    )


def _perplexity(case: Case) -> dict[str, tuple[float, float]]:
    c = case.comparison
    rows = case.rows & c.finite
    if not rows.any():
        return {}
    return {
        "reference": metrics.perplexity(c.reference_target[rows], c.segment[rows]),
        "candidate": metrics.perplexity(c.candidate_target[rows], c.segment[rows]),
    }


def _accuracy_bound(c: Comparison) -> dict[str, tuple[float, float]]:
    """Where the whole vocabulary was recorded: steps a segment, and sqrt(mean summed KL / 2).

    The mean over segments of each one's own bound is no larger (the root is concave).
    """
    if c.full_kl is None:
        return {}
    bounds = {}
    kinds = np.array([s.kind for s in c.segments])
    decode = c.phase == PHASES.index("decode")
    for kind in sorted(set(kinds.tolist())):
        rows = decode & (kinds == kind)[c.segment]
        if rows.any() and np.isfinite(c.full_kl[rows]).all():
            segments = np.unique(c.segment[rows]).size
            total = float(c.full_kl[rows].sum()) / segments
            bounds[kind] = (int(rows.sum()) / segments, metrics.accuracy_bound(total))
    return bounds


def _parties(case: Case) -> dict[str, dict[str, Any]]:
    """Who was compared: path, label and identity of each recording, and the band."""
    c, band = case.comparison, case.band
    parties: dict[str, dict[str, Any]] = {
        "reference": {
            "path": c.reference_name,
            "label": label(c.reference_manifest, c.reference_name),
            "identity": c.reference_identity,
            "model": (c.reference_manifest.get("model") or {}).get("name"),
            "corpus": (c.reference_manifest.get("corpus") or {}).get("name"),
        }
    }
    for key in ("comparison", "isolated", "incumbent", "repeat"):
        one: Comparison | None = getattr(case, key)
        if one is not None:
            parties["candidate" if key == "comparison" else key] = {
                "path": one.candidate_name,
                "label": label(one.candidate_manifest, one.candidate_name),
                "digest": one.candidate_digest,
            }
    parties["band"] = {
        "path": band.path,
        "producers": [str(producer.get("name", "?")) for producer in band.producers],
        "production_policy": band.production_policy,
        "deploy_context": case.deploy_context,
    }
    return parties


def _largest_by_kind(case: Case) -> dict[str, float]:
    kinds: dict[str, float] = {}
    for (kind, _), value in case.allowed.items():
        kinds[kind] = max(kinds.get(kind, 0.0), value)
    return kinds


def _reason(
    case: Case, outcome: Outcome, alone: Outcome | None, findings: Sequence[Finding]
) -> str:
    """`alone`: of a candidate whose every bit is the incumbent's, the outcome without that."""
    if outcome is Outcome.PASS and alone is not None:
        own = "is a PASS" if alone is Outcome.PASS else f"would be {alone}"
        return (
            f"identical: every recorded bit equals the incumbent's; against the truth alone it "
            f"{own}, up to context {case.depth}."
        )
    if outcome is Outcome.PASS:
        limits = ", ".join(f"{v:.3g} ({kind})" for kind, v in _largest_by_kind(case).items())
        return (
            f"with 95 % confidence no worse than {limits} times the normal difference, up to "
            f"context {case.depth}."
        )
    severity = "fail" if outcome is Outcome.FAIL else "inconclusive"
    reasons = [finding for finding in findings if finding.severity == severity]
    others = len(reasons) - 1
    more = f"; {others} more finding{'s' if others > 1 else ''} below" if others else ""
    text = reasons[0].text.rstrip(".") + more + "."
    both = "identical to the incumbent, and both are wrong: "
    return both + text if outcome is Outcome.FAIL and alone is not None else text

"""The rules of NUMERICS section 5 beside the tested gates, each as findings with what to do."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from kernjax.judge import intervals, metrics
from kernjax.judge.case import LISTED, Case, Finding
from kernjax.judge.comparison import DECODE, PHASES, PREFILL, RESCORE
from kernjax.judge.gates import CONFIDENCE, RULES, Gate, Outcome
from kernjax.judge.lenses import LAW_DEPTHS, IncumbentRow, IsolatedLaw

MIN_SEGMENTS = 16
TAIL_WARNING, TAIL_LIMIT = 0.2, 0.4
MAX_EXTRAPOLATION = 4
_MAX_COPIED, _MAX_COPIED_PREFILL = 0.01, 0.25
"""Share of a phase's rows with the reference's own bits: none of 17,664 in right and wrong bf16
policies of the demo. At a prompt's first tokens there may be nothing to sum in another order."""

_GROUPS_OF_PHASE = {DECODE: ("level",), RESCORE: ("rescore",), PREFILL: ("last", "edge_chunk")}


def nonfinite(case: Case) -> tuple[Gate, list[Finding]]:
    """Any value of the candidate that is not finite fails."""
    c = case.comparison
    bad = np.nonzero(~c.finite)[0]
    findings = []
    if bad.size:
        phases = sorted({PHASES[phase] for phase in c.phase[bad]})
        findings.append(
            Finding(
                "fail",
                f"{bad.size} of {c.finite.size} rows hold values that are not finite "
                f"({', '.join(phases)}); the first: segment {c.segments[c.segment[bad[0]]].id}, "
                f"position {c.pos[bad[0]]}.",
                "Look there for exp of masked or padded values, and for overflow in half "
                "precision.",
            )
        )
    if case.isolated is not None and not case.isolated.finite.all():
        alone = ~case.isolated.finite
        findings.append(
            Finding(
                "fail",
                f"In isolation, float32 with the change alone, {int(alone.sum())} of {alone.size} "
                "rows hold values that are not finite.",
                "The change itself computes them; production's own rounding may hide it.",
            )
        )
    outcome = Outcome.FAIL if findings else Outcome.PASS
    gate = Gate(
        "nonfinite", "all", "count", float(bad.size), None, None, 0.0, outcome, len(c.segments)
    )
    return gate, findings


def confident_flips(case: Case) -> tuple[Gate, list[Finding]]:
    """Flips where normal runs have none: two in different segments fail, or one far beyond."""
    c, margins = case.comparison, case.band.margins
    limit, largest = float(margins["confident_margin"]), float(margins["largest_flip_margin"])
    far = max(2.0 * largest, limit)
    rows = np.nonzero(c.flipped & (c.margin > limit))[0]
    rows = rows[np.argsort(-c.margin[rows], kind="stable")]
    outcome, findings = Outcome.PASS, []
    if rows.size:
        segments = np.unique(c.segment[rows]).size
        fails = segments >= 2 or bool(c.margin[rows[0]] > far)
        outcome = Outcome.FAIL if fails else Outcome.INCONCLUSIVE
        # A token may have flipped in decode and in rescoring: its largest margin comes first.
        places: dict[tuple[int, int], float] = {}
        for row in rows:
            places.setdefault((int(c.segment[row]), int(c.pos[row])), float(c.margin[row]))
        listed = "; ".join(
            f"{c.segments[segment].id} at {pos}, margin {margin:.3g}"
            for (segment, pos), margin in list(places.items())[:LISTED]
        )
        twice = " (decoded and rescored are two)" if rows.size > len(places) else ""
        findings.append(
            Finding(
                "fail" if fails else "inconclusive",
                f"{_counted(rows.size, 'confident flip')} at {_counted(len(places), 'position')}"
                f" in {_counted(segments, 'segment')}{twice}: margin above {limit:.3g}, "
                f"where normal runs do not flip (their largest: {largest:.3g}): {listed}.",
                "" if fails else "One can be chance: record more segments to see a second.",
            )
        )
    gate = Gate(
        "confident_flips", f"margin >{limit:.3g}", "count", float(rows.size), None, None, 0.0,
        outcome, len(c.segments),
    )  # fmt: skip
    return gate, findings


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def gate_findings(case: Case, gates: Sequence[Gate]) -> Iterator[Finding]:
    """One finding for each gate that failed or is undecided: its clearest row."""
    for severity, outcome in (("fail", Outcome.FAIL), ("inconclusive", Outcome.INCONCLUSIVE)):
        failed = {g.name for g in gates if g.outcome is Outcome.FAIL}
        for name in dict.fromkeys(g.name for g in gates if g.outcome is outcome):
            # A gate that failed has said so; its undecided rows add nothing.
            if name not in RULES and (severity == "fail" or name not in failed):
                rows = [g for g in gates if g.name == name and g.outcome is outcome]
                yield _gate_finding(severity, rows)
    for gate in gates:
        if gate.outcome is Outcome.NOT_TESTED:
            yield Finding(
                "inconclusive",
                f"Gate {gate.name} ({gate.stratum}) could not be tested: {gate.note}.",
            )
        elif gate.note:
            yield Finding("note", f"Gate {gate.name}, {gate.stratum}: {gate.note}.")
        if (
            gate.outcome is Outcome.PASS
            and gate.bootstrap_high is not None
            and gate.allowed is not None
            and gate.bootstrap_high >= gate.allowed
        ):
            yield Finding(
                "warning",
                f"Gate {gate.name}, {gate.stratum}: Student's bound {gate.high:.4g} is inside the "
                f"{gate.allowed:.4g} allowed, the bootstrap over {gate.segments} segments is at "
                f"{gate.bootstrap_high:.4g}: a few segments are far from the others.",
            )


_RESCORED = "On rescored {kind}{at} the KL is {value} times normal ({mean} mean)"
_SENTENCES = {
    "level": "On {kind}{at} the KL is {value} times normal ({mean} mean)",
    "growth_context": "On {kind} the ratio to normal grows {value} times per doubling of the "
    "context",
    "growth_decode": "On {kind} the ratio to normal is {value} times larger in the late half of "
    "the decode steps than in the early one",
    "flips": "At {stratum} there are {value} times as many flips as normal",
    "tail_mass": "On {kind} the probability outside the recorded ids changes by {value}",
    "edges": "At edges ({stratum}) the KL is {value} times normal",
    "decode_vs_prefill": "Decode differs from one-shot prefill of the same tokens {value} times as "
    "much as two equally right producers do",
    "prefill_last": "At the prompt's last position the KL is {value} times normal",
}


def _gate_finding(severity: str, rows: Sequence[Gate]) -> Finding:
    worst = min(
        rows,
        key=lambda gate: (gate.p_value, -abs(gate.observed or 0.0) / (gate.allowed or 1.0)),
    )
    is_rescored = worst.name == "decode_vs_prefill" and worst.kind is not None
    text = (_RESCORED if is_rescored else _SENTENCES[worst.name]).format(
        stratum=worst.stratum,
        kind=worst.kind,
        mean=worst.mean,
        at=f" at context {worst.context_len}" if worst.context_len else "",
        value=f"{worst.observed:.4g} [{worst.low:.4g}, {worst.high:.4g}]",
    )
    text += f", allowed {worst.allowed:.4g} (gate {worst.name}"
    if len(rows) > 1:
        text += f", and {len(rows) - 1} more of its rows"
    text += ")"
    if severity == "fail":
        return Finding(severity, text + ".")
    further = further_segments(rows).values()
    todo = f"About {max(further)} more segments there would decide" if further else ""
    if undecidable := len(rows) - len(further):
        sit = "sits" if undecidable == 1 else "sit"
        limit = (
            f"{undecidable} of these rows {sit} on the limit, where even many more may not decide"
        )
        todo = f"{todo}; {limit}" if todo else limit[0].upper() + limit[1:]
    return Finding(severity, text + ".", todo + ".")


def further_segments(gates: Sequence[Gate]) -> dict[str, int]:
    """Segments beyond those there that would decide each undecided row, where that can be said."""
    return {
        f"{gate.name}, {gate.stratum}": gate.segments_needed - gate.segments
        for gate in gates
        if gate.outcome is Outcome.INCONCLUSIVE and gate.segments_needed is not None
    }


def with_next_steps(case: Case, findings: Sequence[Finding]) -> list[Finding]:
    """The findings of a red verdict, the first with the command that finds out what carries it."""
    result = list(findings)
    first = next(i for i, finding in enumerate(result) if finding.severity == "fail")
    if locate := case.locate_command():
        todo = f"{result[first].todo} Find out which layer, op and rounding site carries it."
        result[first] = replace(result[first], todo=todo.strip(), command=locate)
    if case.incumbent is None:
        result.append(
            Finding(
                "note",
                "Nothing here says whether what is in production now does the same.",
                "Record it, and set the candidate beside it.",
                case.check_command(incumbent="RECORDING"),
            )
        )
    return result


def identical(case: Case, findings: Sequence[Finding]) -> list[Finding]:
    """The findings on a candidate whose every bit equals the incumbent's.

    It changes nothing, so that what could not be decided is no reason to hold it back. What is
    wrong is wrong in both and stays a FAIL: production's own fault is no yardstick.
    """
    incumbent = case.incumbent
    assert incumbent is not None
    name = incumbent.candidate_name
    if incumbent.candidate_identity and (
        incumbent.candidate_identity == case.comparison.candidate_identity
    ):
        return [
            *findings,
            Finding(
                "warning",
                f"The candidate and the incumbent {name} are one recording, or two of the same "
                "producer: the same policy, kernels, versions and commit.",
                "Make sure that the change is in what was recorded as the candidate.",
            ),
        ]
    is_red = any(finding.severity == "fail" for finding in findings)
    text = f"Every recorded bit equals the incumbent's, {name}: the same code path?"
    if is_red:
        text += " What fails here fails in the incumbent too: this change is not the cause."
    else:
        findings = [
            replace(f, severity="warning") if f.severity == "inconclusive" else f for f in findings
        ]
    todo = "Make sure, under 'what differs', that the changed kernel is the one that ran."
    return [Finding("warning", text, todo), *findings]


def run(case: Case) -> Iterator[Finding]:
    """The run itself: partial, not reproducible, or not another code path at all."""
    c = case.comparison
    if case.missing:
        yield Finding(
            "inconclusive",
            f"The run is partial: {len(case.segments)} of {len(case.band.segments)} segments.",
            "Run the whole corpus, without --limit; an interrupted recording resumes.",
            case.check_command(),
        )
    if c.bitwise_reference:
        yield Finding(
            "inconclusive",
            "Every recorded bit equals the reference's: only the reference's own code path was "
            "seen.",
            "Check that the candidate's policy or kernel is the one that ran.",
        )
    else:
        yield from _copies(case)
    yield from repeatability(case)


def _copies(case: Case) -> Iterator[Finding]:
    """Rows of a phase with the reference's own bits: they make its means smaller.

    A candidate of the reference's own precision may prefill as the reference does, to the last bit.
    """
    c = case.comparison
    if c.copied is None:
        return
    policies = [m.get("policy") or {} for m in (c.reference_manifest, c.candidate_manifest)]
    reference, candidate = (policy.get("fields", {}).get("activations") for policy in policies)
    for phase, groups in _GROUPS_OF_PHASE.items():
        rows = c.phase == phase
        share = float(c.copied[rows].mean()) if rows.any() else 0.0
        decides = phase == case.band.level
        if not decides and share == 1.0 and reference and reference == candidate:
            continue
        groups = ("level",) if decides else groups
        normal = [n.mean_log[name] for n in case.normals for name in groups if name in n.mean_log]
        allowed = _MAX_COPIED_PREFILL if phase == PREFILL and not decides else _MAX_COPIED
        if share <= allowed or not normal:
            continue
        if min(float(np.nanmean(values)) for values in normal) > math.log(10.0 * metrics.KL_FLOOR):
            yield Finding(
                "inconclusive",
                f"{share:.0%} of the {PHASES[phase]} rows are the reference's to the last bit, and "
                "no normal run comes near it: they make every mean smaller.",
                "Another producer wrote them: record the candidate again, as a whole.",
            )


def repeatability(case: Case) -> Iterator[Finding]:
    """The same candidate twice must be the same bits: true whatever else is known of it."""
    c, repeat = case.comparison, case.repeat
    if repeat is not None and repeat.candidate_digest != c.candidate_digest:
        change = np.abs(repeat.kl - c.kl)
        lost = np.isnan(repeat.kl) != np.isnan(c.kl)
        largest = float(np.max(change, initial=0.0, where=~np.isnan(change)))
        yield Finding(
            "inconclusive",
            "The same candidate recorded twice is not bitwise equal: "
            f"{int(np.sum((change > 0) | lost))} of {change.size} rows differ in KL, by at most "
            f"{largest:.3g} nats"
            + (f", and {int(lost.sum())} are finite in one only." if lost.any() else "."),
            "Find the nondeterminism first: atomics, uninitialised memory, batch composition.",
        )


def coverage(case: Case) -> tuple[list[Finding], dict[str, int]]:
    """Enough independent segments at each kind's deepest context, enough mass in the top ids.

    Also the findings' further segments by stratum.
    """
    c, findings, further = case.comparison, [], {}
    widest = float(case.band.settings.get("max_allowed_ratio", math.inf))
    for (kind, mean), allowed in case.allowed.items():
        if allowed > widest:
            findings.append(
                Finding(
                    "inconclusive",
                    f"This corpus resolves only ratios above {allowed:.3g} on {kind} ({mean}); "
                    f"{widest:g} is the widest that is of use.",
                    "Record a larger corpus and calibrate on it.",
                )
            )
    prints = _fingerprints(case)
    for kind in sorted({s.kind for s in case.band.segments}):
        depth = max(s.context_len for s in case.band.segments if s.kind == kind)
        members = [
            i
            for i, s in enumerate(case.segments)
            if s.kind == kind and s.context_len == depth and case.measured[i]
        ]
        distinct = len({prints[i] for i in members})
        if distinct < MIN_SEGMENTS:
            repeated = "" if distinct == len(members) else f" ({len(members)} with repetitions)"
            further[f"coverage, {kind}, {depth}"] = MIN_SEGMENTS - distinct
            findings.append(
                Finding(
                    "inconclusive",
                    f"Coverage is thin: {distinct} independent segments of {kind} at context "
                    f"{depth}{repeated}, {MIN_SEGMENTS} are needed.",
                    f"Record {MIN_SEGMENTS - distinct} more, each from its own place in the text.",
                )
            )
        inside = case.rows & np.array([s.kind == kind for s in case.segments])[c.segment]
        mass = float(c.tail_mass[inside].mean()) if inside.any() else 0.0
        if mass > TAIL_WARNING:
            findings.append(
                Finding(
                    "inconclusive" if mass > TAIL_LIMIT else "warning",
                    f"On average {mass:.2f} of the probability of {kind} lies outside the recorded "
                    "ids; errors inside it are not seen.",
                    "Record reference and candidate with a larger K, or use text the model knows.",
                )
            )
    return findings, further


def _fingerprints(case: Case) -> dict[int, bytes]:
    """What tells two segments apart: the reference's log-probabilities of their tokens."""
    c = case.comparison
    rows = np.nonzero(case.rows)[0]
    order = rows[np.argsort(c.segment[rows], kind="stable")]
    index, starts = np.unique(c.segment[order], return_index=True)
    parts = np.split(c.reference_target[order], starts[1:])
    return {int(i): part.tobytes() for i, part in zip(index, parts, strict=True)}


def isolated(case: Case, laws: Sequence[IsolatedLaw]) -> Iterator[Finding]:
    """An isolated effect that would leave the band by the deployment's depth withholds a PASS."""
    deeper = (case.deploy_context or 0) > case.depth
    for law in laws:
        when = f" at about context {law.leaves_at:.3g}" if law.leaves_at else ""
        if deeper and law.leaves:
            yield Finding(
                "inconclusive",
                f"In isolation the change predicts up to {law.predicted_high:.4g} times normal on "
                f"{law.kind} ({law.mean} mean) by context {law.at_context}, allowed "
                f"{law.allowed:.4g}: it would leave the band{when}.",
                "Only a recording that deep can pass it: record deeper segments.",
            )
        elif not deeper and law.leaves_at and law.exponent_low and law.exponent_low > 0:
            yield Finding(
                "note",
                f"In isolation the change grows on {law.kind} ({law.mean} mean) and would leave "
                f"the band{when}; what was measured reaches {case.depth}.",
            )


def deployment(case: Case, laws: Sequence[IsolatedLaw]) -> Iterator[Finding]:
    """Extrapolation may withhold a PASS, never grant one."""
    depth, deploy = case.depth, case.deploy_context
    if not deploy or not depth or deploy <= depth:
        return
    if deploy > MAX_EXTRAPOLATION * depth:
        yield Finding(
            "inconclusive",
            f"The deployment's context {deploy} is more than {MAX_EXTRAPOLATION} times the "
            f"measured {depth}.",
            "Record deeper segments.",
        )
        return
    if not any(law.exponent is not None for law in laws):
        why = "no isolated run" if case.isolated is None else f"fewer than {LAW_DEPTHS} depths"
        yield Finding(
            "warning",
            f"Deployment is at context {deploy} and {depth} was measured; with {why} nothing says "
            f"how the change grows, and the verdict holds up to {depth}.",
        )
    known, cell = np.unique([s.context_len for s in case.segments], return_inverse=True)
    for (kind, mean), allowed in case.allowed.items():
        values = case.level_values(kind, mean)
        slope = intervals.slope_of(values, cell, np.log2(known))
        line = intervals.line_at(values, cell, np.log2(known), math.log2(deploy))
        if slope is None or line is None or slope.bound(1 - CONFIDENCE) <= 0:
            continue
        if line.value > math.log(allowed):
            yield Finding(
                "inconclusive",
                f"R on {kind} ({mean}) grows {math.exp(slope.value):.3g} times per doubling of the "
                f"context and would be {math.exp(line.value):.3g} at the deployment's {deploy}, "
                f"allowed {allowed:.3g}.",
                "Record deeper segments.",
            )


def against_incumbent(case: Case, rows: Sequence[IncumbentRow]) -> Iterator[Finding]:
    """Worse than production by more than producers differ: said, not decided on."""
    for row in rows:
        allowed = case.allowed.get((row.kind, row.mean))
        if allowed is not None and row.low > allowed:
            yield Finding(
                "warning",
                f"On {row.kind} ({row.mean}) the candidate's KL is {row.ratio:.3g} "
                f"[{row.low:.3g}, {row.high:.3g}] times the incumbent's: worse than production by "
                "more than normal producers differ.",
            )

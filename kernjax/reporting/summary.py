"""A verdict in short: what changed, how sure, where, what next. For who reads nothing else."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from kernjax.judge.case import SEVERITIES, Finding
from kernjax.judge.changes import BUILT_IN
from kernjax.judge.gates import Gate, Outcome
from kernjax.judge.verdict import Verdict
from kernjax.reporting.layout import interval, number, ratio

HEADLINES = {
    Outcome.FAIL: "Do not merge: further from the truth than equally right implementations are.",
    Outcome.INCONCLUSIVE: "Not decided: this run neither shows a fault nor rules one out.",
    Outcome.PASS: "No worse than one more equally right implementation.",
}

GATES = {
    "nonfinite": "positions with a NaN or an infinity",
    "level": "KL over the normal producers', by kind of text and mean; all depths, then each",
    "growth_context": "what a doubling of the context multiplies the ratio to normal by",
    "growth_decode": "the ratio to normal in the late half of the decode steps over that in the "
    "early half",
    "flips": "changed first choices over those of the normal producers",
    "tail_mass": "probability that moves to or from words outside the reference's 20 likeliest",
    "edges": "the ratio to normal just after edges: documents, chunks, windows, the first decoded "
    "tokens",
    "decode_vs_prefill": "decode against one prefill call over the same tokens, over what two "
    "right producers differ by; rescored: the ratio to normal of that call itself",
    "prefill_last": "the ratio to normal at the prompt's last position, from which decoding starts",
    "confident_flips": "changed first choices where no normal producer changes one; in every "
    "phase, so that a token which flips decoded and rescored is two",
}
"""What each gate looks at, for the table of gates."""

_RESCORED = "the ratio to normal where one prefill call scores the decoded tokens again"

_SHOWN = 4
_GROWTH = (
    ("growth_context", "with the context", "per doubling"),
    ("growth_decode", "over the decode steps", "late over early"),
)
_ELSEWHERE = {
    "nonfinite": "values that are not finite",
    "flips": "more first choices change than normally do",
    "tail_mass": "probability moves outside the 20 likeliest words",
    "edges": "just after edges",
    "prefill_last": "at the prompt's last position",
    "confident_flips": "first choices change that no rounding changes",
}


def reason(verdict: Verdict) -> str:
    """The verdict's reason where it stands by itself, and not behind the verdict and a colon."""
    return verdict.reason[:1].upper() + verdict.reason[1:]


def scored(verdict: Verdict) -> str:
    """What the deciding positions are: `decoded`, as a rule."""
    phase = verdict.deciding_phase
    return {"decode": "decoded", "prefill": "prefilled", "rescore": "rescored"}.get(phase, phase)


def in_short(verdict: Verdict, locate: Mapping[str, Any] | None = None) -> list[tuple[str, str]]:
    """(question, answer) of what changed, how sure, where and what next; plain text, not escaped.

    `locate`: the value of `kernjax.locate` on the same candidate, which knows the layer.
    """
    rows = [
        ("What changed", changed(verdict)),
        ("How sure", _sure(verdict)),
        ("Where", " ".join(_where(verdict, locate))),
        ("What next", _next(verdict, located=locate is not None)),
    ]
    return [(question, answer) for question, answer in rows if answer]


def changed(verdict: Verdict) -> str:
    """What the candidate changes of what runs now, in a sentence or two."""
    base = verdict.changed_from
    if not base:
        return "What runs now was not recorded; below is what differs from the ground truth."
    what = "the incumbent" if "incumbent" in verdict.parties else "production"
    if not verdict.changes:
        return (
            f"Nothing that is recorded: policy, kernels and versions are those of {what} ({base})."
        )
    parts = [
        f"{field}: {theirs} instead of {'the built-in op' if ours == BUILT_IN else ours}"
        for field, ours, theirs in verdict.changes[:_SHOWN]
    ]
    more = len(verdict.changes) - len(parts)
    if more:
        parts.append(f"and {more} more fields")
    return f"{'; '.join(parts)}. All else is as in {what} ({base})."


def _levels(verdict: Verdict) -> list[Gate]:
    """The rows over all depths of a kind: how far from the truth, over normal."""
    return [
        gate
        for gate in verdict.gates
        if gate.name == "level" and gate.context_len is None and gate.high is not None
    ]


def _sure(verdict: Verdict) -> str:
    levels = _levels(verdict)
    bounds = f"{_at_most(levels)}, up to context {verdict.up_to_context}" if levels else ""
    if verdict.outcome is Outcome.PASS and verdict.identical:
        return (
            f"Certain that nothing changed: both recordings are equal to the last bit, at all "
            f"{verdict.positions} positions. They do not show whether the changed code is what ran."
        )
    if verdict.outcome is Outcome.PASS:
        return f"With 95 % confidence it is {bounds}."
    decisive = [gate for gate in verdict.gates if gate.outcome is verdict.outcome]
    if not decisive:
        return _undecided(verdict, bounds)
    # What is not finite needs no statistics; then the level, which says how far in all; then rules.
    order = {"nonfinite": 0, "level": 1}
    return _row_sure(
        verdict, min(decisive, key=lambda gate: (order.get(gate.name, 2), gate.p_value or 0.0))
    )


def _at_most(levels: Iterable[Gate]) -> str:
    """The largest upper bounds of the level, by kind."""
    highs: dict[str, float] = {}
    for gate in levels:
        highs[str(gate.kind)] = max(highs.get(str(gate.kind), 0.0), float(gate.high or 0.0))
    shown = " and ".join(f"{ratio(high)} times ({kind})" for kind, high in highs.items())
    return f"at most {shown} as far from the ground truth (KL) as an equally right implementation"


def _undecided(verdict: Verdict, bounds: str) -> str:
    """How sure, where no row of a gate has the verdict's own outcome: it came otherwise."""
    if verdict.outcome is Outcome.FAIL:
        return "It was counted, not estimated: there is no doubt of it."
    untested = [gate for gate in verdict.gates if gate.outcome is Outcome.NOT_TESTED]
    if untested:
        return (
            f"{len(untested)} of {len(verdict.gates)} gate rows could not be tested on these "
            "segments, so that nothing is known of them."
        )
    return (
        f"The numbers alone would pass: with 95 % confidence it is {bounds}. What stands above "
        "withholds the PASS."
    )


def _row_sure(verdict: Verdict, gate: Gate) -> str:
    """What the row that speaks loudest says, in numbers."""
    if gate.name == "nonfinite":
        return (
            f"Certain: values are NaN or infinite at {number(gate.observed)} recorded positions, "
            "and one would be enough."
        )
    if gate.name == "confident_flips":
        return _flips_sure(verdict, gate)
    if gate.name != "level":
        is_rescored = gate.name == "decode_vs_prefill" and gate.kind is not None
        text = _RESCORED if is_rescored else re.split("[:;]", GATES.get(gate.name, gate.name))[0]
        bounds = interval(gate.observed, gate.low, gate.high, _shown(gate))
        sign = "±" if gate.quantity == "mass" else ""
        chance = ""
        if verdict.outcome is Outcome.FAIL and gate.p_value is not None:
            share = number(100 * gate.p_value, 2)
            chance = f" Were no more than that true, at most {share} % of runs would come out so."
        return (
            f"{text[0].upper()}{text[1:]} ({gate.stratum}): {bounds} with 95 % bounds; "
            f"{sign}{number(gate.allowed, 4)} is allowed.{chance}"
        )
    known = f"at least {ratio(gate.low)} times"
    if verdict.outcome is not Outcome.FAIL:
        known = f"{ratio(gate.low)} times at least and {ratio(gate.high)} at most"
    return (
        f"On {gate.kind} it is {ratio(gate.observed)} times as far from the ground truth (KL, "
        f"{gate.mean} mean) as an equally right implementation, with 95 % confidence {known}; "
        f"{number(gate.allowed, 4)} times is allowed."
    )


def _flips_sure(verdict: Verdict, gate: Gate) -> str:
    """Of flips that no normal producer has: whether it is chance, and how far off the rest is."""
    producers = len(verdict.parties.get("band", {}).get("producers", ()))
    times = "once" if gate.observed == 1 else f"{number(gate.observed)} times"
    chance = "may be chance" if verdict.outcome is not Outcome.FAIL else "is no rounding's"
    whole = " and ".join(
        f"{interval(level.observed, level.low, level.high)} times normal on {level.kind}"
        for level in _levels(verdict)
        if level.mean == "geometric"
    )
    return (
        f"None of the band's {producers} normal producers changes a first choice where the "
        f"reference is this clear ({gate.stratum}); the candidate does, {times}, which {chance}."
        + (f" Its distance as a whole (KL) is {whole}." if whole else "")
    )


def _shown(gate: Gate) -> Callable[[float | None], str]:
    return number if gate.quantity == "mass" else ratio


def _where(verdict: Verdict, locate: Mapping[str, Any] | None) -> Iterator[str]:
    if verdict.outcome is not Outcome.PASS:
        places = [*_kinds(verdict), *_elsewhere(verdict)]
        if places:
            text = "; ".join(places)
            yield text[0].upper() + text[1:] + "."
    yield from _growth(verdict)
    if locate:
        yield f"By layer: {str(locate['sentence']).rstrip('.')}."


def _kinds(verdict: Verdict) -> Iterator[str]:
    """On which kinds of text the level has the verdict's own outcome."""
    levels = _levels(verdict)
    every = list(dict.fromkeys(gate.kind for gate in levels))
    bad = [
        kind
        for kind in every
        if any(gate.kind == kind and gate.outcome is verdict.outcome for gate in levels)
    ]
    if bad:
        text = " and ".join(map(str, bad))
        yield f"on {text}" if len(bad) < len(every) else f"on every kind of text ({text})"


def _elsewhere(verdict: Verdict) -> Iterator[str]:
    rows = [gate for gate in verdict.gates if gate.outcome is verdict.outcome]
    for name, text in _ELSEWHERE.items():
        strata = [gate.stratum for gate in rows if gate.name == name]
        if strata:
            yield f"{text} ({', '.join(strata)})" if name == "edges" else text
    own = {gate.kind is not None for gate in rows if gate.name == "decode_vs_prefill"}
    if False in own:
        yield "decode differs from one prefill call over the same tokens"
    if True in own:
        yield "in prefill of the same tokens too"


def _growth(verdict: Verdict) -> Iterator[str]:
    """Whether the ratio grows with the context and over the decode steps, the worst kind's."""
    parts: dict[str, list[str]] = {}
    for name, over, unit in _GROWTH:
        rows = [gate for gate in verdict.gates if gate.name == name and gate.high is not None]
        if not rows:
            continue
        worst = max(rows, key=lambda gate: gate.observed or 0.0)
        bounds = interval(worst.observed, worst.low, worst.high)
        outcomes = {gate.outcome for gate in rows}
        grows = "It grows" if Outcome.FAIL in outcomes else "It grows no more than normal"
        if outcomes - {Outcome.FAIL, Outcome.PASS} and Outcome.FAIL not in outcomes:
            grows = "Not decided is whether it grows"
        parts.setdefault(grows, []).append(f"{over} ({bounds} {unit})")
    for grows, places in parts.items():
        yield f"{grows} {(' nor ' if 'no more' in grows else ' and ').join(places)}."


def first_step(verdict: Verdict, located: bool = False) -> Finding | None:
    """The first finding that says what to do; of a PASS only one that warns.

    `located`: what `kernjax.locate` finds of a FAIL is known already, so that the next command is
    another finding's.
    """
    wanted = ("warning",) if verdict.outcome is Outcome.PASS else SEVERITIES
    found = (f for f in verdict.findings if f.severity in wanted and (f.todo or f.command))
    if located and verdict.outcome is Outcome.FAIL:
        found = (f for f in found if f.command and "kernjax.locate" not in f.command)
    return next(found, None)


def _next(verdict: Verdict, located: bool) -> str:
    first = first_step(verdict, located)
    todo = first.todo if first else ""
    if verdict.outcome is Outcome.PASS:
        merge = f"Merge, if contexts up to {verdict.up_to_context} are what you serve."
        return f"{todo} Then: {merge[0].lower()}{merge[1:]}" if todo else merge
    if located and verdict.outcome is Outcome.FAIL:
        other = f" {first.text} {todo}".rstrip() if first else ""
        return f"Fix it there, and check again.{other}"
    return todo or "Read the findings."

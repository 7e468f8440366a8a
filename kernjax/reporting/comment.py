"""The verdict as Markdown, for a comment on a change request and for a job's summary.

Short enough for both (a comment holds 65,536 characters), the verdict and what to do first, long
tables folded. Names come from files that others wrote: nothing in them formats, links or mentions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from kernjax.judge.gates import Gate, Outcome
from kernjax.judge.verdict import Verdict
from kernjax.reporting.layout import interval, number, ratio, safe, shorten
from kernjax.reporting.markdown import nats, table
from kernjax.reporting.summary import HEADLINES, in_short, reason, scored

_ROWS = 40
_FINDINGS = 8
_TEXT = 800
_COMMAND = 1000
_PUNCTUATION = re.compile(r"([\\`*_\[\]~$])")
_CALLS_SOMEBODY = re.compile(r"([@#])(?=\w)")


def render_markdown(verdict: Verdict) -> str:
    """The whole comment; ends in a newline."""
    parts = [
        f"## kernjax: {verdict.outcome}",
        f"**{HEADLINES[verdict.outcome]}** {prose(reason(verdict))}",
        "\n".join(f"- **{question}**: {prose(answer)}" for question, answer in in_short(verdict)),
        *_findings(verdict),
        _strata(verdict),
        _open_gates(verdict),
        folded(f"All gates ({len(verdict.gates)})", _gates(verdict.gates)),
        folded(f"Flips by the reference's margin, {scored(verdict)} positions", _margins(verdict)),
        folded("What was compared, and what differs", _compared(verdict)),
        _scope(verdict),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def prose(text: object, length: int = _TEXT) -> str:
    """Text that shows as it is: no markup, no tags, no mention of a person or an issue."""
    shown = shorten(safe(text), length)
    for char, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
        shown = shown.replace(char, entity)
    shown = _PUNCTUATION.sub(r"\\\1", shown)
    # Mentions and issue numbers are looked for after Markdown is done: a comment breaks the word.
    return _CALLS_SOMEBODY.sub(r"\1<!-- -->", shown)


def code(text: object, length: int = 200) -> str:
    """A code span, whatever backticks the text holds."""
    shown = shorten(safe(text), length)
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", shown)), default=0))
    space = " " if shown.startswith("`") or shown.endswith("`") else ""
    return f"{fence}{space}{shown}{space}{fence}" if shown else ""


def fenced(text: str) -> str:
    """A code block of one line."""
    shown = safe(text)
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", shown)), default=0))
    return f"{fence}\n{shown}\n{fence}"


def folded(summary: str, body: str) -> str:
    """A part that opens on a click."""
    return f"<details><summary>{summary}</summary>\n\n{body}\n\n</details>" if body else ""


def _findings(verdict: Verdict) -> Iterator[str]:
    for finding in verdict.findings[:_FINDINGS]:
        yield f"**{finding.severity}**: {prose(f'{finding.text} {finding.todo}'.rstrip())}"
        if len(finding.command) > _COMMAND:
            yield f"The next command is too long for here ({len(finding.command)} characters)."
        elif finding.command:
            yield fenced(finding.command)
    if len(verdict.findings) > _FINDINGS:
        yield f"and {len(verdict.findings) - _FINDINGS} more findings in the report."


def _cut(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    text = table(header, rows[:_ROWS], left)
    return text + (f"\n\nand {len(rows) - _ROWS} more rows" if len(rows) > _ROWS else "")


def _strata(verdict: Verdict) -> str:
    rows = [
        [
            prose(stratum.kind, 40),
            str(stratum.context_len),
            str(stratum.positions),
            nats(stratum.kl_median),
            nats(stratum.kl_mean),
            nats(stratum.kl_p99),
            interval(stratum.ratio, stratum.ratio_low, stratum.ratio_high),
            f"{stratum.flips} ({number(stratum.normal_flips)})",
        ]
        for stratum in verdict.strata
        if stratum.phase == verdict.deciding_phase
    ]
    header = ["kind", "context", "positions", "KL median", "mean", "p99"]
    header += ["times normal [95 % bounds]", "flips (normal)"]
    return _cut(header, rows)


def _open_gates(verdict: Verdict) -> str:
    rows = [gate for gate in verdict.gates if gate.outcome is not Outcome.PASS]
    return f"Gates that do not pass:\n\n{_gates(rows)}" if rows else ""


def _gates(gates: Sequence[Gate]) -> str:
    rows = []
    for gate in gates:
        show = number if gate.quantity in ("count", "mass") else ratio
        rows.append(
            [
                code(gate.name, 40),
                prose(gate.stratum, 60),
                interval(gate.observed, gate.low, gate.high, show),
                number(gate.allowed, 4),
                "-" if gate.p_value is None else f"{gate.p_value:.2g}",
                str(gate.outcome),
            ]
        )
    return _cut(["gate", "stratum", "observed", "allowed", "p", "outcome"], rows, left=2)


def _margins(verdict: Verdict) -> str:
    rows = [
        [
            "tie" if entry.margin == "0" else prose(entry.margin, 40),
            str(entry.positions),
            str(entry.flips),
            number(entry.normal_flips),
        ]
        for entry in verdict.margin_bins
    ]
    return _cut(["margin", "positions", "flips", "normal flips"], rows)


def _compared(verdict: Verdict) -> str:
    lines = []
    for name in ("candidate", "reference", "isolated", "incumbent", "repeat"):
        party = verdict.parties.get(name)
        if party:
            lines.append(f"- {name}: {code(party.get('label'))} ({code(party.get('path'))})")
    band = verdict.parties.get("band", {})
    producers = band.get("producers", ())
    lines.append(f"- band: {code(band.get('path'))}, {len(producers)} normal producers")
    rows = [[code(name, 60), code(a, 60), code(b, 60)] for name, a, b in verdict.differences]
    if rows:
        lines += ["", _cut(["field", "reference", "candidate"], rows, left=3)]
    return "\n".join(lines)


def _scope(verdict: Verdict) -> str:
    floors = ", ".join(
        f"{number(value)} ({prose(kind, 40)})" for kind, value in verdict.detection_floor.items()
    )
    text = (
        f"{verdict.positions} {scored(verdict)} positions in {verdict.segments} segments, "
        f"every kind up to context {verdict.up_to_context}."
    )
    return text + (f" Fails a uniform ratio of {floors} with 95 % power." if floors else "")

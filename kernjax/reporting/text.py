"""The report as plain text: the verdict first, then what it rests on. At most 100 columns."""

from __future__ import annotations

from collections.abc import Iterator

from kernjax.base.showing import for_logs
from kernjax.judge.gates import Gate, Outcome
from kernjax.judge.verdict import Verdict
from kernjax.reporting.layout import interval, number, paragraph, ratio, safe, shorten, table
from kernjax.reporting.summary import changed, scored

_MAX_DIFFERENCES = 20
_PRODUCERS_SHOWN = 8


def render_text(verdict: Verdict) -> str:
    """The whole report, without the JSON line; ends in a newline."""
    sections = [
        _headline(verdict),
        _compared(verdict),
        _differences(verdict),
        _findings(verdict),
        _strata(verdict),
        _gates(verdict),
        _margins(verdict),
        _isolated(verdict),
        _incumbent(verdict),
        _footnotes(verdict),
    ]
    return for_logs("\n\n".join(section for section in sections if section) + "\n")


def _headline(verdict: Verdict) -> str:
    word = f"{verdict.outcome}: "
    return paragraph(safe(verdict.reason), indent="  ", first=word)


def _compared(verdict: Verdict) -> str:
    lines = ["What was compared"]
    for key in ("candidate", "reference", "isolated", "incumbent", "repeat"):
        party = verdict.parties.get(key)
        if party:
            path, label = safe(party["path"]), safe(party["label"])
            where = "" if path == label else f" ({path})"
            lines.append(paragraph(f"{label}{where}", " " * 13, f"  {key:<11}"))
        if key == "candidate":
            lines.append(paragraph(safe(changed(verdict)), " " * 13, f"  {'changed':<11}"))
    band = verdict.parties.get("band", {})
    producers = [safe(name) for name in band.get("producers", ())]
    shown = ", ".join(producers[:_PRODUCERS_SHOWN])
    if len(producers) > _PRODUCERS_SHOWN:
        shown += f" and {len(producers) - _PRODUCERS_SHOWN} more"
    text = f"{safe(band.get('path'))}: {len(producers)} normal producers ({shown})"
    lines.append(paragraph(text, " " * 13, f"  {'band':<11}"))
    reference = verdict.parties.get("reference", {})
    source = " on ".join(safe(reference[k]) for k in ("model", "corpus") if reference.get(k))
    lines.append(
        paragraph(
            f"{source + ': ' if source else ''}{verdict.positions} {scored(verdict)} "
            f"positions in {verdict.segments} segments, every kind up to context "
            f"{verdict.up_to_context}",
            " " * 13,
            f"  {'positions':<11}",
        )
    )
    return "\n".join(lines)


def _differences(verdict: Verdict) -> str:
    """Only what differs between the two manifests; identical fields are not worth reading."""
    if not verdict.differences:
        return "What differs: nothing that the manifests record"
    rows = [
        [safe(name), shorten(safe(ours), 34), shorten(safe(theirs), 34)]
        for name, ours, theirs in verdict.differences[:_MAX_DIFFERENCES]
    ]
    more = len(verdict.differences) - len(rows)
    text = "What differs\n" + table(["field", "reference", "candidate"], rows, left=3, names=3)
    return text + (f"\n  and {more} more fields" if more > 0 else "")


def _findings(verdict: Verdict) -> str:
    if not verdict.findings:
        return ""
    lines = ["Findings"]
    for finding in verdict.findings:
        lines.append(paragraph(safe(finding.text), "    ", f"  {finding.severity}: "))
        if finding.todo:
            lines.append(paragraph(safe(finding.todo), "    "))
        if finding.command:
            # On one line, whatever its length: it is there to be copied.
            lines.append(f"    $ {safe(finding.command)}")
    return "\n".join(lines)


def _strata(verdict: Verdict) -> str:
    header = ["kind", "context", "phase", "rows", "median", "mean", "p99", "max", "R", "flips"]
    rows = [
        [
            stratum.kind,
            str(stratum.context_len),
            stratum.phase,
            str(stratum.positions),
            _nats(stratum.kl_median),
            _nats(stratum.kl_mean),
            _nats(stratum.kl_p99),
            _nats(stratum.kl_max),
            interval(stratum.ratio, stratum.ratio_low, stratum.ratio_high),
            str(stratum.flips)
            + ("" if stratum.normal_flips is None else f" ({number(stratum.normal_flips)})"),
        ]
        for stratum in verdict.strata
    ]
    caption = (
        "By kind and depth (KL in nats; R: geometric ratio to normal, 95 % bounds; normal flips in "
        "brackets)"
    )
    return paragraph(caption, "  ", "") + "\n" + table(header, rows, left=1)


def _nats(value: float | None) -> str:
    return "-" if value is None else "0" if value == 0 else f"{value:.1e}"


def _gates(verdict: Verdict) -> str:
    rows = [
        [
            gate.name,
            gate.stratum + (", ppm" if gate.quantity == "mass" else ""),
            *_gate_numbers(gate),
            "-" if gate.p_value is None else f"{gate.p_value:.2g}",
            str(gate.outcome),
        ]
        for gate in verdict.gates
    ]
    header = ["gate", "stratum", "observed", "allowed", "p", "outcome"]
    return (
        "Gates (ratios to normal; p: that the truth is within what is allowed, Holm-corrected)\n"
        + table(header, rows, left=2, names=2)
    )


def _gate_numbers(gate: Gate) -> list[str]:
    if gate.quantity == "count":
        return [number(gate.observed), number(gate.allowed)]
    show = ratio if gate.quantity != "mass" else _mass
    return [interval(gate.observed, gate.low, gate.high, show), _limit(gate)]


def _mass(value: float | None) -> str:
    return "-" if value is None else f"{1e6 * value:.3g}"


def _limit(gate: Gate) -> str:
    if gate.quantity == "mass":
        return "±" + _mass(gate.allowed)
    # One digit more than what is compared with it, or 1.014 against 1.01 reads as a contradiction.
    return "-" if gate.allowed is None else f"{gate.allowed:.3f}"


def _margins(verdict: Verdict) -> str:
    rows = [
        [
            "tie" if entry.margin == "0" else entry.margin,
            str(entry.positions),
            str(entry.flips),
            number(entry.normal_flips),
            "-" if entry.two_word_odds is None else f"{100 * entry.two_word_odds:.1f} %",
        ]
        for entry in verdict.margin_bins
    ]
    header = ["margin", "positions", "flips", "normal flips", "at most odds of"]
    return (
        f"Flips by the reference's margin ({scored(verdict)} positions; odds: of the better of two "
        "words)\n" + table(header, rows)
    )


def _isolated(verdict: Verdict) -> str:
    if not verdict.isolated:
        return ""
    rows = [
        [row.kind, row.mean, str(row.context_len), interval(row.ratio, row.low, row.high, _fine)]
        for row in verdict.isolated
    ]
    text = (
        "In isolation: f32 with the change alone (R_iso = 1 + KL_isolated / KL_normal)\n"
        + table(["kind", "mean", "context", "R_iso"], rows, left=2)
    )
    return "\n".join([text, *_laws(verdict)])


def _fine(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}" if value < 100 else f"{value:.3g}"


def _laws(verdict: Verdict) -> Iterator[str]:
    for law in verdict.isolated_laws:
        name = f"{safe(law.kind)}, {safe(law.mean)}"
        if law.exponent is None:
            yield paragraph(
                f"{name}: {law.depths} depths, too few for a law; the worst bound is "
                f"{_fine(law.predicted_high)}, allowed {_fine(law.allowed)}."
            )
            continue
        grows = interval(law.exponent, law.exponent_low, law.exponent_high, ratio)
        leaves = f", reaches it near context {law.leaves_at:.3g}" if law.leaves_at else ""
        yield paragraph(
            f"{name}: KL_isolated/KL_normal ~ context^{grows}; at most {_fine(law.predicted_high)} "
            f"at {law.at_context}, allowed {_fine(law.allowed)}{leaves}."
        )


def _incumbent(verdict: Verdict) -> str:
    if not verdict.incumbent:
        return ""
    rows = [
        [
            row.kind,
            row.mean,
            ratio(row.candidate),
            ratio(row.incumbent),
            interval(row.ratio, row.low, row.high),
        ]
        for row in verdict.incumbent
    ]
    header = ["kind", "mean", "candidate R", "incumbent R", "candidate/incumbent"]
    return "Against the incumbent (paired)\n" + table(header, rows, left=2)


def _footnotes(verdict: Verdict) -> str:
    lines = []
    if verdict.outcome is Outcome.INCONCLUSIVE and verdict.segments_to_decide:
        lines.append("Further segments that would decide")
        lines += [
            f"  {safe(shorten(name, 70))}: {count}"
            for name, count in verdict.segments_to_decide.items()
        ]
    if verdict.detection_floor:
        floors = ", ".join(
            f"{number(value)} ({safe(kind)})" for kind, value in verdict.detection_floor.items()
        )
        lines.append(
            paragraph(
                f"Smallest uniform ratio that this corpus fails with 95 % power: {floors}.", ""
            )
        )
    if len(verdict.perplexity) == 2:
        shown = ", ".join(
            f"{safe(name)} {number(value, 6)} ± {number(error, 2)}"
            for name, (value, error) in verdict.perplexity.items()
        )
        lines.append(paragraph(f"Perplexity (decides nothing): {shown}.", ""))
    if verdict.accuracy_bound:
        shown = ", ".join(
            f"{number(bound)} over {number(steps)} steps ({safe(kind)})"
            for kind, (steps, bound) in verdict.accuracy_bound.items()
        )
        lines.append(
            paragraph(
                "Accuracy bound (decides nothing; loose, and only for sampled decoding on the "
                f"reference's own samples): it changes by at most {shown}.",
                "",
            )
        )
    return "\n".join(lines)

"""The report as one HTML file: no script, no network, light and dark, readable on a phone.

Everything that comes from a file passes `safe` (control and direction-changing characters become
escapes) and is cut to a sane length before the template escapes it; a content security policy in
the page itself forbids scripts and requests, should anything ever slip through.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kernjax.base.errors import UserError
from kernjax.judge.gates import Gate, Outcome
from kernjax.judge.verdict import Verdict
from kernjax.reporting import charts
from kernjax.reporting.layout import interval, number, ratio, safe, shorten
from kernjax.reporting.markdown import nats
from kernjax.reporting.summary import GATES, HEADLINES, first_step, in_short, reason, scored

_TEMPLATE = "page.html"
_TEXT = 3000
_NAME = 120
_ROWS = 400
_LOCATE = "kernjax.locate"
_LOCATE_FLAGS = (
    "--policy --kernel --model --corpus --reference --band --production_policy --mesh --mirror"
).split()
_HEAT = 6  # shades of the token strip, each a factor of ten in KL
_HEAT_FROM = 1e-6


@dataclass(frozen=True)
class Extras:
    """What a run knows beside its verdict; all of it may be missing."""

    figures: Mapping[str, Any] | None = None
    line: Mapping[str, Any] = field(default_factory=dict)  # command, runs, notes, twin, wall_s
    locate: Mapping[str, Any] | None = None
    sweep: Mapping[str, Any] | None = None


def has_jinja() -> bool:
    """Whether pages can be made here."""
    try:
        import jinja2  # noqa: F401
    except ImportError:
        return False
    return True


def render_page(verdict: Verdict, extras: Extras = Extras()) -> str:  # noqa: B008
    """The page; UserError naming the extra where jinja2 is missing."""
    if not has_jinja():
        raise UserError(
            "jinja2 is not installed, so there is no HTML page.",
            todo="pip install 'kernjax[report]'",
        )
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("kernjax.reporting", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["show"] = show
    environment.filters["flags"] = flags
    environment.filters["drawn"] = Markup  # SVG of our own making, its texts escaped there
    return environment.get_template(_TEMPLATE).render(**_values(verdict, extras))


def show(text: object, length: int = _TEXT) -> str:
    """Printable and of a sane length; the template escapes what HTML would read."""
    return shorten(safe(text), length)


def flags(command: str) -> list[str]:
    """A command in pieces, one a flag, where its lines break best; together they are the whole."""
    return re.split(r"(?<= )(?='?--)", command)


def _values(verdict: Verdict, extras: Extras) -> dict[str, Any]:
    figures = extras.figures
    drawn = [*charts.depth_charts(verdict, figures)]
    if figures:
        drawn += charts.row_charts(verdict, figures)
    else:
        drawn += [drawing for drawing in (charts.flips(verdict),) if drawing]
    causes = []
    if extras.locate:
        causes.append((charts.layer_map(extras.locate), extras.locate["sentence"]))
    if extras.sweep:
        causes.append((charts.knee(extras.sweep), extras.sweep["sentence"]))
    command = str(extras.line.get("command") or "")
    first = first_step(verdict, located=extras.locate is not None)
    step = first.command if first else ""
    return {
        "verdict": verdict,
        "outcome": str(verdict.outcome),
        "headline": HEADLINES[verdict.outcome],
        "reason": reason(verdict),
        "short": in_short(verdict, extras.locate),
        "step": step,
        "locate": "" if extras.locate or _LOCATE in step else _locate_command(verdict, command),
        "gate_names": [
            (name, text)
            for name, text in GATES.items()
            if any(g.name == name for g in verdict.gates)
        ],
        "sure": _sure(verdict),
        "deciding": scored(verdict),
        "normal_flips": _normal_flips(verdict),
        "labels": [
            show(verdict.parties.get(name, {}).get("label", "-"), 200)
            for name in ("candidate", "reference")
        ],
        "parties": _parties(verdict),
        "scope": _scope(verdict),
        "differences": verdict.differences[:_ROWS],
        "strata": _strata(verdict)[:_ROWS],
        "drawings": drawn,
        "causes": causes,
        "open_gates": _gates([g for g in verdict.gates if g.outcome is not Outcome.PASS]),
        "gates": _gates(verdict.gates),
        "margins": _margins(verdict),
        "isolated": _isolated(verdict),
        "incumbent": [
            [show(r.kind, 40), show(r.mean, 40), ratio(r.candidate), ratio(r.incumbent)]
            + [interval(r.ratio, r.low, r.high)]
            for r in verdict.incumbent
        ],
        "twin": [
            [show(r["kind"], 40), str(r["context_len"]), nats(r["kl_median"]), nats(r["kl_mean"])]
            for r in extras.line.get("twin") or ()
        ],
        "worst": [_position(row) for row in (figures or {}).get("worst", ())],
        "cost": _cost(extras.line),
        "notes": [str(note) for note in extras.line.get("notes") or ()],
        "limits": _limits(verdict, figures is None),
        "command": command,
        "flagfile": "\n".join(show(word) for word in _words(command)),
    }


def _words(command: str) -> list[str]:
    """The flags of a command line, one a line, as --flagfile reads them."""
    try:
        return [word for word in shlex.split(command) if word.startswith("--")]
    except ValueError:
        return []


def _locate_command(verdict: Verdict, command: str) -> str:
    """`kernjax.locate` of the same candidate, where something is wrong and it can be run again."""
    if verdict.outcome is Outcome.PASS:
        return ""
    for known in (command, *(finding.command for finding in verdict.findings)):
        words = [word for word in _words(known) if word.partition("=")[0] in _LOCATE_FLAGS]
        if any(word.startswith(("--policy=", "--kernel=")) for word in words):
            return shlex.join(["python", "-m", _LOCATE, *words])
    return ""


def _sure(verdict: Verdict) -> list[dict[str, str]]:
    """How much worse, and how sure that is, in a line a kind: the widest gate rows."""
    rows = []
    for gate in verdict.gates:
        if gate.name == "level" and gate.context_len is None:
            rows.append(
                {
                    "name": f"{show(gate.kind, 40)}, {show(gate.mean, 20)} mean",
                    "value": ratio(gate.observed),
                    "bounds": f"95 % bounds {ratio(gate.low)} to {ratio(gate.high)}",
                    "allowed": number(gate.allowed, 4),
                    "outcome": str(gate.outcome),
                }
            )
    return rows


def _normal_flips(verdict: Verdict) -> str | None:
    """The normal producers' first choices that changed, on the same positions."""
    known = [bin.normal_flips for bin in verdict.margin_bins]
    return None if not known or None in known else number(sum(known))


def _parties(verdict: Verdict) -> list[tuple[str, str, str]]:
    rows = []
    for name in ("candidate", "reference", "isolated", "incumbent", "repeat"):
        if party := verdict.parties.get(name):
            rows.append((name, show(party.get("label"), 400), show(party.get("path"), 400)))
    band = verdict.parties.get("band", {})
    producers = [show(name, 60) for name in band.get("producers", ())]
    shown = ", ".join(producers[:12]) + (" and more" if len(producers) > 12 else "")
    text = f"{len(producers)} normal producers: {shown}"
    return [*rows, ("band", text, show(band.get("path"), 400))]


def _scope(verdict: Verdict) -> str:
    reference = verdict.parties.get("reference", {})
    names = [
        f"{key} {show(reference[key], 80)}" for key in ("model", "corpus") if reference.get(key)
    ]
    return (
        f"{', '.join(names) + ': ' if names else ''}{verdict.positions} "
        f"{scored(verdict)} positions in {verdict.segments} segments, every kind up to "
        f"context {verdict.up_to_context}"
    )


def _strata(verdict: Verdict) -> list[list[str]]:
    return [
        [
            show(s.kind, 40),
            str(s.context_len),
            s.phase,
            str(s.positions),
            interval(s.ratio, s.ratio_low, s.ratio_high),
            str(s.flips),
            number(s.normal_flips),
            nats(s.kl_median),
            nats(s.kl_mean),
            nats(s.kl_p99),
            nats(s.kl_max),
        ]
        for s in verdict.strata
    ]


def _gates(gates: Sequence[Gate]) -> list[list[str]]:
    rows = []
    for gate in gates[:_ROWS]:
        show_value = number if gate.quantity in ("count", "mass") else ratio
        rows.append(
            [
                show(gate.name, 40),
                show(gate.stratum, _NAME),
                interval(gate.observed, gate.low, gate.high, show_value),
                ("±" if gate.quantity == "mass" else "") + number(gate.allowed, 4),
                "-" if gate.p_value is None else f"{gate.p_value:.2g}",
                str(gate.segments or "-"),
                str(gate.outcome),
            ]
        )
    return rows


def _margins(verdict: Verdict) -> list[list[str]]:
    return [
        [
            "tie" if e.margin == "0" else show(e.margin, 40),
            str(e.positions),
            str(e.flips),
            number(e.normal_flips),
            "-" if e.two_word_odds is None else f"{100 * e.two_word_odds:.1f} %",
        ]
        for e in verdict.margin_bins
    ]


def _isolated(verdict: Verdict) -> list[list[str]]:
    return [
        [show(r.kind, 40), show(r.mean, 40), str(r.context_len), interval(r.ratio, r.low, r.high)]
        for r in verdict.isolated[:_ROWS]
    ]


def _position(row: Mapping[str, Any]) -> dict[str, Any]:
    """One of the worst positions, ready to show."""

    def words(entries: Sequence[Sequence[Any]]) -> list[tuple[str, str]]:
        return [
            (_token(entry), "not recorded" if entry[2] is None else f"{100 * entry[2]:.2f} %")
            for entry in entries
        ]

    return {
        "place": f"{show(row['segment'], _NAME)} at {row['pos']}",
        "about": ", ".join(
            [
                show(row["kind"], 40),
                f"context {row['context_len']}",
                show(str(row.get("phase", "")), 20),
            ]
        ).removesuffix(", "),
        "kl": "not finite" if row["kl"] is None else f"{nats(row['kl'])} nats",
        "margin": number(row["margin"]),
        "flipped": row["flipped"],
        "reference": words(row["reference"]),
        "candidate": words(row["candidate"]),
        "strip": [
            (_token(entry), _heat(entry[2]), "-" if entry[2] is None else nats(entry[2]), entry[3])
            for entry in row["strip"]
        ],
    }


def _token(entry: Sequence[Any]) -> str:
    """The token's text with its blanks visible, or its number."""
    if entry[1] is None:
        return f"#{entry[0]}"
    text = str(entry[1]).replace("\n", "⏎").replace("\t", "⇥").replace(" ", "␣")
    return show(text, 60) or f"#{entry[0]}"


def _heat(kl: float | None) -> int:
    """Shade 0 to 5 of a KL; what is not finite is the strongest."""
    if kl is None:
        return _HEAT - 1
    level = 0
    while level < _HEAT - 1 and kl >= _HEAT_FROM * 10**level:
        level += 1
    return level


def _cost(line: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = []
    for run in line.get("runs") or ():
        seconds, tokens = run["seconds"], run["tokens"]
        rate = f", {tokens / seconds:,.0f} tokens/s" if seconds else ""
        text = f"{number(tokens)} tokens in {number(seconds)} s{rate}, compilation included"
        rows.append((show(run["run"], _NAME), text))
    cost = line.get("cost") or {}
    if cost.get("compile_s") is not None:
        text = f"{number(cost['compile_s'])} s, summed over programs that compile side by side"
        rows.append(("compilation", text))
    for name, key in (("process", "peak_memory_bytes"), ("fullest device", "peak_device_bytes")):
        if cost.get(key) is not None:
            rows.append((f"peak memory, {name}", f"{cost[key] / 2**30:.2f} GiB"))
    if line.get("wall_s") is not None:
        rows.append(("the whole command", f"{number(line['wall_s'])} s"))
    return rows


def _limits(verdict: Verdict, without_rows: bool) -> list[str]:
    """What a reader might think this shows, and it does not."""
    kinds = sorted({show(s.kind, 40) for s in verdict.strata})
    tails = [s.tail_mass for s in verdict.strata if s.phase == verdict.deciding_phase]
    tails = [mass for mass in tails if mass is not None]
    lines = [
        f"Contexts beyond {verdict.up_to_context} tokens, and texts unlike these kinds: "
        f"{', '.join(kinds)}.",
        "What a model writes by itself: every token was given, so that both sides saw the same "
        "text. Scores of tasks, and speed, are not measured.",
        "Other devices, batch sizes, meshes and versions than those of the recordings.",
    ]
    if tails:
        lines.append(
            "What moves between words outside the reference's 20 likeliest, one cell here: at "
            f"most {100 * max(tails):.2g} % of the probability, on average, in a stratum."
        )
    floors = [f"{number(v)} ({show(k, 40)})" for k, v in verdict.detection_floor.items()]
    if floors:
        lines.append(
            f"A uniform change by less than a factor of {', '.join(floors)}: this corpus fails "
            "that with 95 % power, and less with less."
        )
    if not verdict.isolated:
        lines.append("The change by itself: it was not run in isolation, on float32.")
    if without_rows:
        lines.append("Single positions: the file figures.json was not beside the verdict.")
    return lines

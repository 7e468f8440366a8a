"""The self-test's results as lines for a terminal and as a Markdown table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from kernjax.faults.catalogue import NOT_ONE_OP
from kernjax.faults.measure import Size
from kernjax.faults.trials import Result


def line(result: Result) -> str:
    """One row for a terminal."""
    mark = " " if result.is_right else "!"
    told = result.caught_by or _ratios(result) or result.note
    return f"{mark} {result.status:15} {result.id:28} {told}  [{result.seconds:.0f} s]"


def markdown(results: Sequence[Result], floor: Mapping[str, float], corpus: str, typed: str) -> str:
    """The page that stands in the docs; `typed` is the command that made it."""
    counts = ", ".join(f"{n} {status}" for status, n in Counter(r.status for r in results).items())
    smallest = ", ".join(f"{value:.4g} ({kind})" for kind, value in floor.items())
    lines = [
        "# What the instrument catches",
        "",
        f"Planted faults, controls and normal producers on the corpus `{corpus}`, made by",
        "",
        "```",
        typed,
        "```",
        "",
        "A fault is red when a check would FAIL with it, or when the op alone is far from right at"
        " lengths that the corpus does not reach; below the floor when its whole effect, with its"
        " bound, is smaller than what the corpus can detect. A control (a difference that engines"
        f" may have) and a normal producer must not be red. {len(results)} rows: {counts}.",
        "",
        "R: geometric ratio of the KL to that of the normal producers on the same rows, all depths"
        " of a kind, with its 95 % upper bound where the row is not red. Local size: relative"
        " error of the op's output, and of the state it leaves, on the model's own inputs. The"
        f" floor, the smallest R that this corpus detects with 95 % power: {smallest}.",
        "",
        "| row | op | what is wrong | source | local size | R | came to | by which gate |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for result in results:
        came_to = result.status if result.is_right else f"**{result.status}**"
        gate = result.caught_by or result.note
        if others := [g for g in result.gates if not gate.startswith(g)]:
            gate += f" (also {', '.join(others)})"
        lines.append(
            f"| `{result.id}` | {', '.join(result.ops)} | {result.what} | {result.source} |"
            f" {_size(result.errors)} | {_ratios(result)} | {came_to} | {gate} |"
        )
    lines += ["", "Bugs that no replacement of one op expresses:", ""]
    lines += [f"- {bug}: {why}." for bug, why in NOT_ONE_OP]
    return "\n".join([*lines, ""])


def plain(result: Result) -> dict[str, Any]:
    """For the JSON line: what a program needs."""
    return {
        "id": result.id,
        "expected": result.expected,
        "status": result.status,
        "is_right": result.is_right,
        "verdict": result.verdict,
        "gates": result.gates,
        "caught_by": result.caught_by,
        "output_error": result.errors.output if result.errors else None,
        "state_error": result.errors.state if result.errors else None,
        "ratio": {kind: values[0] for kind, values in result.ratios.items()},
        "segments": result.segments,
        "seconds": round(result.seconds, 1),
    }


def _ratios(result: Result) -> str:
    shown = []
    for kind, (value, _, high) in result.ratios.items():
        bound = "" if result.status == "red" else f" (< {high:.3g})"
        shown.append(f"{kind} {value:.3g}{bound}")
    return ", ".join(shown)


def _size(size: Size | None) -> str:
    if size is None:
        return ""
    return f"{size.output:.1e}" + (f" / {size.state:.1e}" if size.state else "")

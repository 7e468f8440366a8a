"""Markdown building blocks: tables that also read well as plain text."""

from __future__ import annotations

from collections.abc import Sequence

from kernjax.reporting.layout import safe


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A table padded to equal widths, the first `left` columns aligned left, the others right."""
    cells = [[safe(cell).replace("|", "\\|") for cell in row] for row in (header, *rows)]
    widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        padded = (
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        return f"| {' | '.join(padded)} |"

    rule = ["-" * width if i < left else "-" * (width - 1) + ":" for i, width in enumerate(widths)]
    return "\n".join([line(cells[0]), f"| {' | '.join(rule)} |", *map(line, cells[1:])])


def nats(value: float | None) -> str:
    """A KL, or another small distance, in two digits."""
    return "-" if value is None else "0" if value == 0 else f"{value:.1e}"

"""Plain-text building blocks: safe strings, numbers, tables, wrapped paragraphs; 100 columns."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

from kernjax.base.showing import safe as safe

WIDTH = 100


def shorten(text: str, width: int) -> str:
    """At most `width` characters: the middle is left out, both ends tell names apart."""
    if len(text) <= width:
        return text
    head = (width - 1) // 2
    return text[:head] + "…" + text[len(text) - (width - 1 - head) :]


def number(value: float | None, digits: int = 3) -> str:
    """A number of `digits` significant digits, `-` for None or NaN; counts stay whole."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "-"
    if isinstance(value, int) or (float(value).is_integer() and abs(value) < 1e6):
        return str(int(value))
    return f"{value:.{digits}g}"


def ratio(value: float | None) -> str:
    """A ratio near 1 to two decimals, large ones whole, others to three digits."""
    if value is None or not math.isfinite(value):
        return "-"
    if 100 <= value < 1e5:  # shorter than 2.42e+03, and the names beside it stay whole
        return f"{value:.0f}"
    return f"{value:.2f}" if 0.1 <= value < 100 else f"{value:.3g}"


def interval(
    value: float | None, low: float | None, high: float | None, show: object = ratio
) -> str:
    """`1.02 [0.98, 1.06]`, or `-` where there is none."""
    if value is None:
        return "-"
    if low is None or high is None:
        return show(value)  # type: ignore[operator]
    return f"{show(value)} [{show(low)}, {show(high)}]"  # type: ignore[operator]


def paragraph(text: str, indent: str = "  ", first: str | None = None) -> str:
    """Wrapped text; long words (paths) break rather than overflow."""
    return textwrap.fill(
        text,
        WIDTH,
        initial_indent=indent if first is None else first,
        subsequent_indent=indent,
        break_on_hyphens=False,
    )


def table(
    header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1, names: int = 1
) -> str:
    """Columns aligned, the first `left` of them to the left.

    Where 100 columns are not enough, the widest of the first `names` columns is cut: those hold
    names, the others numbers that must stay whole.
    """
    cells = [[safe(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    while sum(widths) + 2 * len(widths) > WIDTH and max(widths[:names]) > 3:
        widths[widths.index(max(widths[:names]))] -= 1
    lines = []
    for row in cells:
        parts = [
            shorten(cell, width).ljust(width) if i < left else shorten(cell, width).rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(("  " + "  ".join(parts)).rstrip())
    return "\n".join(lines)

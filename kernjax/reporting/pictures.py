"""A drawing as an SVG file of its own: for documents, without a page around it."""

from __future__ import annotations

from html import escape
from pathlib import Path

from kernjax.reporting.charts import Drawing
from kernjax.reporting.layout import safe
from kernjax.reporting.svg import HEIGHT, WIDTH

_STYLE = Path(__file__).with_name("templates") / "chart.css"
_TITLE, _LINE = 30, 18  # heights of the title and of a line of the legend, pixels


def picture(drawing: Drawing) -> str:
    """Title, chart and legend; light or dark as the reader's system is."""
    height = _TITLE + HEIGHT + _LINE * len(drawing.legend) + 8
    chart = drawing.svg.replace(
        "<svg ", f'<svg x="0" y="{_TITLE}" width="{WIDTH}" height="{HEIGHT}" ', 1
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}">',
        f"<style>{_STYLE.read_text(encoding='utf-8')}",
        ".ground { fill: var(--ground); } svg .heading { fill: var(--text); font-weight: 600; ",
        "font-size: 14px; }</style>",
        f'<rect class="ground" width="{WIDTH}" height="{height}"/>',
        f'<text class="heading" x="12" y="20">{escape(safe(drawing.title))}</text>',
        chart,
    ]
    for row, (css, text) in enumerate(drawing.legend):
        y = _TITLE + HEIGHT + _LINE * row + 12
        parts.append(f'<path class="line {css}" d="M16 {y - 4}H40"/>')
        parts.append(f'<text x="48" y="{y}">{escape(safe(text))}</text>')
    return "".join([*parts, "</svg>\n"])

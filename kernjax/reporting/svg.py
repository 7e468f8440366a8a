"""Small charts as inline SVG: no library, no script; colours and fonts come from the page's style.

A chart has a fixed view box and scales with its column. Series are told apart by class (`s0`,
`s1`, ... for kinds; `normal`, `flip`, `limit`), which the style sheet gives a colour in light and
in dark, and by dash pattern, for readers who see no colour.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from kernjax.reporting.layout import safe

WIDTH, HEIGHT = 440, 270
_LEFT, _RIGHT, _TOP, _BOTTOM = 66, 14, 12, 44

Point = tuple[float, float]


@dataclass(frozen=True)
class Scale:
    """From values to coordinates, linear or logarithmic; values outside stop at its ends."""

    low: float
    high: float
    log: bool = False

    @classmethod
    def over(cls, values: Iterable[float | None], log: bool = False, pad: float = 0.04) -> Scale:
        """A scale that holds the finite values (positive ones, for a logarithm), with some room."""
        known = [v for v in values if v is not None and math.isfinite(v) and (v > 0 or not log)]
        low, high = (min(known), max(known)) if known else (1.0, 2.0)
        if log:
            room = max(pad * math.log(high / low), 0.05)
            return cls(low * math.exp(-room), high * math.exp(room), True)
        room = pad * (high - low) or 0.5 * abs(high) or 1.0
        return cls(low - room, high + room)

    def place(self, value: float) -> float:
        """0 at the low end, 1 at the high one."""
        value = min(max(value, self.low), self.high)
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """Round values inside the scale: three to eight of them."""
        return self._log_ticks() if self.log else self._linear_ticks()

    def _linear_ticks(self) -> list[float]:
        raw = (self.high - self.low) / 5
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw)
        first = math.ceil(self.low / step)
        return [i * step for i in range(first, math.floor(self.high / step) + 1)]

    def _log_ticks(self) -> list[float]:
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        for digits in ((1,), (1, 3), (1, 2, 5), (1, 1.2, 1.5, 2, 3, 4, 5, 7)):
            ticks = [d * 10.0**p for p in range(first, last + 1) for d in digits]
            ticks = [tick for tick in ticks if self.low <= tick <= self.high]
            if len(ticks) >= 3:
                break
        if len(ticks) < 3:  # less than a factor of two: round steps say more
            return Scale(self.low, self.high)._linear_ticks()
        return ticks[:: -(-len(ticks) // 8)]


def tick_label(value: float) -> str:
    """At most six characters."""
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e5:
        return f"{value:.4g}"
    mantissa, _, power = f"{value:.1e}".partition("e")
    return f"{mantissa.removesuffix('.0')}e{int(power)}"


class Chart:
    """Collects marks, then draws them with axes; values are in the scales' units."""

    def __init__(
        self,
        title: str,
        x: Scale,
        y: Scale,
        x_label: str,
        y_label: str,
        x_ticks: Sequence[tuple[float, str]] | None = None,
    ) -> None:
        self._title, self._x, self._y = title, x, y
        self._labels = x_label, y_label
        self._x_ticks = x_ticks or [(tick, tick_label(tick)) for tick in x.ticks()]
        self._marks: list[str] = []

    def _at(self, x: float, y: float) -> str:
        across = _LEFT + self._x.place(x) * (WIDTH - _LEFT - _RIGHT)
        down = HEIGHT - _BOTTOM - self._y.place(y) * (HEIGHT - _TOP - _BOTTOM)
        return f"{across:.1f} {down:.1f}"

    def line(self, points: Iterable[Point], css: str) -> None:
        """A polyline."""
        path = "L".join(self._at(x, y) for x, y in points)
        if path:
            self._marks.append(f'<path class="line {css}" d="M{path}"/>')

    def dots(self, points: Iterable[Point], css: str) -> None:
        """Round dots, all in one element; their size is the class's stroke width."""
        path = "".join(f"M{self._at(x, y)}h0" for x, y in points)
        if path:
            self._marks.append(f'<path class="dots {css}" d="{path}"/>')

    def bars(self, spans: Iterable[tuple[float, float, float]], css: str) -> None:
        """Vertical lines (x, low, high): intervals, or thick ones for bars."""
        path = "".join(f"M{self._at(x, low)}L{self._at(x, high)}" for x, low, high in spans)
        if path:
            self._marks.append(f'<path class="line {css}" d="{path}"/>')

    def rule(self, y: float, css: str) -> None:
        """A horizontal line across the chart."""
        self.line([(self._x.low, y), (self._x.high, y)], css)

    def svg(self) -> str:
        """The element, its title first for those who hear it."""
        right, bottom = WIDTH - _RIGHT, HEIGHT - _BOTTOM
        parts = [
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
            f"<title>{escape(safe(self._title))}</title>",
        ]
        for value, text in self._x_ticks:
            x = float(self._at(value, self._y.low).split()[0])
            parts.append(f'<path class="grid" d="M{x:.1f} {_TOP}V{bottom}"/>')
            parts.append(_text(x, bottom + 15, text, "middle"))
        for value in self._y.ticks():
            y = float(self._at(self._x.low, value).split()[1])
            parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{right}"/>')
            parts.append(_text(_LEFT - 5, y + 4, tick_label(value), "end"))
        parts += self._marks
        parts.append(f'<path class="axis" d="M{_LEFT} {_TOP}V{bottom}H{right}"/>')
        parts.append(_text((_LEFT + right) / 2, HEIGHT - 8, self._labels[0], "middle"))
        middle = (_TOP + bottom) / 2
        parts.append(
            f'<text transform="translate(11 {middle:.0f}) rotate(-90)" text-anchor="middle">'
            f"{escape(safe(self._labels[1]))}</text>"
        )
        return "".join([*parts, "</svg>"])


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(safe(text))}</text>'

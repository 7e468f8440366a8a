"""The page's charts, from a verdict and its figures (`kernjax.reporting.figures`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kernjax.judge.quantiles import normal_quantile
from kernjax.judge.verdict import Verdict
from kernjax.reporting.layout import number, shorten
from kernjax.reporting.summary import scored
from kernjax.reporting.svg import Chart, Scale

_SERIES = 6  # colours in the style sheet; further kinds start again
_TIE = 1e-3  # where a margin of 0 is drawn on a logarithmic axis


@dataclass(frozen=True)
class Drawing:
    """A chart, what its marks mean (class, text), and how to read it."""

    title: str
    svg: str
    legend: tuple[tuple[str, str], ...]
    caption: str


def series(index: int) -> str:
    """The class of the index-th kind."""
    return f"s{index % _SERIES}"


def depth_charts(verdict: Verdict, figures: Mapping[str, Any] | None) -> list[Drawing]:
    """R and KL by context depth."""
    strata = [s for s in verdict.strata if s.phase == verdict.deciding_phase]
    kinds = sorted({s.kind for s in strata})
    depths = sorted({s.context_len for s in strata})
    if not strata:
        return []
    x = Scale.over([d / 1.25 for d in depths] + [d * 1.25 for d in depths], log=True, pad=0)
    ticks = [(d, str(d)) for d in _thin(depths)]
    legend = tuple((series(i), shorten(kind, 30)) for i, kind in enumerate(kinds))
    ratios = [v for s in strata for v in (s.ratio_low, s.ratio_high)]
    drawings = []
    if any(v is not None for v in ratios):
        limits = [v for v in verdict.allowed.values() if v is not None]
        y = Scale.over([*ratios, *limits, 1.0], log=True)
        chart = Chart("Times normal by context depth", x, y, "context", "KL / normal", ticks)
        chart.rule(1.0, "normal")
        for i, kind in enumerate(kinds):
            if verdict.allowed.get(kind):
                chart.rule(verdict.allowed[kind], f"limit {series(i)}")
            own = [s for s in strata if s.kind == kind and s.ratio is not None]
            at = [s.context_len * _aside(i, len(kinds)) for s in own]
            chart.line(list(zip(at, [s.ratio for s in own], strict=True)), series(i))
            chart.dots(list(zip(at, [s.ratio for s in own], strict=True)), f"big {series(i)}")
            spans = [(a, s.ratio_low, s.ratio_high) for a, s in zip(at, own, strict=True)]
            chart.bars([b for b in spans if None not in b], series(i))
        drawings.append(
            Drawing(
                "Times the normal difference, by depth",
                chart.svg(),
                (*legend, ("normal", "normal = 1"), ("limit", "allowed over all depths")),
                "Geometric mean over segments, with 95 % bounds.",
            )
        )
    normal = (figures or {}).get("normal_strata", [])
    values = [s.kl_mean for s in strata] + [entry["mean"] for entry in normal]
    if any(v for v in values):
        y = Scale.over(values, log=True)
        chart = Chart("Mean KL by context depth", x, y, "context", "mean KL, nats", ticks)
        for i, kind in enumerate(kinds):
            own = [(s.context_len, s.kl_mean) for s in strata if s.kind == kind and s.kl_mean]
            grey = [(e["context_len"], e["mean"]) for e in normal if e["kind"] == kind]
            chart.line(grey, f"normal {series(i)}-dash")
            chart.dots(grey, "big normal")
            chart.line(own, series(i))
            chart.dots(own, f"big {series(i)}")
        drawings.append(
            Drawing(
                "KL by depth",
                chart.svg(),
                (*legend, *((("normal", "normal producers"),) if normal else ())),
                "Mean over positions, in nats.",
            )
        )
    return drawings


def row_charts(verdict: Verdict, figures: Mapping[str, Any]) -> list[Drawing]:
    """The charts that need rows: distribution, decode steps, margins."""
    title = f"Margin and KL of single {scored(verdict)} positions"
    single = scatter_chart(figures["scatter"], figures["kinds"], title)
    drawings = (_cdf(figures), _steps(figures), single, flips(verdict, figures))
    return [drawing for drawing in drawings if drawing is not None]


def kind_legend(kinds: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Classes and names of the kinds, in order."""
    return tuple((series(i), shorten(kind, 30)) for i, kind in enumerate(kinds))


def _cdf(figures: Mapping[str, Any]) -> Drawing | None:
    curves = figures["cdf"]
    values = [v for c in curves for v, _ in (*c["candidate"], *c["normal"]) if v > 1e-10]
    if not values:
        return None
    x = Scale.over(values, log=True, pad=0.01)
    chart = Chart("Distribution of KL by kind", x, Scale(0.0, 1.0), "KL, nats", "positions below")
    for i, curve in enumerate(curves):
        chart.line([(v, s) for v, s in curve["normal"]], f"normal {series(i)}-dash")
    for i, curve in enumerate(curves):
        chart.line([(v, s) for v, s in curve["candidate"] if v >= x.low], series(i))
    zeros = sum(curve["zeros"] for curve in curves)
    text = "Share of the positions whose KL is at most the value below."
    if zeros:
        text += f" {zeros} positions have no difference at all, or less than 1e-10."
    legend = kind_legend(figures["kinds"])
    if any(curve["normal"] for curve in curves):
        legend += (("normal", "normal producers (dashed like their kind)"),)
    return Drawing("How KL is distributed", chart.svg(), legend, text)


def _steps(figures: Mapping[str, Any]) -> Drawing | None:
    rows = figures["steps"]
    means = [b["mean"] for row in rows for b in (*row["candidate"], *row["normal"])]
    if not any(means):
        return None
    last = max(b["last"] for row in rows for b in row["candidate"])
    chart = Chart(
        "KL by decode step",
        Scale(0.9, last * 1.1, log=True),
        Scale.over(means, log=True),
        "decode step",
        "mean KL, nats",
    )
    for i, row in enumerate(rows):
        for bucket in row["normal"]:
            span = [(max(bucket[end], 1), bucket["mean"]) for end in ("first", "last")]
            chart.line(span, f"normal {series(i)}-dash")
        points = [(math.sqrt(b["first"] * b["last"]), b["mean"]) for b in row["candidate"]]
        chart.line(points, series(i))
        chart.dots(points, f"big {series(i)}")
    return Drawing(
        "KL by decode step",
        chart.svg(),
        (*kind_legend(figures["kinds"]), ("normal", "normal producers, by half")),
        "A state that loses precision shows as a rise from left to right.",
    )


def scatter_chart(scatter: Mapping[str, Any], kinds: Sequence[str], title: str) -> Drawing | None:
    """Margin against KL of single positions (`kernjax.reporting.figures.scatter`)."""
    points = [(max(m, _TIE), max(kl, 1e-10), kind, flip)
              for m, kl, kind, flip in scatter["points"]]  # fmt: skip
    if not points:
        return None
    chart = Chart(
        "Margin and KL",
        Scale.over([m for m, _, _, _ in points], log=True),
        Scale.over([kl for _, kl, _, _ in points], log=True),
        "the reference's margin, logits",
        "KL, nats",
    )
    for i in range(len(kinds)):
        chart.dots([(m, kl) for m, kl, k, flip in points if k == i and not flip], series(i))
    flips_at = [(m, kl) for m, kl, _, flip in points if flip]
    chart.dots(flips_at, "flip")
    return Drawing(
        title,
        chart.svg(),
        (*kind_legend(kinds), ("flip", "flips: another first choice")),
        f"{len(points)} of {scatter['of']} positions: the largest KLs, the flips (here "
        f"{len(flips_at)} of {scatter['flips']}), and every so-many-th of the others.",
    )


def flips(verdict: Verdict, figures: Mapping[str, Any] | None = None) -> Drawing | None:
    """Flip rates by the reference's margin, beside the normals' and what noise would make."""
    bins = [entry for entry in verdict.margin_bins if entry.positions]
    if not bins:
        return None
    margins = (figures or {}).get("margins") or {"expected": [], "sigma": None}
    expected = dict(zip([e.margin for e in verdict.margin_bins], margins["expected"], strict=False))
    rates = [wilson(entry.flips, entry.positions) for entry in bins]
    grey = [wilson(entry.normal_flips or 0.0, entry.positions) for entry in bins]
    noise = [expected[e.margin] / e.positions for e in bins if e.margin in expected]
    top = max([100 * high for _, _, high in (*rates, *grey)] + [100 * n for n in noise])
    chart = Chart(
        "Flip rate by margin",
        Scale(-0.5, len(bins) - 0.5),
        Scale(0.0, 1.05 * top),
        "the reference's margin, logits",
        "flips, % of positions",
        [(i, "tie" if e.margin == "0" else shorten(e.margin, 12)) for i, e in enumerate(bins)],
    )
    for shift, css, values in ((0.14, "normal", grey), (-0.14, "flip", rates)):
        chart.bars([(i + shift, 100 * v[1], 100 * v[2]) for i, v in enumerate(values)], css)
        chart.dots([(i + shift, 100 * v[0]) for i, v in enumerate(values)], f"big {css}")
    legend = [("flip", "candidate"), ("normal", "normal producers")]
    what = f"{scored(verdict)} positions"
    text = f"Share of the {what} of a bin with another first choice; 95 % intervals."
    if noise:
        chart.line(list(enumerate(100 * value for value in noise)), "expected")
        legend.append(("expected", "independent logit noise"))
        text += f" Noise as large as the normals' has sigma {number(margins['sigma'])}."
    return Drawing("Flips by margin", chart.svg(), tuple(legend), text)


def wilson(count: float, total: int) -> tuple[float, float, float]:
    """A share and its 95 % interval (Wilson's score interval; a mean count may be fractional)."""
    z = normal_quantile(0.975)
    share = count / total
    center = (share + z * z / (2 * total)) / (1 + z * z / total)
    half = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    half /= 1 + z * z / total
    return share, max(0.0, min(share, center - half)), min(1.0, max(share, center + half))


def layer_map(found: Mapping[str, Any]) -> Drawing | None:
    """`locate`: the share of the effect by layer (a part of several layers is spread over them)."""
    parts = [p for p in found["layers"] if p["layers"] and p["share"] is not None]
    if not parts:
        return None
    bars = [(layer, p["share"] / len(p["layers"])) for p in parts for layer in p["layers"]]
    last = max(layer for layer, _ in bars)
    high = max(0.05, *(share for _, share in bars))
    low = min(0.0, *(share for _, share in bars))
    chart = Chart(
        "Share of the effect by layer",
        Scale(-0.7, last + 0.7),
        Scale(100 * low, 105 * high),
        "layer",
        "share of the effect, %",
        [(layer, str(layer)) for layer in _thin(range(last + 1))],
    )
    chart.bars([(layer, 0.0, 100 * share) for layer, share in bars], "thick s0")
    return Drawing(
        "Where it comes from, by layer",
        chart.svg(),
        (("s0", "the candidate in this layer only"),),
        "KL against the base over the whole candidate's. Layers that were not cut apart share "
        "their part evenly.",
    )


def knee(found: Mapping[str, Any]) -> Drawing | None:
    """`sweep`: R by format, from the widest to the narrowest."""
    points = found["points"]
    columns = list(dict.fromkeys((r["kind"], r["mean"]) for p in points for r in p["ratios"]))
    spans = [v for p in points for r in p["ratios"] for v in (r["low"], r["high"])]
    if not columns or not any(spans):
        return None
    chart = Chart(
        "Times normal by format",
        Scale(-0.5, len(points) - 0.5),
        Scale.over([*spans, 1.0], log=True),
        "format",
        "KL / normal",
        [(i, shorten(points[i]["format"], 9)) for i in _thin(range(len(points)))],
    )
    chart.rule(1.0, "normal")
    for c, (kind, mean) in enumerate(columns):
        rows = [
            (i, r)
            for i, p in enumerate(points)
            for r in p["ratios"]
            if (r["kind"], r["mean"]) == (kind, mean) and r["ratio"]
        ]
        chart.line([(i, r["ratio"]) for i, r in rows], series(c))
        chart.dots([(i, r["ratio"]) for i, r in rows], f"big {series(c)}")
        bars = [(i, r["low"], r["high"]) for i, r in rows if r["low"] and r["high"]]
        chart.bars(bars, series(c))
    text = f"Knee: {found['knee']}." if found.get("knee") else "No knee among these formats."
    legend = tuple((series(c), shorten(f"{k}, {m}", 40)) for c, (k, m) in enumerate(columns))
    return Drawing("How coarse the site may be", chart.svg(), legend, text)


def _aside(index: int, count: int) -> float:
    """Kinds of one depth stand side by side: a factor on a logarithmic axis."""
    return 1.0 + 0.05 * (index - (count - 1) / 2)


def _thin(values: Sequence[int]) -> list[int]:
    """At most nine of the values."""
    return list(values)[:: -(-len(values) // 9) or 1]

"""The article's figures as drawings, by name; of `kernjax.reporting.article`'s numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernjax.reporting.charts import Drawing, kind_legend, scatter_chart, series, wilson
from kernjax.reporting.layout import shorten
from kernjax.reporting.svg import Chart, Scale


def article_drawings(data: Mapping[str, Any]) -> dict[str, Drawing]:
    """Name -> drawing of everything that `data` has numbers for."""
    found = {"cdf": _cdf(data)}
    if data.get("first_layer") and data["twin"]:
        found["first_layer"] = _first_layer(data)
    if data.get("state"):
        found["state"] = _state(data["state"])
    for kind in data["kinds"]:
        found[f"depth-{kind}"] = _depth(data, kind)
        found[f"over-{kind}"] = _over(data, kind)
    for number, variant in enumerate(data["variants"], 1):
        drawing = scatter_chart(variant["scatter"], data["kinds"], f"{variant['name']}: margin, KL")
        if drawing is not None:
            found[f"scatter-{number}"] = drawing
    if data["variants"]:
        found["flips"] = _flips(data)
    return found


def _cdf(data: Mapping[str, Any]) -> Drawing:
    values = [v for curve in data["cdf"] for v, _ in curve["points"] if v > 1e-10]
    x = Scale.over(values, log=True, pad=0.01)
    chart = Chart("Distribution of KL by kind", x, Scale(0.0, 1.0), "KL, nats", "positions below")
    for i, curve in enumerate(data["cdf"]):
        chart.line([(v, share) for v, share in curve["points"] if v >= x.low], series(i))
    return Drawing("Production against the truth", chart.svg(), kind_legend(data["kinds"]), "")


def _first_layer(data: Mapping[str, Any]) -> Drawing:
    """Each P format as a point: what the first layer does against what arrives at the end."""
    local = data["first_layer"]
    points = [
        (i, entry["format"], local["error"][entry["format"]], entry["logits_rms"])
        for i, entry in enumerate(data["twin"])
    ]
    errors = [value for _, _, by_kind, _ in points for value in by_kind.values()]
    chart = Chart(
        "First layer's error and the logits'",
        Scale.over([e for e in errors if e], log=True, pad=0.2),
        Scale.over([rms for _, _, _, rms in points], log=True, pad=0.2),
        f"attention of layer {local['layer']}, relative error",
        "logits, rms error",
    )
    for i, _, by_kind, rms in points:
        chart.dots([(value, rms) for value in by_kind.values() if value], f"big {series(i)}")
    legend = tuple((series(i), f"P in {name}") for i, name, _, _ in points)
    return Drawing("Does the first layer rank the formats?", chart.svg(), legend, "")


def _state(found: Mapping[str, Any]) -> Drawing:
    formats = found["formats"]
    values = [v for row in found["distance"] for v in row]
    chart = Chart(
        "State after one decode step",
        Scale(-0.5, len(formats) - 0.5),
        Scale.over(values, log=True),
        "format of the state",
        "relative distance",
        list(enumerate(formats)),
    )
    for i, row in enumerate(found["distance"]):
        points = [(at, value) for at, value in enumerate(row) if value]
        chart.line(points, series(i))
        chart.dots(points, f"big {series(i)}")
    legend = tuple((series(i), f"layer {n}") for i, n in enumerate(found["layers"]))
    return Drawing("The state after one decode step", chart.svg(), legend, "")


def _by_format(data: Mapping[str, Any], kind: str) -> dict[str, list[Mapping[str, Any]]]:
    found: dict[str, list[Mapping[str, Any]]] = {}
    for entry in data["depth"]:
        if entry["kind"] == kind:
            found.setdefault(entry["format"], []).append(entry)
    return found


def _depth_axis(entries: Mapping[str, list[Mapping[str, Any]]]) -> tuple[Scale, list[Any]]:
    depths = sorted({e["context_len"] for rows in entries.values() for e in rows})
    return Scale(depths[0] / 1.3, depths[-1] * 1.3, log=True), [(d, str(d)) for d in depths]


def _depth(data: Mapping[str, Any], kind: str) -> Drawing:
    entries = _by_format(data, kind)
    x, ticks = _depth_axis(entries)
    y = Scale.over([e["kl_mean"] for rows in entries.values() for e in rows], log=True)
    chart = Chart(f"KL by depth, {kind}", x, y, "context", "mean KL, nats", ticks)
    for i, rows in enumerate(entries.values()):
        points = [(e["context_len"], e["kl_mean"]) for e in rows]
        chart.line(points, series(i))
        chart.dots(points, f"big {series(i)}")
    legend = tuple((series(i), f"P in {name}") for i, name in enumerate(entries))
    return Drawing(f"KL by depth: {shorten(kind, 30)}", chart.svg(), legend, "")


def _over(data: Mapping[str, Any], kind: str) -> Drawing:
    entries = _by_format(data, kind)
    x, ticks = _depth_axis(entries)
    known = {
        name: [(e["context_len"], *e["over_production"]) for e in rows]
        for name, rows in entries.items()
    }
    values = [v for rows in known.values() for row in rows for v in row[1:] if v is not None]
    chart = Chart(
        f"KL over production, {kind}", x, Scale.over([*values, 1.0], log=True), "context",
        "KL / production", ticks,
    )  # fmt: skip
    chart.rule(1.0, "normal")
    for i, rows in enumerate(known.values()):
        rows = [row for row in rows if None not in row]
        aside = 1 + 0.03 * (i - (len(known) - 1) / 2)
        chart.line([(d * aside, r) for d, r, _, _ in rows], series(i))
        chart.dots([(d * aside, r) for d, r, _, _ in rows], f"big {series(i)}")
        chart.bars([(d * aside, low, high) for d, _, low, high in rows], series(i))
    legend = tuple((series(i), f"P in {name}") for i, name in enumerate(known))
    return Drawing(f"KL over production: {shorten(kind, 30)}", chart.svg(), legend, "")


def _flips(data: Mapping[str, Any]) -> Drawing:
    variants = data["variants"]
    used = [i for i, entry in enumerate(variants[0]["bins"]) if entry["positions"]]
    rates = [
        [wilson(v["bins"][i]["flips"], v["bins"][i]["positions"]) for i in used] for v in variants
    ]
    top = max(100 * high for row in rates for _, _, high in row)
    labels = ["tie" if variants[0]["bins"][i]["margin"] == "0" else variants[0]["bins"][i]["margin"]
              for i in used]  # fmt: skip
    chart = Chart(
        "Flip rate by margin",
        Scale(-0.5, len(used) - 0.5),
        Scale(0.0, 1.05 * top),
        "the reference's margin, logits",
        "flips, % of positions",
        [(i, shorten(text, 12)) for i, text in enumerate(labels)],
    )
    for number, row in enumerate(rates):
        shift = 0.22 * (number - (len(rates) - 1) / 2)
        bars = [(i + shift, 100 * low, 100 * high) for i, (_, low, high) in enumerate(row)]
        chart.bars(bars, series(number))
        chart.dots([(i + shift, 100 * share) for i, (share, _, _) in enumerate(row)],
                   f"big {series(number)}")  # fmt: skip
    legend = tuple((series(i), shorten(v["name"], 50)) for i, v in enumerate(variants))
    return Drawing("Flips by margin", chart.svg(), legend, "")

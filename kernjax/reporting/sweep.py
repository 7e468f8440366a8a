"""What a sweep found, for people (Markdown, a plot) and for machines (one dict)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from kernjax.base.errors import UserError
from kernjax.judge.sweep import Point, Sweep
from kernjax.reporting.json import plain
from kernjax.reporting.layout import interval
from kernjax.reporting.markdown import nats, table

SCHEMA_VERSION = 1


def sweep_line(sweep: Sweep, parties: dict[str, Any]) -> dict[str, Any]:
    """The value of the command's JSON line."""
    return plain(
        {
            "schema_version": SCHEMA_VERSION,
            "site": sweep.site,
            "policy": sweep.policy,
            "knee": sweep.knee,
            "last_normal": sweep.last_normal,
            "decided": sweep.decided,
            "sentence": sweep.sentence,
            "points": sweep.points,
            **parties,
        }
    )


def sweep_markdown(sweep: Sweep) -> str:
    """The sentence, then tables: ratios to normal, KL by decode step, difference by layer."""
    parts = [sweep.sentence, _ratios(sweep), _steps(sweep)]
    if any(point.layers for point in sweep.points):
        parts += [_layers(sweep, "state"), _layers(sweep, "stream")]
    return "\n\n".join(part for part in parts if part) + "\n"


def _ratios(sweep: Sweep) -> str:
    columns = list(dict.fromkeys((r.kind, r.mean) for p in sweep.points for r in p.ratios))
    rows = []
    for point in sweep.points:
        found = {(r.kind, r.mean): interval(r.ratio, r.low, r.high) for r in point.ratios}
        above = {True: "yes", False: "no", None: "-"}[point.above]
        rows.append(
            [
                point.format,
                *(found.get(column, "-") for column in columns),
                nats(point.kl["median"]),
                nats(point.kl["mean"]),
                str(point.flips),
                "not finite" if point.non_finite else above,
            ]
        )
    header = ["format", *(f"R {kind}, {mean}" for kind, mean in columns)]
    header += ["KL median", "KL mean", "flips", "above normal"]
    caption = (
        "R: KL over the normal producers', with one-sided 95 % bounds that hold the producers' own "
        "spread; KL in nats against the reference."
    )
    return f"{caption}\n\n{table(header, rows)}"


def _steps(sweep: Sweep) -> str:
    labels = list(dict.fromkeys(b.label for p in sweep.points for b in p.buckets))
    rows = []
    for point in sweep.points:
        found = {bucket.label: bucket.kl_mean for bucket in point.buckets}
        rows.append([point.format, *(nats(found.get(label)) for label in labels)])
    caption = "Mean KL by decode step (prefill: the prompt's last position):"
    return f"{caption}\n\n{table(['format', *labels], rows)}"


def _layers(sweep: Sweep, what: str) -> str:
    points = [point for point in sweep.points if point.layers]
    rows = []
    for index, layer in enumerate(points[0].layers):
        values = [getattr(point.layers[index], what) for point in points]
        if any(value is not None for value in values):
            rows.append([str(layer.layer), *map(nats, values)])
    if not rows:
        return ""
    noun = {"state": "recurrent state", "stream": "residual stream"}[what]
    caption = (
        f"After one decode step, by layer: relative distance of the {noun} from the same policy "
        "without this rounding:"
    )
    return f"{caption}\n\n{table(['layer', *(point.format for point in points)], rows)}"


def has_matplotlib() -> bool:
    """Whether plots can be drawn here."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def plot_sweep(sweep: Sweep, path: str | Path) -> Path:
    """Draws R and KL by decode step over the formats; UserError without matplotlib."""
    if not has_matplotlib():
        raise UserError(
            "matplotlib is not installed, so there is no plot.",
            todo="pip install 'kernjax[report]', or leave --plot out.",
        )
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    places = range(len(sweep.points))
    for kind, mean in dict.fromkeys((r.kind, r.mean) for p in sweep.points for r in p.ratios):
        found = [_ratio(point, kind, mean) for point in sweep.points]
        left.errorbar(
            places,
            [f[0] for f in found],
            yerr=[[f[0] - f[1] for f in found], [f[2] - f[0] for f in found]],
            marker="o" if mean == "geometric" else "s",
            markersize=4,
            capsize=2,
            linewidth=1,
            label=f"{kind}, {mean}",
        )
    left.axhline(1.0, color="black", linewidth=0.8)
    left.set_ylabel("KL over the normal difference")
    for label in dict.fromkeys(b.label for p in sweep.points for b in p.buckets):
        values = [
            next((b.kl_mean or math.nan for b in p.buckets if b.label == label), math.nan)
            for p in sweep.points
        ]
        right.plot(places, values, marker=".", label=label)
    right.set_ylabel("mean KL by decode step, nats")
    for axes in (left, right):
        axes.set_yscale("log")
        axes.set_xticks(list(places), [point.format for point in sweep.points])
        axes.legend(fontsize=8)
        if sweep.knee is not None:
            knee = [point.format for point in sweep.points].index(sweep.knee)
            axes.axvline(knee, color="tab:red", linewidth=0.8, linestyle=":")
    figure.suptitle(f"{sweep.site} on {sweep.policy}: knee {sweep.knee or 'not found'}")
    figure.savefig(path, dpi=120)
    return Path(path)


def _ratio(point: Point, kind: str, mean: str) -> tuple[float, float, float]:
    for entry in point.ratios:
        if (entry.kind, entry.mean) == (kind, mean):
            return entry.ratio, entry.low, entry.high
    return math.nan, math.nan, math.nan

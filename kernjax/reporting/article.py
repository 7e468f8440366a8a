"""The article's figures for one checkpoint: numbers from recordings, and what they say in words.

Every recording was scored at the reference's ids. `Roles` says which is which; the numbers that
need the model itself (`first_layer`, `state`, `greedy`) come from `kernjax.experiments.article` and
are drawn and told where they are there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kernjax.judge.comparison import DECODE, Comparison, compare
from kernjax.judge.intervals import mean_of
from kernjax.judge.metrics import KL_FLOOR, MARGIN_LABELS, log_floored, margin_bin
from kernjax.reporting.charts import wilson
from kernjax.reporting.figures import scatter
from kernjax.reporting.layout import interval, number
from kernjax.reporting.markdown import nats, table

if TYPE_CHECKING:
    from kernjax.recording import Recording

SCHEMA_VERSION = 1
_SHARES = (*np.linspace(0.0, 0.98, 50), 0.99, 0.995, 0.998, 0.999, 1.0)
_HIGH = 0.01  # the largest KLs, of which most do not flip


@dataclass(frozen=True)
class Roles:
    """Recordings by what the figures use them for; P formats from the widest to the narrowest.

    `formats["bf16"]` (production's own P format) is production itself.
    """

    production: Recording
    undone: Recording | None  # production with P in float32; without it there is no twin lens
    formats: Mapping[str, Recording]
    variants: Mapping[str, Recording]  # for the scatter and the flips
    missing: tuple[str, ...] = ()  # what nobody recorded, and is not drawn


def numbers(reference: Recording, roles: Roles) -> dict[str, Any]:
    """All that recordings can tell; plain JSON values."""
    widest = {} if roles.undone is None else {"f32": roles.undone}
    by_format = {name: compare(reference, one) for name, one in {**widest, **roles.formats}.items()}
    production = compare(reference, roles.production)
    variants = {name: compare(reference, one) for name, one in roles.variants.items()}
    kinds = sorted({segment.kind for segment in production.segments})
    return {
        "schema_version": SCHEMA_VERSION,
        "kinds": kinds,
        "positions": int(_decoded(production).sum()),
        "segments": len(roles.production.segments),
        "of_segments": len(reference.segments),
        "missing": list(roles.missing),
        "cdf": [_cdf(production, kind) for kind in kinds],
        "twin": [
            _twin(name, roles.undone, one)
            for name, one in roles.formats.items()
            if roles.undone is not None
        ],
        "depth": [
            entry for name, one in by_format.items() for entry in _by_depth(name, one, production)
        ],
        "variants": [_variant(name, one, kinds) for name, one in variants.items()],
    }


def _decoded(comparison: Comparison, kind: str | None = None) -> np.ndarray:
    """[R] bool: the finite decode rows, of one kind or of all."""
    rows = (comparison.phase == DECODE) & comparison.finite
    if kind is not None:
        kinds = np.array([segment.kind for segment in comparison.segments])
        rows &= (kinds == kind)[comparison.segment]
    return rows


def _cdf(comparison: Comparison, kind: str) -> dict[str, Any]:
    kl = comparison.kl[_decoded(comparison, kind)]
    points = zip(np.quantile(kl, _SHARES).tolist(), _SHARES, strict=True)
    return {
        "kind": kind,
        "points": [[float(f"{value:.4g}"), round(float(share), 4)] for value, share in points],
        "zeros": int((kl <= KL_FLOOR).sum()),
        "median": float(np.median(kl)),
        "mean": float(kl.mean()),
        "max": float(kl.max()),
    }


def _twin(name: str, undone: Recording, one: Recording) -> dict[str, Any]:
    """A P format against the same policy with P in float32: logits and KL at the end.

    The logits' error is that of the recorded ids (the reference's first ones), their common shift
    taken out, root mean square over ids and decode rows.
    """
    comparison = compare(undone, one)
    rows = _decoded(comparison)
    change = one.top_logprobs[rows].astype(np.float64) - undone.top_logprobs[rows]
    change -= change.mean(axis=1, keepdims=True)
    kl = comparison.kl[rows]
    return {
        "format": name,
        "logits_rms": float(np.sqrt(np.mean(change * change))),
        "kl_mean": float(kl.mean()),
        "kl_median": float(np.median(kl)),
    }


def _by_depth(name: str, comparison: Comparison, production: Comparison) -> list[dict[str, Any]]:
    """By kind and depth: mean KL, and the geometric ratio to production's with 95 % bounds."""
    own, theirs = _per_segment(comparison), _per_segment(production)
    strata = dict.fromkeys((s.kind, s.context_len) for s in comparison.segments)
    entries = []
    for kind, context in sorted(strata):
        chosen = np.array([(s.kind, s.context_len) == (kind, context) for s in comparison.segments])
        rows = _decoded(comparison) & chosen[comparison.segment]
        ratio = mean_of((own - theirs)[chosen], np.zeros(int(chosen.sum()), int))
        bounds = [None] * 3
        if ratio is not None:
            logs = (ratio.value, ratio.bound(0.025), ratio.bound(0.975))
            bounds = [math.exp(value) for value in logs]
        entries.append(
            {
                "format": name,
                "kind": kind,
                "context_len": context,
                "kl_mean": float(comparison.kl[rows].mean()),
                "over_production": bounds,
            }
        )
    return entries


def _per_segment(comparison: Comparison) -> np.ndarray:
    """[S] mean of ln KL over a segment's decode rows."""
    rows = _decoded(comparison)
    logs, segment = log_floored(comparison.kl[rows]), comparison.segment[rows]
    size = len(comparison.segments)
    return np.bincount(segment, logs, size) / np.maximum(np.bincount(segment, minlength=size), 1)


def _variant(name: str, comparison: Comparison, kinds: list[str]) -> dict[str, Any]:
    """Points of the scatter, flips by margin, and how many of the largest KLs flip."""
    rows = _decoded(comparison)
    flipped = comparison.flipped | comparison.tie_flipped
    bins = margin_bin(comparison.margin[rows])
    size = len(MARGIN_LABELS)
    positions = np.bincount(bins, minlength=size)
    flips = np.bincount(bins, flipped[rows], minlength=size).astype(int)
    kl, margin = comparison.kl[rows], comparison.margin[rows]
    high = np.argsort(-kl, kind="stable")[: max(1, round(_HIGH * kl.size))]
    row_kinds = np.array([s.kind for s in comparison.segments])[comparison.segment]
    return {
        "name": name,
        "scatter": scatter(comparison, rows, row_kinds, kinds),
        "bins": [
            {"margin": label, "positions": int(n), "flips": int(f)}
            for label, n, f in zip(MARGIN_LABELS, positions, flips, strict=True)
        ],
        "largest_flipped_margin": float(margin[flipped[rows]].max()) if flips.any() else None,
        "high_kl_not_flipped": float(1 - flipped[rows][high].mean()),
    }


def _tell_cdf(data: Mapping[str, Any]) -> str:
    rows = [
        [c["kind"], nats(c["median"]), nats(c["mean"]), nats(c["max"]), str(c["zeros"])]
        for c in data["cdf"]
    ]
    return "Production against the ground truth, KL in nats:\n\n" + table(
        ["kind", "median", "mean", "max", "at most 1e-10"], rows
    )


def _tell_twin(data: Mapping[str, Any]) -> str:
    if not data["twin"]:
        return ""
    local = data.get("first_layer")
    kinds = data["kinds"] if local else []
    rows = [
        [
            entry["format"],
            *(nats(local["error"].get(entry["format"], {}).get(kind)) for kind in kinds),
            nats(entry["logits_rms"]),
            nats(entry["kl_mean"]),
        ]
        for entry in data["twin"]
    ]
    header = ["P", *(f"layer {local['layer']}, {kind}" for kind in kinds), "logits rms", "KL mean"]
    also = "; the layer's error is relative" if local else ""
    caption = f"Against the same policy with P in float32{also}:"
    return f"{caption}\n\n{table(header, rows)}"


def _tell_state(data: Mapping[str, Any]) -> str:
    found = data.get("state")
    if not found:
        return ""
    rows = [
        [f"layer {layer}", *map(nats, values)]
        for layer, values in zip(found["layers"], found["distance"], strict=True)
    ]
    return (
        "Relative distance of the recurrent state from production's, whose state is float32:\n\n"
        + table(["", *found["formats"]], rows)
    )


def _tell_depth(data: Mapping[str, Any]) -> str:
    rows = [
        [e["kind"], str(e["context_len"]), e["format"], nats(e["kl_mean"])]
        + [interval(*e["over_production"])]
        for e in sorted(data["depth"], key=lambda e: (e["kind"], e["context_len"]))
    ]
    header = ["kind", "context", "P", "KL mean", "over production"]
    return "Against the ground truth; geometric ratio with 95 % interval:\n\n" + table(
        header, rows, left=1
    )


def _tell_flips(data: Mapping[str, Any]) -> str:
    if not data["variants"]:
        return ""
    used = [i for i, b in enumerate(data["variants"][0]["bins"]) if b["positions"]]
    rows = []
    for i in used:
        row = [data["variants"][0]["bins"][i]["margin"]]
        for variant in data["variants"]:
            entry = variant["bins"][i]
            share, low, high = wilson(entry["flips"], entry["positions"])
            row.append(f"{100 * share:.2g} [{100 * low:.2g}, {100 * high:.2g}]")
        rows.append([*row, str(data["variants"][0]["bins"][i]["positions"])])
    names = [variant["name"] for variant in data["variants"]]
    lines = [
        f"- {v['name']}: the largest margin that flipped is "
        f"{number(v['largest_flipped_margin'])}; of the 1 % largest KLs "
        f"{100 * v['high_kl_not_flipped']:.0f} % do not flip."
        for v in data["variants"]
    ]
    header = ["margin", *(f"{name}, %" for name in names), "positions"]
    return "\n\n".join(
        ["Flips by the reference's margin, with 95 % intervals:", table(header, rows)]
        + ["\n".join(lines)]
    )


def _tell_greedy(data: Mapping[str, Any]) -> str:
    found = data.get("greedy")
    if not found:
        return ""
    rows = [
        [e["name"], f"{e['parted']} of {e['texts']}", number(e["first_token"])]
        + [number(e["median_token"]), number(e["median_margin"], 2), number(e["max_margin"], 2)]
        for e in found["rows"]
    ]
    header = ["", "part", "first at token", "median token", "median margin", "largest margin"]
    return (
        f"Greedy texts of {found['steps']} tokens beside the ground truth's, from the same "
        f"prompts:\n\n{table(header, rows)}"
    )


_SECTIONS = (
    ("How the normal difference is distributed", ("cdf",), _tell_cdf),
    ("P formats: the first attention layer and the logits", ("first_layer",), _tell_twin),
    ("The state after one decode step", ("state",), _tell_state),
    ("KL by depth and P format", ("depth", "over"), _tell_depth),
    ("Margin, KL and flips", ("scatter", "flips"), _tell_flips),
    ("Greedy texts", (), _tell_greedy),
)
"""Title, the pictures under it (by the first part of their names), the text."""


def article_markdown(data: Mapping[str, Any], pictures: Mapping[str, str]) -> str:
    """The document's part: pictures (name -> file), then tables, one section a figure.

    It begins with what is not drawn for lack of a recording.
    """
    parts = []
    if data["segments"] < data["of_segments"]:
        parts.append(
            f"Drawn on {data['segments']} of the reference's {data['of_segments']} segments: all "
            "that every recording has."
        )
    if data["missing"]:
        parts.append(f"Not drawn, as nobody recorded it: {', '.join(data['missing'])}.")
    for title, prefixes, tell in _SECTIONS:
        shown = [
            f"![{name}]({file})"
            for name, file in pictures.items()
            if name.partition("-")[0] in prefixes
        ]
        if text := tell(data):
            parts += [f"## {title}", *([" ".join(shown)] if shown else []), text]
    return "\n\n".join(parts) + "\n"

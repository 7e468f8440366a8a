"""Tables of what P's formats do to attention: as JSON rows, and as they stand in the documents."""

from __future__ import annotations

from typing import Any

import numpy as np

from kernjax.experiments.attention import Effect
from kernjax.reporting.markdown import table

MEASURES = {"lost": "mass lost", "bias": "bias", "noise": "noise"}


def doublings(depths: tuple[int, ...]) -> list[int]:
    """Indices of the first depth and of those that double it, and of the last."""
    wanted, chosen = depths[0], []
    for index, depth in enumerate(depths):
        if depth >= wanted or index == len(depths) - 1:
            chosen.append(index)
            wanted = 2 * depth
    return chosen


def effect_rows(effect: Effect, kinds: np.ndarray) -> dict[str, Any]:
    """Rows by kind and format: each measure by depth (mean over layers), and by layer at the end.

    Fractions, means over the kind's passages.
    """
    at = doublings(effect.depths)
    rows = []
    for kind in dict.fromkeys(kinds.tolist()):
        for index, name in enumerate(effect.formats):
            by_depth, by_layer = {}, {}
            for key in MEASURES:
                values = getattr(effect, key)[index][:, :, kinds == kind].mean(axis=-1)
                by_depth[key] = values[:, at].mean(axis=0)
                by_layer[key] = values[:, -1]
            rows.append({"kind": kind, "format": name, "by_depth": by_depth, "by_layer": by_layer})
    return {
        "depths": [effect.depths[i] for i in at],
        "layers": list(effect.layers),
        "passages": int(len(kinds)),
        "rows": rows,
    }


def effect_markdown(found: dict[str, Any]) -> str:
    """The tables as they stand in the documents."""

    def lines(part: str) -> list[list[str]]:
        return [
            [row["kind"], row["format"], label, *map(percent, row[part][key])]
            for key, label in MEASURES.items()
            for row in found["rows"]
        ]

    header = ["kind", "P", "%"]
    return "\n\n".join(
        [
            f"By depth, mean over the attention layers, {found['passages']} passages:",
            table([*header, *map(str, found["depths"])], lines("by_depth"), left=3),
            f"By layer, at {found['depths'][-1]} tokens:",
            table([*header, *(f"layer {n}" for n in found["layers"])], lines("by_layer"), left=3),
        ]
    )


def percent(value: float) -> str:
    """A fraction as signed percent in two digits."""
    return f"{100 * value:+.2g}" if abs(value) >= 1e-7 else "0"

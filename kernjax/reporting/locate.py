"""Where a change comes from, for people (Markdown) and for machines (one dict)."""

from __future__ import annotations

from typing import Any

from kernjax.judge.attribution import Attribution, layers_label
from kernjax.reporting.json import plain
from kernjax.reporting.markdown import nats, table

SCHEMA_VERSION = 1


def locate_line(found: Attribution, parties: dict[str, Any]) -> dict[str, Any]:
    """The value of the command's JSON line; layer, op and site of the largest cell on top."""
    best = found.cells[0] if found.cells and found.located else None
    return plain(
        {
            "schema_version": SCHEMA_VERSION,
            "located": found.located,
            "layer": best.layer if best else None,
            "op": best.op if best else None,
            "site": best.site if best else None,
            "share": best.share if best else None,
            "sentence": found.sentence,
            "kl": found.total,
            "first": found.first,
            "sites": found.sites,
            "layers": found.parts,
            "cells": found.cells,
            "outside": found.outside,
            "outside_share": found.outside_share,
            "runs": found.runs,
            **parties,
        }
    )


def locate_markdown(found: Attribution) -> str:
    """The sentence, then tables by site, by layer, and layer and site with the local error."""
    parts = [found.sentence]
    if found.total > 0:
        parts += [_sites(found), _layers(found), _cells(found)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _share(value: float) -> str:
    return f"{100 * value:.1f} %"


def _sites(found: Attribution) -> str:
    if len(found.sites) < 2 and not found.outside:
        return ""
    rows = [
        [site.change, layers_label(site.layers), nats(site.kl), _share(site.share)]
        for site in found.sites
    ]
    if found.outside:
        rows.append([", ".join(found.outside), "outside", "-", _share(found.outside_share)])
    return "Each change alone, at all its layers (KL against the base):\n\n" + table(
        ["change", "layers", "KL", "share"], rows, left=2
    )


def _layers(found: Attribution) -> str:
    rows = [[layers_label(p.layers), nats(p.kl), _share(p.share)] for p in found.parts]
    return "The whole candidate in these layers only:\n\n" + table(["layers", "KL", "share"], rows)


def _cells(found: Attribution) -> str:
    if not found.cells:
        return ""
    rows = [
        [
            str(cell.layer),
            cell.op,
            cell.change,
            _share(cell.share),
            nats(cell.prefill_median),
            nats(cell.prefill_max),
            nats(cell.decode_median),
            nats(cell.decode_max),
            "-" if cell.first_pos is None else str(cell.first_pos),
        ]
        for cell in found.cells
    ]
    header = ["layer", "op", "change", "share", "prefill", "max", "decode", "max", "from"]
    caption = (
        "Beside the share of the whole effect, the layer's own error on the base's inputs "
        f"(relative to its update; median and maximum over the positions of "
        f"{found.cells[0].segment}):"
    )
    return f"{caption}\n\n{table(header, rows, left=3)}"

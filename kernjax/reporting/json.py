"""The verdict for machines: the last line of standard output, and the bytes of a file.

`schemas/check-1.schema.json`, beside this file, describes the line. `schema_version` is its major
version: it grows when a key goes away or changes its meaning. New keys may come at any time, so a
reader ignores those that it does not know.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from kernjax.judge.verdict import Verdict

SCHEMA_VERSION = 1


def verdict_line(
    verdict: Verdict, wall_s: float | None = None, more: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The value of `check`'s JSON line: plain, finite, complete.

    `more`: what a run knows beside the verdict (`command`, `runs`, `notes`, `twin`).
    """
    parties = verdict.parties
    value: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "verdict": str(verdict.outcome),
        "exit_code": verdict.exit_code,
        "reason": verdict.reason,
        "identical": verdict.identical,
        "up_to_context": verdict.up_to_context,
        "kl": verdict.kl,
        "kl_upper": verdict.kl_upper,
        "missing_ids": verdict.missing_ids,
        "flips": verdict.flips,
        "positions": verdict.positions,
        "deciding_phase": verdict.deciding_phase,
        "segments": verdict.segments,
        "strata": verdict.strata,
        "gates": verdict.gates,
        "findings": verdict.findings,
        "margin_bins": verdict.margin_bins,
        "allowed": verdict.allowed,
        "detection_floor": verdict.detection_floor,
        "segments_to_decide": verdict.segments_to_decide,
        "perplexity": verdict.perplexity,
        "accuracy_bound": verdict.accuracy_bound,
        "differences": verdict.differences,
        "changed_from": verdict.changed_from,
        "changes": verdict.changes,
        "reference": parties["reference"],
        "candidate": parties["candidate"],
        "band": parties["band"],
        "isolated": None,
        "incumbent": None,
        "repeat": parties.get("repeat"),
        "wall_s": wall_s,
    }
    if "isolated" in parties:
        value["isolated"] = {
            **parties["isolated"],
            "depths": verdict.isolated,
            "laws": verdict.isolated_laws,
        }
    if "incumbent" in parties:
        value["incumbent"] = {**parties["incumbent"], "rows": verdict.incumbent}
    return plain({**value, **(more or {})})


def plain(value: Any) -> Any:
    """Dataclasses as dicts, tuples as lists, NaN and infinity as null, enumerations as text."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return {field.name: plain(getattr(value, field.name)) for field in fields}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, str):
        return str(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value

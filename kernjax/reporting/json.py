"""The verdict for machines: the last line of standard output, and the verdict's files."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kernjax.base.errors import UserError
from kernjax.judge.verdict import Verdict
from kernjax.reporting.text import render_text

SCHEMA_VERSION = 1
VERDICT_FILE = "verdict.json"
TEXT_FILE = "report.txt"


def verdict_line(verdict: Verdict, wall_s: float | None = None) -> dict[str, Any]:
    """The value of `check`'s JSON line: plain, finite, complete."""
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
        "reference": parties["reference"],
        "candidate": parties["candidate"],
        "band": parties["band"],
        "isolated": None,
        "incumbent": None,
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
    return plain(value)


def write_files(
    verdict: Verdict, output_dir: str | os.PathLike[str], wall_s: float | None = None
) -> list[Path]:
    """Writes `verdict.json` and `report.txt` into a directory, each whole or not at all."""
    folder = Path(output_dir)
    data = json.dumps(verdict_line(verdict, wall_s), indent=1, allow_nan=False) + "\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return [
            write_text(folder / VERDICT_FILE, data),
            write_text(folder / TEXT_FILE, render_text(verdict)),
        ]
    except OSError as error:
        raise UserError(
            f"Could not write the verdict to {folder}: {error.strerror or error}.",
            todo="Check --output_dir, its permissions and the free space.",
        ) from error


def write_text(path: Path, text: str) -> Path:
    """Writes the file, whole or not at all; OSError as it comes."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return path


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

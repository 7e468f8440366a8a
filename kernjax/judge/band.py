"""A band: what "normal" means for one reference, as a versioned JSON file reviewed like source.

It holds the normal producers' per-segment numbers (so that a candidate can be paired with them
without their recordings), the limits derived from them, quantiles for people, and every identity.
`kernjax.judge.calibrate` makes one; nothing else changes it. A file is believed only as far as it
agrees with itself: its content has a hash, and what follows from the normals' numbers (limits, flip
bins, flip margins, detection floor) is computed again when it is read.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from kernjax.base.errors import UserError
from kernjax.base.hashing import sha256_json
from kernjax.judge.band_checks import check, limits_to_dict
from kernjax.judge.comparison import PHASES, Comparison, Segment
from kernjax.judge.gates import Limit, Row, predeclared
from kernjax.judge.metrics import MARGIN_LABELS
from kernjax.judge.summaries import GROUPS, Summary

SCHEMA_VERSION = 3
IN_MEMORY = "in memory"
_DECIMALS = 6
_MASS_DECIMALS = 9


@dataclass(frozen=True, eq=False)
class Band:
    """The calibrated normal difference; see the module's docstring."""

    reference: dict[str, Any]  # identity of the reference recording and what it was made of
    producers: list[dict[str, Any]]  # one a normal: identities and its R against the others
    segments: tuple[Segment, ...]
    level: int  # phase of the rows that decide
    normals: tuple[Summary, ...]
    limits: dict[str, Limit]  # by Row.key, in the row's own scale
    flip_bins: list[tuple[int, ...]]
    margins: dict[str, Any]  # flip rates by bin, flip limits, sigma and the tail of margin changes
    strata: list[dict[str, Any]]  # KL quantiles by kind, context_len, phase
    detection_floor: dict[str, float]  # by kind: the smallest uniform R that FAILs, 95 % power
    production_policy: str = "bf16"
    deploy_context: int | None = None
    bad: list[dict[str, Any]] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION
    path: str = IN_MEMORY  # where it was read

    @property
    def rows(self) -> list[Row]:
        """The predeclared gate rows that have a limit, in table order."""
        return [row for row in self.predeclared if row.key in self.limits]

    @property
    def predeclared(self) -> list[Row]:
        """All rows that its segments and normals give."""
        names = [name for name in GROUPS if name in self.normals[0].log_mean]
        if "early" in names:
            names.append("step")
        return predeclared(self.segments, names, self.flip_bins)

    @property
    def name(self) -> str:
        """What people call it: its reference's model and corpus."""
        parts = (self.reference.get(key) or {} for key in ("model", "corpus"))
        return " on ".join(str(part.get("name", "?")) for part in parts)

    def save(self, path: str | Path) -> None:
        """Writes the JSON file, whole or not at all."""
        target = Path(path)
        temporary = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            temporary.write_text(_dump(self.to_dict()) + "\n", encoding="utf-8")
            os.replace(temporary, target)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise UserError(
                f"Could not write the band {target}: {error.strerror}.",
                todo="Check the folder, its permissions and the free space.",
            ) from error

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, NaN as null, with the hash of all the others."""
        value = {
            "schema_version": self.schema_version,
            "reference": self.reference,
            "production_policy": self.production_policy,
            "deploy_context": self.deploy_context,
            "producers": self.producers,
            "bad": self.bad,
            "settings": self.settings,
            "detection_floor": self.detection_floor,
            "level": PHASES[self.level],
            "limits": limits_to_dict(self.limits),
            "margins": self.margins,
            "flip_bins": [list(bins) for bins in self.flip_bins],
            "strata": self.strata,
            "segments": [asdict(s) | {"documents": list(s.documents)} for s in self.segments],
            "normals": [_summary_to_dict(normal) for normal in self.normals],
        }
        return {"schema_version": self.schema_version, "sha256": content_sha256(value), **value}

    @classmethod
    def load(cls, path: str | Path) -> Band:
        """Reads a band file; UserError when it is missing, no band, or of another schema."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"Could not read the band {path}: {getattr(error, 'strerror', None) or error}.",
                "A band is the JSON file that kernjax.calibrate writes.",
            ) from error
        try:
            data = json.loads(text)
            if not isinstance(data, dict):
                raise TypeError("it holds no object")
            version = data["schema_version"]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{path} is no band: {type(error).__name__}: {error}.",
                "A band is the JSON file that kernjax.calibrate writes.",
            ) from error
        if version != SCHEMA_VERSION:
            raise UserError(
                f"The band {path} has schema version {version!r}.",
                f"This kernjax reads version {SCHEMA_VERSION}.",
                "Calibrate it again, or use the kernjax it was made with.",
            )
        try:
            return replace(cls.from_dict(data), path=os.fspath(path))
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise UserError(
                f"The band {path} is damaged: {type(error).__name__}: {error}.",
                "A band file is only ever written by kernjax.calibrate.",
                "Calibrate it again.",
            ) from error

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Band:
        """The inverse of `to_dict`; UserError where the value does not agree with itself."""
        if (found := content_sha256(data)) != data["sha256"]:
            raise UserError(
                f"The band was changed after it was calibrated: its content has the hash "
                f"{_short(found)}.",
                f"It says {_short(data['sha256'])}: a band file is only ever written by "
                "kernjax.calibrate.",
                "Restore it, or calibrate again: a limit follows from what the normal producers "
                "do, and other producers or more segments are what changes it.",
            )
        segments = tuple(
            Segment(s["id"], s["kind"], s["context_len"], s["score_len"], tuple(s["documents"]))
            for s in data["segments"]
        )
        normals = tuple(_summary_from_dict(entry, len(segments)) for entry in data["normals"])
        if not normals:
            raise ValueError("no normals")
        policy, deploy = data["production_policy"], data["deploy_context"]
        if not isinstance(policy, str) or not (deploy is None or type(deploy) is int):
            raise TypeError(f"production_policy {policy!r}, deploy_context {deploy!r}")
        if deploy is not None and deploy < 1:
            raise ValueError(f"deploy_context {deploy}")
        band = cls(
            reference=dict(data["reference"]),
            producers=list(data["producers"]),
            segments=segments,
            level=PHASES.index(data["level"]),
            normals=normals,
            limits=_limits_from_dict(data["limits"]),
            flip_bins=[tuple(bins) for bins in data["flip_bins"]],
            margins=dict(data["margins"]),
            strata=list(data["strata"]),
            detection_floor=dict(data["detection_floor"]),
            production_policy=policy,
            deploy_context=deploy,
            bad=list(data["bad"]),
            settings=dict(data["settings"]),
        )
        check(band)
        return band


def content_sha256(data: Mapping[str, Any]) -> str:
    """The hash of a band's values, however the file is laid out; its own `sha256` left out."""
    return sha256_json({key: value for key, value in data.items() if key != "sha256"})


def rounded(summary: Summary) -> Summary:
    """The summary as the file keeps it, so that limits follow from the file's own numbers."""
    return Summary(
        {name: np.round(values, _DECIMALS) for name, values in summary.log_mean.items()},
        {name: np.round(values, _DECIMALS) for name, values in summary.mean_log.items()},
        np.round(summary.tail_change, _MASS_DECIMALS),
        summary.flips,
        summary.floored,
    )


def identities(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a manifest by which a band knows a producer."""
    keys = ("model", "tokenizer_sha256", "corpus", "policy", "kernels", "engine", "versions",
            "device", "mesh", "batch_size", "prefill_window", "logits_dtype", "commit")  # fmt: skip
    return {key: manifest[key] for key in keys if manifest.get(key) is not None}


def check_same_subject(comparison: Comparison, band: Band) -> None:
    """Raises UserError unless the comparison is of the band's model, tokenizer and corpus."""
    manifest = comparison.reference_manifest
    for title, key, part in (
        ("model", "model", "weights_sha256"),
        ("tokenizer", "tokenizer_sha256", None),
        ("corpus", "corpus", "sha256"),
    ):
        ours, theirs = band.reference.get(key), manifest.get(key)
        if part is not None:
            ours, theirs = (ours or {}).get(part), (theirs or {}).get(part)
        if ours != theirs:
            raise UserError(
                f"The band was calibrated on {title} {_short(ours)}, but "
                f"{comparison.reference_name} was made with {_short(theirs)}.",
                "A band holds for the model, tokenizer and corpus it was calibrated on.",
                "Calibrate a band for this reference, or pass the band's own.",
            )


def check_belongs(comparison: Comparison, band: Band) -> None:
    """Raises UserError unless the comparison is against the band's own reference."""
    check_same_subject(comparison, band)
    if band.reference.get("identity") != comparison.reference_identity:
        raise UserError(
            f"The band was calibrated against reference "
            f"{_short(band.reference.get('identity'))}, but {comparison.reference_name} is "
            f"{_short(comparison.reference_identity)}.",
            "The normals' numbers are paired with the reference's rows.",
            "Pass the reference the band was made from, or calibrate again.",
        )
    dtype = comparison.candidate_manifest.get("logits_dtype")
    known = {band.reference.get("logits_dtype")} | {
        producer.get("logits_dtype") for producer in band.producers
    }
    if dtype not in known:
        raise UserError(
            f"{comparison.candidate_name} recorded its logits in {dtype}.",
            f"This band has producers of {', '.join(sorted(str(d) for d in known))}.",
            "Record with that logits dtype, or calibrate with a normal producer of this one.",
        )


def _short(identity: Any) -> str:
    text = str(identity)
    return text[:12] + "…" if len(text) > 16 else text


def _summary_to_dict(summary: Summary) -> dict[str, Any]:
    return {
        "log_mean": {name: _listed(values) for name, values in summary.log_mean.items()},
        "mean_log": {name: _listed(values) for name, values in summary.mean_log.items()},
        "tail_change": _listed(summary.tail_change),
        "flips": {
            label: summary.flips[:, index].tolist()
            for index, label in enumerate(MARGIN_LABELS)
            if summary.flips[:, index].any()
        },
        "floored": summary.floored,
    }


def _summary_from_dict(data: Mapping[str, Any], segments: int) -> Summary:
    def array(values: list[float | None]) -> np.ndarray:
        result = np.array([math.nan if v is None else v for v in values], dtype=np.float64)
        if result.shape != (segments,):
            raise ValueError(f"{result.shape[0]} values for {segments} segments")
        return result

    flips = np.zeros((segments, len(MARGIN_LABELS)), dtype=np.int64)
    for label, counts in data["flips"].items():
        flips[:, MARGIN_LABELS.index(label)] = counts
    return Summary(
        {name: array(values) for name, values in data["log_mean"].items()},
        {name: array(values) for name, values in data["mean_log"].items()},
        array(data["tail_change"]),
        flips,
        int(data["floored"]),
    )


def _limits_from_dict(data: Mapping[str, Any]) -> dict[str, Limit]:
    limits = {}
    for key, entry in data.items():
        is_log = {"ratio": True, "mass": False}[entry["unit"]]
        values = {name: value for name, value in entry.items() if name != "unit"}
        if is_log:
            values = {name: math.log(value) for name, value in values.items()}
        limits[key] = Limit(**values, is_log=is_log)
    return limits


def _listed(values: np.ndarray) -> list[float | None]:
    return [float(value) if np.isfinite(value) else None for value in values]


def _dump(value: Any, indent: int = 0) -> str:
    """JSON with one entry a line, but whatever fits a line on one: a file to review."""
    flat = json.dumps(value, allow_nan=False, ensure_ascii=False)
    plain = isinstance(value, list) and not any(isinstance(item, dict | list) for item in value)
    if not isinstance(value, Mapping | list) or plain or (indent and len(flat) <= 160):
        return flat
    pad, end = " " * (indent + 1), "\n" + " " * indent
    if isinstance(value, Mapping):
        entries = [f"{json.dumps(str(k))}: {_dump(v, indent + 1)}" for k, v in value.items()]
        return "{\n" + ",\n".join(pad + entry for entry in entries) + end + "}"
    return "[\n" + ",\n".join(pad + _dump(item, indent + 1) for item in value) + end + "]"

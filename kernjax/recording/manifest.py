"""The manifest: what a recording was made of, and which of it makes two of them the same.

Three kinds of fields:
- labels (`model.name`, `corpus.name`, `policy.name`): for people; hashes decide, they may differ.
- `commit`: the code that ran. It must match to continue a recording (one recording has one
  producer), but is no part of its identity: the same bits of a later commit are the same numbers.
- everything else, also keys unknown here: part of the identity. Versions, device, mesh, batch size
  and prefill window belong to it because reordered reductions change bits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kernjax.base.errors import UserError
from kernjax.base.hashing import sha256_json

SCHEMA_VERSION = 1
TOP_K = 20  # the fewest ids a row may have: below, the coarse KL hides too much in `other`

_LABELS = ("model.name", "corpus.name", "policy.name")
_REQUIRED = (
    "model tokenizer_sha256 corpus policy kernels engine versions device mesh batch_size"
    " prefill_window logits_dtype commit reference"
).split()


def build_manifest(
    *,
    model: Mapping[str, Any],
    corpus: Mapping[str, Any],
    policy: Mapping[str, Any],
    tokenizer_sha256: str | None = None,
    kernels: Mapping[str, Mapping[str, str]] | None = None,
    engine: str = "jax",
    versions: Mapping[str, str] | None = None,
    device: Any = None,
    mesh: Any = None,
    batch_size: Any = None,
    prefill_window: int | None = None,
    logits_dtype: str = "float32",
    commit: str | None = None,
    reference: str | None = None,
    extras: Mapping[str, Mapping[str, Any]] | None = None,
    top_k: int = TOP_K,
    **more: Any,
) -> dict[str, Any]:
    """A manifest without its segments (the writer adds them), as plain JSON values.

    model: `{name, weights_sha256, config_sha256, vocab_size}`; corpus: `{name, sha256}`; policy:
    `{name, text, fields}`; kernels: `{op: {name, sha256}}`. `reference` is the identity of the
    recording at whose ids the rows were scored, None where the rows are the producer's own top-K.
    `extras` declares further arrays: `{name: {"dtype": "float32", "shape": [layers]}}`, the shape
    being that of one row; with `"per": "token"`, of one token read. `more`: further keys; they
    count as identity. Times and host names do not belong here: the same inputs must give the same
    bytes.
    """
    return plain(
        {
            "schema_version": SCHEMA_VERSION,
            "model": model,
            "tokenizer_sha256": tokenizer_sha256,
            "corpus": corpus,
            "policy": policy,
            "kernels": kernels or {},
            "engine": engine,
            "versions": versions or {},
            "device": device,
            "mesh": mesh,
            "batch_size": batch_size,
            "prefill_window": prefill_window,
            "logits_dtype": logits_dtype,
            "commit": commit,
            "reference": reference,
            "extras": extras or {},
            "top_k": top_k,
            **more,
        }
    )


def complete_manifest(
    manifest: Mapping[str, Any], segments: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The manifest as stored: checked, with defaults and with its segments.

    A segment is `{id, kind, context_len, score_len, rows}` plus `documents` (starts; default [0])
    and whatever else its corpus knows. `rows` is the number of scored rows planned for it.
    """
    full = {"schema_version": SCHEMA_VERSION, "extras": {}, "top_k": TOP_K, **plain(manifest)}
    if missing := [key for key in _REQUIRED if key not in full]:
        raise UserError(
            f"The manifest lacks {', '.join(missing)}.",
            "Every field is said, as null where it is unknown.",
            "Make it with kernjax.recording.build_manifest.",
        )
    for key in ("model", "corpus", "policy", "extras"):
        if not isinstance(full[key], dict):
            raise UserError(f"The manifest has {key}={full[key]!r}.", "Expected a mapping.")
    if full["top_k"] < TOP_K:
        raise UserError(
            f"The manifest has top_k={full['top_k']}.",
            f"A recording keeps at least {TOP_K} ids a row.",
        )
    full["segments"] = [
        _complete_segment(index, segment) for index, segment in enumerate(plain(segments))
    ]
    ids = [segment["id"] for segment in full["segments"]]
    if twice := sorted({name for name in ids if ids.count(name) > 1}):
        raise UserError(f"Segment ids occur twice: {', '.join(twice)}.", "Ids are unique.")
    if not ids:
        raise UserError("There is no segment to record.", "At least one is needed.")
    return full


def _complete_segment(index: int, segment: Any) -> dict[str, Any]:
    for key in ("id", "kind"):
        if not (isinstance(segment.get(key), str) and segment[key]):
            raise UserError(f"Segment {index} has {key}={segment.get(key)!r}.", "Expected a name.")
    for key, least in (("context_len", 1), ("score_len", 0), ("rows", 1)):
        value = segment.get(key)
        if not isinstance(value, int) or value < least:
            raise UserError(
                f"Segment {segment['id']} has {key}={value!r}.",
                f"Expected an integer of at least {least}.",
            )
    return {"documents": [0], **segment}


def canonical_json(value: Any) -> bytes:
    """The bytes a value is stored as: sorted keys, one entry a line, UTF-8, no NaN."""
    text = json.dumps(plain(value), sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False)
    return text.encode() + b"\n"


def plain(value: Any) -> Any:
    """The value with NumPy numbers, tuples and mappings turned into what JSON gives back."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def identity_fields(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that make two recordings the same: all but the labels and the commit."""
    fields = _without_labels(manifest)
    fields.pop("commit", None)
    return fields


def recording_identity(manifest: Mapping[str, Any], checksums: Sequence[str]) -> str:
    """Hex SHA-256 over the identity fields and the content of every segment."""
    return sha256_json({"manifest": identity_fields(manifest), "segments": list(checksums)})


def identity_diff(
    a: Mapping[str, Any], b: Mapping[str, Any], sides: tuple[str, str] = ("recorded", "now")
) -> list[str]:
    """One line per difference in what must match to continue a recording; empty when it may be.

    Compares everything but the labels. `a` and `b` are manifests, with or without segments.
    """
    flat_a, flat_b = flatten(_without_labels(a)), flatten(_without_labels(b))
    lines = []
    for key in sorted(flat_a.keys() | flat_b.keys()):
        if key in flat_a and key in flat_b:
            if flat_a[key] == flat_b[key]:
                continue
            left, right = (_shorten(item) for item in _differing(flat_a[key], flat_b[key]))
        else:
            left, right = ("absent" if key not in f else _shorten(f[key]) for f in (flat_a, flat_b))
        lines.append(f"{key}: {sides[0]} {left}, {sides[1]} {right}")
    return lines


def diff_text(lines: Sequence[str], limit: int = 12) -> str:
    """Difference lines for an error message, the first `limit` of them."""
    more = [f"... and {len(lines) - limit} more"] if len(lines) > limit else []
    return "".join(f"\n  {line}" for line in [*lines[:limit], *more])


def _without_labels(manifest: Mapping[str, Any]) -> dict[str, Any]:
    fields = dict(manifest)
    for label in _LABELS:
        group, _, name = label.partition(".")
        if isinstance(fields.get(group), Mapping):
            fields[group] = {key: item for key, item in fields[group].items() if key != name}
    return fields


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """A manifest's values by dotted name; segments by their ids."""
    if isinstance(value, Mapping) and value:
        items = [(str(key), item) for key, item in value.items()]
    elif prefix == "segments" and isinstance(value, list):
        # By id, so that one missing segment does not shift all that follow.
        items = [(str(item.get("id", i)), item) for i, item in enumerate(value)]
        flat = {"segment order": [key for key, _ in items]}
        return flat | {f"segments[{key}]": item for key, item in items}
    else:
        return {prefix: value}
    flat = {}
    for key, item in items:
        flat |= flatten(item, f"{prefix}.{key}" if prefix else key)
    return flat


def _differing(a: Any, b: Any) -> tuple[Any, Any]:
    """Two mappings (segments) without the entries that they share; anything else as it is."""
    if not (isinstance(a, Mapping) and isinstance(b, Mapping)):
        return a, b
    keys = [key for key in a.keys() | b.keys() if key not in a or key not in b or a[key] != b[key]]
    return {k: a[k] for k in keys if k in a}, {k: b[k] for k in keys if k in b}


def _shorten(value: Any) -> str:
    text = json.dumps(plain(value), ensure_ascii=False, sort_keys=True)
    return text if len(text) <= 80 else f"{text[:48]}... (sha256 {sha256_json(value)[:12]})"

"""Whether two recordings speak of the same positions: a comparison of others means nothing."""

from __future__ import annotations

from typing import Any

import numpy as np

from kernjax.base.errors import UserError
from kernjax.recording.manifest import diff_text
from kernjax.recording.reader import Recording, refuse_non_finite

# path in the manifest -> how a person calls it, and what to do when it differs
_SUBJECT = {
    "model.weights_sha256": ("model weights", "the same checkpoint"),
    "model.config_sha256": ("a model config", "the same checkpoint"),
    "model.vocab_size": ("a vocabulary of", "the same checkpoint"),
    "tokenizer_sha256": ("tokenizer", "the same tokenizer"),
    "corpus.sha256": ("corpus", "the same corpus"),
}
_SEGMENT = ("kind", "context_len", "score_len", "documents", "rows")


def check_comparable(reference: Recording, candidate: Recording, *, own_ids: bool = False) -> None:
    """Raises UserError unless the rows of both are the same positions scored at the same ids.

    Model weights and config, tokenizer, corpus, segments, positions and phases, target ids and top
    ids must match; policy, kernels, engine, versions and device may differ (they are what is
    judged). The ids decide, not the name of the reference: a candidate may be compared with any
    recording that has the same ids in the same rows. The reference must be finite. With `own_ids`
    the candidate may list other ids, and another number of them.
    """
    for key, (what, same) in _SUBJECT.items():
        ours, theirs = (_short(_get(side.manifest, key)) for side in (reference, candidate))
        if _get(reference.manifest, key) != _get(candidate.manifest, key):
            raise UserError(
                f"Candidate {candidate.path} was made from {what} {theirs}, but reference"
                f" {reference.path} from {ours}: their distributions cannot be compared.",
                todo=f"Record both with {same}.",
            )
    _check_segments(reference, candidate)
    _check_rows(reference, candidate)
    if not own_ids:
        _check_ids(reference, candidate)
    refuse_non_finite(reference)


def _check_segments(reference: Recording, candidate: Recording) -> None:
    ours, theirs = (
        {segment["id"]: {key: segment.get(key) for key in _SEGMENT} for segment in side.segments}
        for side in (reference, candidate)
    )
    lines = [f"- {name}: only in the reference" for name in ours if name not in theirs]
    lines += [f"+ {name}: only in the candidate" for name in theirs if name not in ours]
    lines += [
        f"~ {name}: {key} {ours[name][key]} in the reference, {theirs[name][key]} in the candidate"
        for name in ours
        if name in theirs
        for key in _SEGMENT
        if ours[name][key] != theirs[name][key]
    ]
    if not lines and list(ours) != list(theirs):
        lines = ["the same segments in another order"]
    if lines:
        raise UserError(
            f"Candidate {candidate.path} and reference {reference.path} have other"
            f" segments:{diff_text(lines)}\n",
            todo="Record both over the same segments (the same --corpus, --limit and phases).",
        )


def _check_rows(reference: Recording, candidate: Recording) -> None:
    for name, todo in (
        ("phase", "Record both with the same phases and prefill rows."),
        ("pos", "Record both with the same phases and prefill rows."),
        ("target_ids", "Record both from the same tokens."),
    ):
        row = _first_difference(getattr(reference, name), getattr(candidate, name))
        if row is not None:
            ours, theirs = getattr(reference, name)[row], getattr(candidate, name)[row]
            raise UserError(
                f"Candidate {candidate.path} has {name}={theirs} where reference"
                f" {reference.path} has {ours} ({_where(reference, row)}): positions do not"
                " correspond.",
                todo=todo,
            )


def _check_ids(reference: Recording, candidate: Recording) -> None:
    if reference.top_ids.shape != candidate.top_ids.shape:
        raise UserError(
            f"Candidate {candidate.path} has {candidate.top_ids.shape[1]} ids a row, reference"
            f" {reference.path} has {reference.top_ids.shape[1]}.",
            todo=f"Record the candidate with --reference={reference.path}.",
        )
    row = _first_difference(reference.top_ids, candidate.top_ids)
    if row is not None:
        scored_at = candidate.manifest["reference"]
        source = (
            "its own top ids"
            if scored_at is None
            else "the ids of this very reference, which is damaged or was rewritten"
            if scored_at == reference.identity
            else f"the ids of recording {_short(scored_at)}"
        )
        raise UserError(
            f"Candidate {candidate.path} was scored at {source}, but reference {reference.path}"
            f" ({_short(reference.identity)}) has other ids (first at"
            f" {_where(reference, row)}).",
            todo=f"Record the candidate with --reference={reference.path}.",
        )


def _first_difference(a: np.ndarray, b: np.ndarray) -> int | None:
    differs = (a != b).reshape(len(a), -1).any(axis=1)
    return int(np.argmax(differs)) if differs.any() else None


def _where(recording: Recording, row: int) -> str:
    segment = recording.segments[recording.segment[row]]["id"]
    return f"segment {segment}, row {row - recording.rows_of(segment).start}"


def _get(manifest: dict[str, Any], key: str) -> Any:
    group, _, name = key.partition(".")
    value = manifest.get(group)
    return value.get(name) if name and isinstance(value, dict) else value


def _short(value: Any) -> str:
    return f"{value[:12]}…" if isinstance(value, str) and len(value) > 12 else str(value)

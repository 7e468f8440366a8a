"""compare(reference, candidate): two recordings, row by row, as plain arrays.

Nothing is judged here: `kernjax.judge` does that, with a band.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from kernjax.base.errors import UserError
from kernjax.judge import metrics
from kernjax.judge.bounds import Bounds, bound

if TYPE_CHECKING:
    from kernjax.recording import Recording

PREFILL, DECODE, RESCORE = 0, 1, 2
PHASES = ("prefill", "decode", "rescore")

_MASS_TOLERANCE = 1e-2
"""|ln of the cells' summed probability|: float32 reaches 1e-5, other engines' files 1e-3."""

_COLUMN_TOLERANCE = 1e-2
"""Nats by which the columns of a row may disagree: other engines' files are rounded."""

_VALUES = ("top_logprobs", "tail_logprob", "target_logprobs", "margins", "top1_ids")


@dataclass(frozen=True)
class Segment:
    """A segment of the corpus: the unit of all statistics."""

    id: str
    kind: str
    context_len: int
    score_len: int
    documents: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Comparison:
    """Candidate against reference; arrays over the rows R of the segments the candidate has.

    `kl` and the changes are NaN where the candidate's distribution is not finite; `finite` is
    False there, and where a value kept beside it (an extra: hidden sketches, say) is not.
    """

    segments: tuple[Segment, ...]
    segment: np.ndarray  # [R] int64, index into `segments`
    pos: np.ndarray  # [R] int64
    phase: np.ndarray  # [R] uint8
    kl: np.ndarray  # [R] float64, nats
    self_kl: np.ndarray  # [R] KL(one-shot prefill || decode) of the candidate; NaN: not recorded
    flipped: np.ndarray  # [R] bool: another top-1 id, ties of the reference left out
    tie_flipped: np.ndarray  # [R] bool: another top-1 id where the reference's margin is 0
    margin: np.ndarray  # [R] float64: the reference's rank 1 minus rank 2, logits
    margin_change: np.ndarray  # [R] float64: of the reference's first two words
    tail_mass: np.ndarray  # [R] float64: the reference's mass in "other"
    tail_change: np.ndarray  # [R] float64: the candidate's mass in "other" less the reference's
    finite: np.ndarray  # [R] bool
    reference_target: np.ndarray  # [R] float64 logprob of the corpus's token
    candidate_target: np.ndarray
    reference_manifest: Mapping[str, Any] = field(default_factory=dict)
    candidate_manifest: Mapping[str, Any] = field(default_factory=dict)
    reference_identity: str = ""
    candidate_identity: str = ""  # also over what it was made of
    candidate_digest: str = ""  # over the candidate's values: equal where every bit is equal
    reference_name: str = "reference"
    candidate_name: str = "candidate"
    bitwise_reference: bool = False  # every recorded value equals the reference's, bit for bit
    full_kl: np.ndarray | None = None  # [R] over the whole vocabulary, where both recorded it
    upper: Comparison | None = None  # where ids are missing: this one is the lower bound
    missing_ids: int = 0  # rows in which the candidate lacks some of the reference's ids
    unlisted: np.ndarray | None = None  # [R] bool: the corpus's token is none of the listed ids
    copied: np.ndarray | None = None  # [R] bool: every cell is the reference's, bit for bit

    @cached_property
    def prefill_window(self) -> int:
        """The reference's prefill window, 0 where it is unknown."""
        return int(self.reference_manifest.get("prefill_window") or 0)


def label(manifest: Mapping[str, Any], path: str) -> str:
    """What a producer is called where its path says nothing: its policy, engine and kernels."""
    policy = manifest.get("policy") or {}
    parts = [str(policy.get("text") or policy.get("name") or os.path.basename(path))]
    if manifest.get("engine") not in (None, "jax"):
        parts.append(str(manifest["engine"]))
    for op, kernel in sorted((manifest.get("kernels") or {}).items()):
        name = kernel.get("name") if isinstance(kernel, Mapping) else kernel
        if name and ":" in str(name):  # somebody's plug-in, not an implementation of ours
            layers = kernel.get("layers") if isinstance(kernel, Mapping) else None
            parts.append(f"{op}={name}" + (f"@layers={layers}" if layers else ""))
    return " ".join(parts)


def compare(
    reference: Recording | str | os.PathLike[str], candidate: Recording | str | os.PathLike[str]
) -> Comparison:
    """The candidate's distributions against the reference's, paired by row.

    Both are recordings or paths of recordings. A candidate that has only some of the reference's
    segments (`--limit`) is compared on these. One that lists its own top ids (imported from an
    engine that gives no others) gets bounds where it lacks the reference's ids: the comparison is
    the lower one, its `upper` the other (`kernjax.judge.bounds`). Raises UserError when they do
    not belong together (another model, corpus or tokenizer, ids of a third recording, swapped
    arguments) or the reference is broken; a candidate's own NaN or infinity is kept, masked, for
    the verdict.
    """
    # Here, because reading recordings needs TensorStore and judging comparisons does not.
    from kernjax.recording import Recording, check_comparable, load_recording

    reference, candidate = (
        one if isinstance(one, Recording) else load_recording(one) for one in (reference, candidate)
    )
    if reference.manifest.get("reference") == candidate.identity:
        raise UserError(
            f"{reference.path} was scored at the ids of {candidate.path}: it is the candidate.",
            "The first is the reference, the second the candidate.",
            "Swap the two.",
        )
    reference = _same_segments(reference, candidate)
    own_ids = candidate.manifest.get("reference") is None and not np.array_equal(
        reference.top_ids, candidate.top_ids
    )
    check_comparable(reference, candidate, own_ids=own_ids)

    p_raw, q_raw = _raw_cells(reference), _raw_cells(candidate)
    finite = np.isfinite(q_raw).all(axis=1)
    finite &= np.isfinite(candidate.target_logprobs) & np.isfinite(candidate.margins)
    _check_mass(q_raw, finite, candidate.path)
    _check_columns(candidate, finite)
    p = metrics.cells(p_raw)
    own = np.full((len(p), q_raw.shape[1]), np.nan)
    own[finite] = metrics.cells(q_raw[finite])
    if own_ids:
        bounds = _bounds(reference, candidate, p, q_raw, finite)
        q, kl = _spread(bounds.lower, finite), _spread(bounds.kl_lower, finite)
    else:
        q, kl = own, np.full(len(p), np.nan)
        kl[finite] = metrics.kl_divergence(p[finite], q[finite])

    margin = reference.margins.astype(np.float64)
    other_top1 = (reference.top1_ids != candidate.top1_ids) & finite
    whole = finite & _finite_extras(candidate)
    comparison = Comparison(
        segments=tuple(_segment(entry) for entry in reference.segments),
        segment=reference.segment.astype(np.int64),
        pos=reference.pos.astype(np.int64),
        phase=reference.phase,
        kl=kl,
        self_kl=_self_kl(candidate, own),
        flipped=other_top1 & (margin != 0),
        tie_flipped=other_top1 & (margin == 0),
        margin=margin,
        margin_change=(q[:, 0] - q[:, 1]) - (p[:, 0] - p[:, 1]),
        tail_mass=np.exp(p[:, -1]),
        tail_change=np.exp(q[:, -1]) - np.exp(p[:, -1]),
        finite=whole,
        reference_target=reference.target_logprobs.astype(np.float64),
        candidate_target=candidate.target_logprobs.astype(np.float64),
        reference_manifest=reference.manifest,
        candidate_manifest=candidate.manifest,
        reference_identity=reference.identity,
        candidate_identity=candidate.identity,
        candidate_digest=_digest(candidate),
        reference_name=reference.path,
        candidate_name=candidate.path,
        bitwise_reference=_digest(candidate) == _digest(reference),
        full_kl=_full_kl(reference, candidate, finite),
        unlisted=~np.any(reference.top_ids == reference.target_ids[:, None], axis=1),
        copied=None if own_ids else np.all(p_raw == q_raw, axis=1),
    )
    if not own_ids:
        return comparison
    nearest, farthest = (
        _spread(mass, finite) - comparison.tail_mass
        for mass in (bounds.tail_nearest, bounds.tail_farthest)
    )
    upper = replace(comparison, kl=_spread(bounds.kl_upper, finite), tail_change=farthest)
    missing = int((bounds.missing > 0).sum())
    return replace(comparison, tail_change=nearest, upper=upper, missing_ids=missing)


def _bounds(
    reference: Recording, candidate: Recording, p: np.ndarray, raw: np.ndarray, finite: np.ndarray
) -> Bounds:
    return bound(
        p[finite],
        reference.top_ids[finite],
        raw[finite].astype(np.float64),
        candidate.top_ids[finite],
        candidate.target_ids[finite],
        candidate.target_logprobs[finite],
        int((reference.manifest.get("model") or {}).get("vocab_size") or 0),
    )


def _full_kl(reference: Recording, candidate: Recording, finite: np.ndarray) -> np.ndarray | None:
    """KL over every token of the vocabulary, NaN where the candidate is not finite."""
    if not {"logprobs"} <= reference.extras.keys() & candidate.extras.keys():
        return None
    ours, theirs = reference.extras["logprobs"], candidate.extras["logprobs"]
    usable = finite & np.isfinite(theirs).all(axis=1)
    kl = metrics.kl_divergence(metrics.cells(ours[usable]), metrics.cells(theirs[usable]))
    return _spread(kl, usable)


def _spread(values: np.ndarray, finite: np.ndarray) -> np.ndarray:
    """Values of the finite rows among all rows, NaN elsewhere."""
    result = np.full((len(finite), *values.shape[1:]), np.nan)
    result[finite] = values
    return result


def _same_segments(reference: Recording, candidate: Recording) -> Recording:
    """The reference's part that the candidate covers; itself where that is all, or not a part."""
    ours = [segment["id"] for segment in reference.segments]
    theirs = [segment["id"] for segment in candidate.segments]
    part = [name for name in ours if name in set(theirs)]
    return reference.select(part) if part == theirs and part != ours else reference


def _segment(entry: Mapping[str, Any]) -> Segment:
    return Segment(
        id=str(entry["id"]),
        kind=str(entry["kind"]),
        context_len=int(entry["context_len"]),
        score_len=int(entry["score_len"]),
        documents=tuple(int(start) for start in entry.get("documents", ())),
    )


def _raw_cells(recording: Recording) -> np.ndarray:
    return np.concatenate([recording.top_logprobs, recording.tail_logprob[:, None]], axis=1)


def _check_mass(raw: np.ndarray, finite: np.ndarray, name: str) -> None:
    """A candidate's cells must be one distribution; references are checked when written."""
    mass = np.zeros(len(raw))
    mass[finite] = metrics.log_mass(raw[finite].astype(np.float64))
    worst = int(np.argmax(np.abs(mass)))
    if abs(mass[worst]) > _MASS_TOLERANCE:
        raise UserError(
            f"{name}: the probabilities of row {worst} (top ids and tail) sum to "
            f"{np.exp(mass[worst]):.6g}.",
            "They sum to 1.",
            "The tail is ln of all the rest's probability over the true vocabulary, of one softmax "
            "with the rest.",
        )


def _check_columns(recording: Recording, finite: np.ndarray) -> None:
    """The columns of a row are of one softmax: flips and perplexity are counted by other columns
    than KL is, and rows that were shifted or copied in one of them would hide there.
    """
    listed, tail = recording.top_logprobs, recording.tail_logprob
    is_top1 = recording.top_ids == recording.top1_ids[:, None]
    is_target = recording.top_ids == recording.target_ids[:, None]
    # What is not listed lies in the tail, which is at least as probable as it is alone.
    top1, target = (
        np.where(mask.any(axis=1), np.where(mask, listed, -np.inf).max(axis=1), tail)
        for mask in (is_top1, is_target)
    )
    second = np.where(is_top1, -np.inf, listed).max(axis=1)
    own = recording.target_logprobs
    # float32 keeps logits of a broken kernel's size to seven digits only.
    tolerance = _COLUMN_TOLERANCE + 1e-6 * np.abs(listed).max(axis=1)
    with np.errstate(invalid="ignore"):  # of rows that are not finite
        apart = np.where(is_target.any(axis=1), np.abs(own - target), own - target)
        checks = (
            ("top1_ids", second - top1, "the top-1 id is the likeliest"),
            ("target_logprobs", apart, "the target has the probability that the ids give it"),
            ("margins", -recording.margins, "a margin is the first logit less the second"),
            ("margins", recording.margins - (top1 - second), "no listed id lies inside the margin"),
        )
    for name, excess, rule in checks:
        bad = np.nonzero(finite & (excess > tolerance))[0]
        if bad.size:
            raise UserError(
                f"{recording.path}: {name} does not belong to the log-probabilities beside it in "
                f"{bad.size} rows, first in row {bad[0]} (segment "
                f"{recording.segments[recording.segment[bad[0]]]['id']}), by {excess[bad[0]]:.3g}.",
                f"All columns of a row are of one softmax: {rule}.",
                "Record it again; in an imported file, look for rows that were shifted or sorted.",
            )


def _finite_extras(recording: Recording) -> np.ndarray:
    """[R] bool: whether all that is kept beside the distributions is finite too."""
    finite = np.ones(len(recording), dtype=bool)
    for values in recording.extras.values():
        if values.dtype.kind == "f":
            finite &= np.isfinite(values).reshape(len(values), -1).all(axis=1)
    return finite


def _self_kl(recording: Recording, cells: np.ndarray) -> np.ndarray:
    """KL(rescore || decode) at every decode row that was also rescored, NaN elsewhere; `[R]`.

    The two rows may list slightly different ids (the reference's own two passes differ in the
    last bits): ids that only one of them lists join its "other".
    """
    place = (recording.segment.astype(np.int64) << 32) | recording.pos
    decode = np.nonzero(recording.phase == DECODE)[0]
    rescore = np.nonzero(recording.phase == RESCORE)[0]
    _, first, second = np.intersect1d(
        place[decode], place[rescore], assume_unique=True, return_indices=True
    )
    decode, rescore = decode[first], rescore[second]
    result = np.full(len(place), np.nan)
    usable = np.isfinite(cells[decode]).all(axis=1) & np.isfinite(cells[rescore]).all(axis=1)
    decode, rescore = decode[usable], rescore[usable]
    ids = recording.top_ids
    same = np.all(ids[decode] == ids[rescore], axis=1)
    result[decode[same]] = metrics.kl_divergence(cells[rescore[same]], cells[decode[same]])
    for row, other in zip(decode[~same], rescore[~same], strict=True):
        _, i, j = np.intersect1d(ids[other], ids[row], return_indices=True)
        p, q = (
            np.append(side[common], np.logaddexp.reduce(np.delete(side, common)))
            for side, common in ((cells[other], i), (cells[row], j))
        )
        result[row] = metrics.kl_divergence(p[None], q[None])[0]
    return result


def _digest(recording: Recording) -> str:
    """SHA-256 of every recorded value in row order, whatever the recording was made of."""
    digest = hashlib.sha256()
    for name in _VALUES:
        values = np.ascontiguousarray(getattr(recording, name))
        digest.update(f"{name} {values.dtype.str} {values.shape}".encode())
        digest.update(values.data)
    return digest.hexdigest()

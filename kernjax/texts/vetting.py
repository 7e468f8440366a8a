"""Whether a corpus can carry a verdict: from its tokens, and from a recording made on it.

The thresholds come from real recordings of natural text and of random tokens: mass outside the
top 20 is 0.03 on natural text and 0.8 on random tokens; margins below 0.1 are 0.5 % and 12-16 % of
positions; margins below 1 are 25 % and 80 %. An untrained model stands at 98 % of the maximum
entropy.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from kernjax.base.errors import UserError
from kernjax.texts.segments import Corpus, Segment

ENOUGH_SEGMENTS = 16  # per kind and depth, for an interval over segments
_WINDOW = 32  # tokens in a row that two texts do not share by chance
_OTHER_WARN, _OTHER_REFUSE = 0.2, 0.4
_LOOPING = 1 / 8  # of a stratum's segments: more of them leave too few that say something
_PREFILL, _DECODE = 0, 1


@dataclasses.dataclass(frozen=True)
class Remark:
    """One thing found. A refusal says that no verdict on this corpus would mean anything."""

    name: str
    is_refusal: bool
    text: str


@dataclasses.dataclass(frozen=True)
class Profile:
    """What the reference's distributions look like in one stratum (natural units, nats)."""

    kind: str
    context_len: int
    segments: int
    rows: int
    other_mean: float
    entropy_median: float
    margin_quartiles: tuple[float, float, float]
    near_ties: float  # share of rows with margin below 0.1
    undecided: float  # share of rows with margin below 1


def vet_tokens(corpus: Corpus) -> list[Remark]:
    """Remarks on the tokens alone: thin strata, missing depths, shared text, text in a loop."""
    remarks = []
    thin = [
        f"{kind} at {context_len} ({len(segments)})"
        for (kind, context_len), segments in corpus.strata().items()
        if len(segments) < ENOUGH_SEGMENTS
    ]
    if thin:
        text = f"fewer than {ENOUGH_SEGMENTS} independent segments: {', '.join(thin)}."
        remarks.append(Remark("thin", False, text))
    remarks += _vet_depths(corpus)
    windows = [_windows(segment.tokens) for segment in corpus.segments]
    shared = _shared(windows)
    looping: dict[tuple[str, int], list[float]] = {}
    for segment, hashes, is_shared in zip(corpus.segments, windows, shared, strict=True):
        if not len(hashes):
            continue
        share = float(is_shared.mean())
        if share > 0.1:
            text = (
                f"{share:.0%} of segment {segment.id!r} also stands in other segments: they are "
                "not independent."
            )
            remarks.append(Remark("shared", share > 0.5, text))
        scored = hashes[max(0, segment.context_len + 1 - _WINDOW) :]
        repeats = 1.0 - len(np.unique(scored)) / len(scored)
        looping.setdefault((segment.kind, segment.context_len), []).append(repeats)
        if repeats > 0.25:
            text = (
                f"{repeats:.0%} of the scored tokens of segment {segment.id!r} repeat themselves: "
                "the text runs in a loop."
            )
            remarks.append(Remark("loop", False, text))
    for (kind, context_len), shares in looping.items():
        count = sum(share > 0.5 for share in shares)
        if count > _LOOPING * len(shares):
            text = (
                f"{count} of {len(shares)} segments of {kind} at {context_len} run in a loop:"
                f" expected at most {_LOOPING:.0%}."
            )
            remarks.append(Remark("loops", True, text))
    return remarks


def vet_recording(corpus: Corpus, recording: Any) -> tuple[list[Remark], list[Profile]]:
    """Remarks on a recording's rows, and the profile of each stratum.

    `recording` has the arrays of `kernjax.load_recording`: over rows `segment`, `pos`, `phase`,
    `top_ids`, `top_logprobs`, `tail_logprob`, `target_ids`, `margins`, and `manifest`. Raises
    UserError when it was made on another corpus.
    """
    made_on = recording.manifest.get("corpus", {})
    if made_on.get("sha256") != corpus.sha256:
        raise UserError(
            f"The recording was made on corpus {made_on.get('name')!r} "
            f"({str(made_on.get('sha256'))[:12]}).",
            f"Expected {corpus.name!r} ({corpus.sha256[:12]}).",
            "Name the corpus it was made on.",
        )
    rows = _Rows(corpus, recording)
    remarks = [*_vet_values(rows), *_vet_coverage(rows)]
    if any(remark.is_refusal for remark in remarks):
        return remarks, []
    remarks += _vet_repeats(rows)
    profiles = []
    for (kind, context_len), segments in corpus.strata().items():
        chosen = np.isin(rows.segment, [rows.index[segment.id] for segment in segments])
        profile = _profile(rows, chosen, kind, context_len, len(segments))
        profiles.append(profile)
        remarks += _vet_profile(profile, rows, chosen)
    return remarks, profiles


def _vet_depths(corpus: Corpus) -> list[Remark]:
    depths: dict[str, set[int]] = {}
    for kind, context_len in corpus.strata():
        depths.setdefault(kind, set()).add(context_len)
    every = set().union(*depths.values())
    if len(every) == 1:
        text = f"one depth only ({min(every)}): growth with the context cannot be seen."
        return [Remark("depths", False, text)]
    lacking = [
        f"{kind} at {', '.join(map(str, sorted(every - own)))}"
        for kind, own in depths.items()
        if every - own
    ]
    text = f"depths that other kinds have are missing: {'; '.join(lacking)}."
    return [Remark("depths", False, text)] if lacking else []


class _Rows:
    """A recording's rows in float64, beside the corpus's segments."""

    def __init__(self, corpus: Corpus, recording: Any) -> None:
        self.segments = corpus.segments
        self.index = {segment.id: index for index, segment in enumerate(corpus.segments)}
        self.segment = np.asarray(recording.segment)
        self.pos = np.asarray(recording.pos)
        self.phase = np.asarray(recording.phase)
        self.top_ids = np.asarray(recording.top_ids)
        self.top = np.asarray(recording.top_logprobs, np.float64)
        self.tail = np.asarray(recording.tail_logprob, np.float64)
        self.target_ids = np.asarray(recording.target_ids)
        self.margins = np.asarray(recording.margins, np.float64)
        self.vocab_size = recording.manifest.get("model", {}).get("vocab_size")

    def of(self, index: int, phase: int) -> np.ndarray:
        """Positions of a segment's rows in one phase."""
        return self.pos[(self.segment == index) & (self.phase == phase)]


def _vet_values(rows: _Rows) -> list[Remark]:
    remarks = []
    # The tail may be empty (-inf) where the top holds all the mass; nothing else may be infinite.
    bad = ~np.isfinite(rows.top).all(1) | ~np.isfinite(rows.margins)
    bad |= np.isnan(rows.tail) | (rows.tail == np.inf)
    if bad.any():
        text = f"{int(bad.sum())} of {len(bad)} rows hold values that are not finite."
        return [Remark("non-finite", True, text)]
    mass = np.exp(rows.top).sum(1) + np.exp(rows.tail)
    if len(mass) and (worst := float(np.abs(mass - 1).max())) > 1e-3:
        text = f"The top 20 and the tail sum to 1 only within {worst:.1e}."
        remarks.append(Remark("mass", True, text))
    return remarks


def _vet_coverage(rows: _Rows) -> list[Remark]:
    remarks = []
    missing: list[Segment] = []
    for index, segment in enumerate(rows.segments):
        steps = np.arange(segment.context_len, segment.context_len + segment.score_len)
        lacks_step = not np.isin(steps, rows.of(index, _DECODE)).all()
        if lacks_step or segment.context_len - 1 not in rows.of(index, _PREFILL):
            missing.append(segment)
    if missing:
        strata = sorted({(segment.kind, segment.context_len) for segment in missing})
        names = ", ".join(f"{kind} at {depth}" for kind, depth in strata)
        text = (
            f"{len(missing)} of {len(rows.segments)} segments lack decode steps or the prefill's "
            f"last position ({names})."
        )
        remarks.append(Remark("incomplete", True, text))
    limits = np.array([segment.length for segment in rows.segments])
    inside = (rows.pos >= 0) & (rows.pos + 1 < limits[rows.segment])
    wrong = ~inside
    for index, segment in enumerate(rows.segments):
        mine = (rows.segment == index) & inside
        wrong[mine] = segment.tokens[rows.pos[mine] + 1] != rows.target_ids[mine]
    if wrong.any():
        text = f"{int(wrong.sum())} rows have another target than the corpus's next token."
        remarks.append(Remark("targets", True, text))
    return remarks


def _vet_repeats(rows: _Rows) -> list[Remark]:
    table = np.concatenate(
        [rows.phase[:, None], rows.top_ids, rows.top.view(np.int64)], axis=1, dtype=np.int64
    )
    copies = 1.0 - len(np.unique(table, axis=0)) / max(1, len(table))
    if copies > 0.01:
        text = f"{copies:.0%} of the rows are bit for bit those of another position."
        return [Remark("repeated rows", copies > 0.5, text)]
    return []


def _profile(
    rows: _Rows, chosen: np.ndarray, kind: str, context_len: int, segments: int
) -> Profile:
    other = np.exp(rows.tail[chosen])
    margins = rows.margins[chosen]
    low, middle, high = np.quantile(margins, (0.25, 0.5, 0.75))
    return Profile(
        kind,
        context_len,
        segments,
        int(chosen.sum()),
        float(other.mean()),
        float(np.median(_entropy(rows, chosen))),
        (float(low), float(middle), float(high)),
        float((margins < 0.1).mean()),
        float((margins < 1.0).mean()),
    )


def _entropy(rows: _Rows, chosen: np.ndarray) -> np.ndarray:
    """Entropy of the 21 cells (top 20 and other), in nats: at most the full distribution's."""
    logs = np.concatenate([rows.top[chosen], rows.tail[chosen, None]], axis=1)
    return -np.sum(np.exp(logs) * np.where(np.isfinite(logs), logs, 0.0), axis=1)


def _vet_profile(profile: Profile, rows: _Rows, chosen: np.ndarray) -> list[Remark]:
    where = f"{profile.kind} at {profile.context_len}"
    remarks = []

    def remark(name: str, is_refusal: bool, text: str) -> None:
        remarks.append(Remark(name, is_refusal, f"{where}: {text}"))

    if profile.other_mean > _OTHER_WARN:
        remark(
            "other",
            profile.other_mean > _OTHER_REFUSE,
            f"a mean mass of {profile.other_mean:.2f} lies outside the top 20, where a comparison "
            f"is blind (at most {_OTHER_WARN} is good, above {_OTHER_REFUSE} it is no basis).",
        )
    if rows.vocab_size:
        rest = max(1, rows.vocab_size - rows.top_ids.shape[1])
        upper = _entropy(rows, chosen) + np.exp(rows.tail[chosen]) * math.log(rest)
        if upper.mean() > 0.95 * math.log(rows.vocab_size):
            text = "the distributions are nearly uniform: the model knows nothing of this text."
            remark("uniform", True, text)
    if profile.near_ties > 0.1:
        text = f"{profile.near_ties:.0%} of the positions are near ties (margin below 0.1)."
        remark("near ties", False, text)
    if profile.undecided > 0.75:
        text = f"{profile.undecided:.0%} of the margins are below 1, as on random tokens."
        remark("margins", False, text)
    margins = rows.margins[chosen]
    if len(margins) >= 16 and (np.mod(margins * 64, 1) == 0).mean() > 0.9:
        text = "the margins are multiples of 1/64: the logits were rounded to 16 bits."
        remark("rounded logits", False, text)
    return remarks


def _windows(tokens: np.ndarray) -> np.ndarray:
    """Hash uint64 of every `_WINDOW` tokens in a row, [len - _WINDOW + 1] (empty when shorter)."""
    count = len(tokens) - _WINDOW + 1
    if count < 1:
        return np.empty(0, np.uint64)
    factor = np.uint64(0x9E3779B97F4A7C15)
    hashes = np.zeros(count, np.uint64)
    for offset in range(_WINDOW):
        hashes = hashes * factor + (
            tokens[offset : offset + count].astype(np.uint64) + np.uint64(1)
        )
        hashes ^= hashes >> np.uint64(29)
    return hashes


def _shared(windows: list[np.ndarray]) -> list[np.ndarray]:
    """For each segment, which of its windows also occur in another segment."""
    unique = [np.unique(hashes) for hashes in windows]
    values, counts = np.unique(np.concatenate(unique), return_counts=True)
    common = values[counts > 1]
    return [np.isin(hashes, common) for hashes in windows]

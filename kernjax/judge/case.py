"""One candidate before the bench: the comparison, lined up with the band's normals."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from kernjax.base.errors import UserError
from kernjax.judge.band import IN_MEMORY, Band, check_belongs, check_same_subject
from kernjax.judge.comparison import Comparison, Segment
from kernjax.judge.gates import Evidence, Row
from kernjax.judge.summaries import Summary, ratio_statistics, summarise


@dataclass(frozen=True)
class Finding:
    """One thing a person should know: how bad, what, and what to do next (may be empty)."""

    severity: str  # one of SEVERITIES
    text: str
    todo: str = ""
    command: str = ""  # the next command to run


LISTED = 5  # places that a finding names
SEGMENT_STATISTICS = {
    "geometric": "",
    "arithmetic": "",
    "rescore": "rescored",
    "rescore_arithmetic": "rescored",
    "edge_window": "after a prefill window",
    "edge_document": "after a document's start",
    "edge_chunk": "after a chunk",
    "edge_start": "at decode's start",
    "edge_block": "at a block's edge",
    "last": "at the prompt's last position",
}
"""ln R of single segments, as `ratio_statistics` names them, and on which of their rows it is."""

SEVERITIES = ("fail", "inconclusive", "warning", "note")


@dataclass(frozen=True, eq=False)
class Case:
    """What a verdict is made from; the derived parts are on the candidate's own segments."""

    comparison: Comparison
    band: Band
    isolated: Comparison | None = None
    incumbent: Comparison | None = None
    repeat: Comparison | None = None
    deploy_context: int | None = None
    flags: Mapping[str, str] = field(default_factory=dict)  # of the commands that findings name

    def __post_init__(self) -> None:
        for one in (self.comparison, self.incumbent, self.repeat):
            if one is not None:
                check_belongs(one, self.band)
        if self.isolated is not None:  # its reference may be an oracle behind the same casts
            check_same_subject(self.isolated, self.band)
        for one in (self.incumbent, self.repeat):
            if one is not None and one.segments != self.comparison.segments:
                raise UserError(
                    f"{one.candidate_name} covers other segments than "
                    f"{self.comparison.candidate_name}.",
                    "Recordings of one verdict cover the same segments.",
                    "Record both with the same --corpus and --limit.",
                )

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The candidate's segments, all of them known to the band."""
        return self.comparison.segments

    @cached_property
    def rows(self) -> np.ndarray:
        """[R] bool: the rows of the deciding phase."""
        return self.comparison.phase == self.band.level

    @cached_property
    def missing(self) -> tuple[Segment, ...]:
        """The band's segments that the candidate lacks."""
        present = {s.id for s in self.segments}
        return tuple(s for s in self.band.segments if s.id not in present)

    @cached_property
    def twin_producer(self) -> int | None:
        """Index of the normal producer whose every bit the candidate repeats, if any."""
        digests = [producer.get("digest") for producer in self.band.producers]
        digest = self.comparison.candidate_digest
        return digests.index(digest) if digest in digests else None

    @cached_property
    def normals(self) -> list[Summary]:
        """The normals on the candidate's segments; itself is not its own yardstick."""
        return self.normals_on(self.segments)

    def normals_on(self, segments: Sequence[Segment]) -> list[Summary]:
        """The normals' numbers on these segments, in this order."""
        place = {(s.id, s.kind, s.context_len): i for i, s in enumerate(self.band.segments)}
        keys = [(s.id, s.kind, s.context_len) for s in segments]
        if unknown := [key for key in keys if key not in place]:
            raise UserError(
                f"The band does not know segment {unknown[0][0]!r} ({unknown[0][1]}, context "
                f"{unknown[0][2]}).",
                "Normals and candidate are paired segment by segment.",
                "Pass the reference the band was made from, or calibrate again.",
            )
        index = np.array([place[key] for key in keys], dtype=np.int64)
        return [
            normal.take(index)
            for i, normal in enumerate(self.band.normals)
            if i != self.twin_producer
        ]

    @cached_property
    def normals_apart(self) -> dict[str, np.ndarray]:
        """By statistic of SEGMENT_STATISTICS: each normal's ln R against the others, [M, S] over
        the band's segments."""
        normals = self.band.normals
        found = [
            ratio_statistics(normal, [*normals[:i], *normals[i + 1 :]])
            for i, normal in enumerate(normals)
        ]
        return {
            name: np.stack([statistics[name] for statistics in found])
            for name in SEGMENT_STATISTICS
            if all(name in statistics for statistics in found)
        }

    @cached_property
    def subject(self) -> Summary:
        """The candidate, per segment."""
        return summarise(self.comparison, self.band.level)

    @cached_property
    def evidence(self) -> Evidence:
        """The candidate against the normals."""
        return Evidence(self.segments, self.subject, self.normals)

    @cached_property
    def measured(self) -> np.ndarray:
        """[segments] bool: segments with a ratio to normal."""
        return np.isfinite(self.evidence.statistics["geometric"])

    @cached_property
    def depth(self) -> int:
        """The context that every kind of the band was measured to; 0: some kind not at all."""
        deepest = {s.kind: 0 for s in self.band.segments}
        for segment, measured in zip(self.segments, self.measured, strict=True):
            if measured:
                deepest[segment.kind] = max(deepest[segment.kind], segment.context_len)
        return min(deepest.values())

    @cached_property
    def allowed(self) -> dict[tuple[str, str], float]:
        """The allowed ratio of each (kind, mean), all depths: what people call T."""
        return {
            (str(row.kind), row.statistic): row.shown(self.band.limits[row.key].allowed)
            for row in self.band.rows
            if row.gate == "level" and row.context is None
        }

    def level_values(self, kind: str, mean: str) -> np.ndarray:
        """[segments] ln R of one kind, NaN elsewhere."""
        return self.evidence.values(Row("level", "", mean, kind=kind))

    def check_command(self, **flags: str | int) -> str:
        """A `kernjax.check` of this candidate with further flags, ready for a shell."""
        candidate = self._rerun() or [f"--candidate={self.comparison.candidate_name}"]
        return self._command("check", candidate, flags)

    def locate_command(self) -> str:
        """`kernjax.locate` of this candidate; "" where it is known as a recording only."""
        candidate = self._rerun()
        return self._command("locate", candidate, {}) if candidate else ""

    def _rerun(self) -> list[str]:
        """The flags that make this candidate again; none: another engine made it."""
        ours, theirs = self.comparison.candidate_manifest, self.comparison.reference_manifest
        policy = (ours.get("policy") or {}).get("text")
        if not policy or ours.get("engine") not in (None, "jax"):
            return []
        words = [f"--policy={policy}"]
        for op, kernel in sorted((ours.get("kernels") or {}).items()):
            if kernel != (theirs.get("kernels") or {}).get(op) and ":" in str(kernel):
                at = f"@layers={kernel['layers']}" if kernel.get("layers") else ""
                words.append(f"--kernel={op}={kernel.get('name')}{at}")
        return words

    def _command(self, name: str, candidate: list[str], flags: Mapping[str, str | int]) -> str:
        known = {"reference": self.comparison.reference_name, "band": self.band.path}
        if self.band.path == IN_MEMORY:
            del known["band"]
        asked = dict(self.flags)
        if candidate[0].startswith("--candidate"):  # nothing runs
            asked = {key: value for key, value in asked.items() if key in ("model", "corpus")}
        words = [f"--{key}={value}" for key, value in {**known, **asked}.items()]
        words += [*candidate, *(f"--{key}={value}" for key, value in flags.items())]
        return f"python -m kernjax.{name} " + " ".join(shlex.quote(word) for word in words)

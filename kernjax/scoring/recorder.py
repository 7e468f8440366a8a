"""Runs a producer over a corpus and writes the recording, batch by batch, resumable."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kernjax.base.errors import UserError
from kernjax.base.hashing import sha256_json
from kernjax.pods import Pod
from kernjax.recording import (
    Recording,
    RecordingWriter,
    build_manifest,
    identity_diff,
    is_complete,
    load_recording,
)
from kernjax.recording.manifest import complete_manifest, flatten
from kernjax.scoring.batch import RowPlan
from kernjax.scoring.positions import PREFILL, RESCORE, prefill_positions
from kernjax.scoring.producer import Following, JaxProducer, Producer, Shape, check_tokenizer
from kernjax.scoring.routes import ROUTE_GAPS, ROUTE_IDS, TOKEN_ROUTE_IDS, recorded_experts
from kernjax.texts import Corpus, Segment

log = logging.getLogger("kernjax")

EXTRAS = ("hidden_sketch", "logprobs", ROUTE_IDS, ROUTE_GAPS, TOKEN_ROUTE_IDS)


@dataclasses.dataclass(frozen=True)
class Progress:
    """What has been done so far, after each prefill window, decode and batch."""

    batch: int
    batches: int
    tokens: int
    total_tokens: int
    seconds: float
    segment: str | None = None  # set when a batch is complete: its first segment


def limited(corpus: Corpus, limit: int | None) -> Corpus:
    """The first `limit` segments of every kind and depth; the whole corpus for None.

    It keeps the corpus's hash: a part is comparable with a reference made on the whole.
    """
    if limit is None:
        return corpus
    kept = {s.id for segments in corpus.strata().values() for s in segments[:limit]}
    return dataclasses.replace(corpus, segments=tuple(s for s in corpus.segments if s.id in kept))


def record_corpus(
    producer: Producer,
    corpus: Corpus,
    out: str | Path,
    *,
    reference: Recording | None = None,
    experts_of: Recording | None = None,
    batch_size: int = 16,
    rescore: bool = False,
    overwrite: bool = False,
    reuse: bool = False,
    pod: Pod | None = None,
    following: Sequence[Following] = (),
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> str:
    """Scores `corpus` and writes the recording to `out`; its identity.

    With a `reference` the same positions are scored at its ids (its segments must be those of the
    corpus); without one the rows are the producer's own top 20. A run that stopped goes on at the
    batches whose segments are missing; batches are always cut from the whole corpus, so that what
    shares a batch, and with it every bit, does not depend on where a run stopped. `reuse` takes a
    complete recording of the same producer as it is, which otherwise is an error (not in a pod).
    What `following` producers need compiles beside this one's run.

    The processes of a `pod` write one recording. Where the producer lies on devices of all of them,
    they compute every batch together and each writes its share of the segments; otherwise each
    computes, and writes, batches of its own.
    """
    pod = pod or Pod()
    producer.check_corpus(corpus)
    identity = producer.identity()
    check_tokenizer(producer, corpus, identity["tokenizer_sha256"])
    plans = _plans(corpus, producer.policy.prefill_window, rescore, reference)
    if experts_of is not None:
        plans = _with_experts(plans, corpus, experts_of, producer)
        identity["experts_of"] = experts_of.identity
    segments = [
        {**segment.to_dict(), "rows": len(plan.prefill) + segment.score_len * (1 + plan.rescore)}
        for segment, plan in zip(corpus.segments, plans, strict=True)
    ]
    manifest = build_manifest(
        **identity,
        corpus={"name": corpus.name, "sha256": corpus.sha256},
        batch_size=batch_size,
        reference=None if reference is None else reference.identity,
    )
    if pod.count > 1:
        pod.check_same(
            "inputs",
            flatten(manifest) | {"segments": sha256_json(segments), "--out": str(out)},
            "Give every host the same files, versions and devices.",
        )
        # A host may be lost after the last segment, and all are started again.
        reuse = not overwrite
    if reuse:
        existing = pod.broadcast("complete", lambda: _existing(out, manifest, segments))
        if existing is not None:
            if pod.count > 1 and pod.is_first:
                log.info("%s is complete already, made of these inputs: nothing was computed", out)
            return existing
    writer, missing = _open(pod, out, manifest, segments, overwrite)
    batches = [b for b in _batches(corpus.segments, batch_size) if missing & set(b)]
    together = getattr(producer, "spans_hosts", False)
    if not together:
        batches = list(pod.share(batches))
    total = sum(corpus.segments[i].length - 1 for batch in batches for i in batch)
    done, began = 0, time.monotonic()
    with producer.compiling(_shapes(corpus, plans, batches), following):
        for number, batch in enumerate(batches):
            chosen = [corpus.segments[i] for i in batch]

            def advanced(tokens: int, number: int = number, width: int = len(batch)) -> None:
                nonlocal done
                done += tokens * width
                seconds = time.monotonic() - began
                on_progress(Progress(number, len(batches), done, total, seconds))

            scored = producer.score(
                np.stack([segment.tokens for segment in chosen]),
                chosen[0].context_len,
                [plans[i] for i in batch],
                advanced,
            )
            pairs = list(zip(batch, scored, strict=True))
            for index, rows in pod.share(pairs) if together else pairs:
                extras = {name: rows.pop(name) for name in EXTRAS if name in rows}
                # Segments that were there already are compared: a producer that changed is refused.
                writer.write(index, rows, extras or None)
            seconds = time.monotonic() - began
            on_progress(Progress(number + 1, len(batches), done, total, seconds, chosen[0].id))
    pod.barrier("all is written")
    return pod.broadcast("identity", writer.finish)


def shapes_at(corpus: Corpus, window: int, reference: Recording, batch_size: int) -> list[Shape]:
    """What `record_corpus` will score of `corpus` at the ids of `reference`."""
    plans = _plans(corpus, window, False, reference)
    return _shapes(corpus, plans, _batches(corpus.segments, batch_size))


def _shapes(corpus: Corpus, plans: Sequence[RowPlan], batches: Iterable[list[int]]) -> list[Shape]:
    firsts = ((batch, corpus.segments[batch[0]]) for batch in batches)
    return [
        (len(batch), first.context_len, first.score_len, [plans[i] for i in batch])
        for batch, first in firsts
    ]


def _existing(
    out: str | Path, manifest: dict[str, Any], segments: Sequence[dict[str, Any]]
) -> str | None:
    """The identity of a complete recording of the same producer at `out`; None where none is."""
    if not is_complete(out):
        return None
    existing = load_recording(out)
    same = not identity_diff(existing.manifest, complete_manifest(manifest, segments))
    return existing.identity if same else None


def _open(
    pod: Pod,
    out: str | Path,
    manifest: dict[str, Any],
    segments: Sequence[dict[str, Any]],
    overwrite: bool,
) -> tuple[RecordingWriter, set[int]]:
    """A writer, and the segments that were missing when the first process opened it."""
    if pod.count == 1:
        writer = RecordingWriter.open_or_create(out, manifest, segments, overwrite)
        return writer, set(writer.missing())
    if pod.is_first:
        writer = RecordingWriter.open_or_create(out, manifest, segments, overwrite)
        ticket = pod.broadcast("ticket", writer.issue_ticket)
    else:
        ticket = pod.broadcast("ticket", dict)
        writer = RecordingWriter.join(out, manifest, segments, ticket)
    pod.barrier("all have joined")
    if pod.is_first:
        writer.void_ticket()
    return writer, set(pod.broadcast("missing segments", writer.missing))


def _plans(
    corpus: Corpus, window: int, rescore: bool, reference: Recording | None
) -> list[RowPlan]:
    if reference is None:
        return [
            RowPlan(prefill_positions(s.context_len, window, s.documents), rescore)
            for s in corpus.segments
        ]
    _check_same_segments(corpus, reference)
    plans = []
    for segment in corpus.segments:
        rows = reference.rows_of(segment.id)
        phase = reference.phase[rows]
        prefill = reference.pos[rows][phase == PREFILL]
        plans.append(RowPlan(prefill, bool((phase == RESCORE).any()), reference.top_ids[rows]))
    return plans


def _with_experts(
    plans: list[RowPlan], corpus: Corpus, recording: Recording, producer: Producer
) -> list[RowPlan]:
    """The plans, tokens sent to the experts that they went to in `recording`."""
    if not isinstance(producer, JaxProducer):
        raise UserError(
            "Only kernjax's own model can be sent to given experts.", todo="Drop --force_routes."
        )
    _check_same_segments(corpus, recording)
    return [
        dataclasses.replace(plan, experts=recorded_experts(recording, segment.id, producer.config))
        for plan, segment in zip(plans, corpus.segments, strict=True)
    ]


def _check_same_segments(corpus: Corpus, reference: Recording) -> None:
    if reference.manifest["corpus"]["sha256"] != corpus.sha256:
        raise UserError(
            f"Recording {reference.path} was made from corpus"
            f" {reference.manifest['corpus']['sha256'][:12]} but --corpus is {corpus.sha256[:12]}:"
            " positions do not correspond.",
            todo="Pass the corpus (and --limit) it was made from, or record the reference anew.",
        )


def _batches(segments: Sequence[Segment], size: int) -> Iterator[list[int]]:
    """Indices of segments that share context and decode length, in groups of at most `size`."""

    def shape(index: int) -> tuple[int, int]:
        return segments[index].context_len, segments[index].score_len

    for _, group in itertools.groupby(sorted(range(len(segments)), key=shape), key=shape):
        indices = list(group)
        yield from (indices[at : at + size] for at in range(0, len(indices), size))

"""What the gates' means conceal: segments or cells far off, worse beside better, unlisted words."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from kernjax.judge import metrics
from kernjax.judge.case import LISTED, SEGMENT_STATISTICS, Case, Finding
from kernjax.judge.comparison import PHASES, RESCORE
from kernjax.judge.gates import Gate, Outcome
from kernjax.judge.limits import each_against_others
from kernjax.judge.quantiles import t_quantile

_SEGMENT_MARGIN = 2.0
_LEAST_SEGMENT = math.log(1.25)
"""On ln R: how far beyond the normals' largest segment one has to be, and the least that counts."""

_PERIODS = 2 ** np.arange(1, 8)
_MAX_DEVIATION, _LEAST_CLASS = 6.0, 16
"""Standard errors by which a decode step, or a place in every so many positions, may lie off the
others (3.5 at most for 18 right policies of the demo), and the fewest rows that tell it."""

_CELL_ALARM = 0.01
"""The chance that one more normal run has any cell beyond what is expected of it."""

_MAX_UNLISTED, _LEAST_UNLISTED = 2.0, 50
"""Change of unlisted words over that of listed ones (0.5 to 1.2 for 24 policies of the demo, right
or wrong), and the fewest positions that tell it."""


def findings(case: Case, gates: Sequence[Gate]) -> list[Finding]:
    """All of them."""
    return [
        *single_segments(case, gates),
        *single_cells(case, gates),
        *single_steps(case),
        *unlisted_words(case),
    ]


def single_segments(case: Case, gates: Sequence[Gate]) -> Iterator[Finding]:
    """Segments beyond anything that normal runs do, while the mean over segments hides them.

    A stale slot shows in single segments, and a mean over all is kind to it. And a segment that is
    the reference to the last bit, among others that are not, was not made by the candidate: it
    only makes the mean smaller.
    """
    c = case.comparison
    if any(gate.outcome is Outcome.FAIL for gate in gates):
        return
    worst: dict[int, tuple[float, str]] = {}
    for name, normals in case.normals_apart.items():
        values = case.evidence.statistics.get(name)
        if values is not None:
            limit = max(_SEGMENT_MARGIN * float(np.nanmax(normals)), _LEAST_SEGMENT)
            for index in np.nonzero(values > limit)[0]:
                found = float(values[index]), SEGMENT_STATISTICS[name]
                worst[index] = max(worst.get(index, found), found)
    if worst:
        first = sorted(worst, key=lambda index: -worst[index][0])
        listed = "; ".join(
            f"{case.segments[i].id} {math.exp(ratio):.3g} {place}".rstrip()
            for i in first[:LISTED]
            for ratio, place in (worst[i],)
        )
        yield Finding(
            "inconclusive",
            f"{len(worst)} of {len(case.segments)} segments have a KL that no normal run comes "
            f"near in any segment, whatever the mean over all; times normal: {listed}.",
            "A stale state or slot shows in single segments: run these again, alone and in "
            "another order.",
        )
    yield from _offset_segments(case)
    rows = np.nonzero(case.rows)[0]
    differs = np.bincount(c.segment[rows], c.kl[rows] != 0, minlength=len(case.segments)) > 0
    normal = np.min([n.mean_log["level"] for n in case.normals], axis=0) > math.log(
        metrics.KL_FLOOR
    )
    dead = np.nonzero(~differs & normal)[0]
    if dead.size and differs.any():
        yield Finding(
            "inconclusive",
            f"{dead.size} of {len(case.segments)} segments equal the reference to the last bit, "
            f"the others do not; the first: {case.segments[dead[0]].id}.",
            "Another producer wrote them: record the candidate again, as a whole.",
        )


def single_cells(case: Case, gates: Sequence[Gate]) -> Iterator[Finding]:
    """A kind and depth that is far off where a gate has one mean over several of them.

    The cells of one row are of one noise: what a normal run's cell mean is, against the other
    normals, has one spread over all cells and normals, by which the largest cell of a candidate is
    judged, corrected for all the cells of all such rows. Level and rescored rows have a gate row of
    their own for each depth; growth is judged by what it grows to.
    """
    if any(gate.outcome is Outcome.FAIL for gate in gates):
        return
    pairs = sorted({(s.kind, s.context_len) for s in case.segments})
    cell = np.array([pairs.index((s.kind, s.context_len)) for s in case.segments])
    normals = each_against_others(case.segments, case.normals)
    pooled = {}
    for row in case.band.rows:
        if row.contrast == "mean" and row.mean is None and row.gate != "growth_decode":
            own = _cell_means(case.evidence.values(row), cell)
            others = np.stack([_cell_means(normal.values(row), cell) for normal in normals])
            known = np.isfinite(own) & np.isfinite(others).all(axis=0)
            if known.sum() > 1:
                places = [pair for pair, usable in zip(pairs, known, strict=True) if usable]
                pooled[row] = places, own[known], others[:, known]
    tests = sum(row.sides * len(places) for row, (places, _, _) in pooled.items())
    for row, (places, own, others) in pooled.items():
        count, centre = len(others), float(others.mean())
        df = (count - 1) * len(places)
        spread = math.sqrt(float(np.sum((others - others.mean(axis=0)) ** 2)) / df)
        if row.statistic != "self":  # there a normal is measured against all, not the others
            spread *= (count - 1) / count
        reach = t_quantile(1 - _CELL_ALARM / tests, df) * spread * math.sqrt(1 + 1 / count)
        # What the gate allows everywhere is allowed in one place.
        reach = max(reach, case.band.limits[row.key].allowed - centre)
        excess = own - centre if row.sides == 1 else np.abs(own - centre)
        worst = int(excess.argmax())
        if excess[worst] > reach:
            kind, context = places[worst]
            limit = centre + math.copysign(reach, own[worst] - centre)
            yield Finding(
                "inconclusive",
                f"Gate {row.gate} ({row.stratum}) is one mean over {len(places)} kinds and depths: "
                f"on {kind} at context {context} it is {row.shown(float(own[worst])):.4g}, and no "
                f"normal run is expected beyond {row.shown(limit):.4g} in any of them.",
                "Look at what is different there: a length, or a kind of text, that takes another "
                "path.",
            )


def _cell_means(values: np.ndarray, cell: np.ndarray) -> np.ndarray:
    """[cells] mean of the finite values, NaN where there are none."""
    inside = np.isfinite(values)
    count = np.bincount(cell[inside], minlength=cell.max() + 1)
    total = np.bincount(cell[inside], values[inside], minlength=cell.max() + 1)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def unlisted_words(case: Case) -> Iterator[Finding]:
    """The words outside the recorded ids, which are one cell of the KL: is each where it was?

    Noise moves all logits alike, so that the corpus's token, where it is none of the listed ids,
    moves as much as listed words do there; those of a wrong shard of the output head do not.
    """
    c = case.comparison
    if c.unlisted is None or c.upper is not None:
        return
    change = np.abs(c.candidate_target - c.reference_target)
    kinds = np.array([s.kind for s in case.segments])[c.segment]
    for kind in sorted(set(kinds.tolist())):
        rows = np.nonzero((kinds == kind) & c.finite & c.unlisted)[0]
        noise = metrics.logit_noise(c.margin_change[rows])
        moved = math.sqrt(float(np.mean(change[rows] ** 2))) if rows.size else 0.0
        if rows.size >= _LEAST_UNLISTED and moved > _MAX_UNLISTED * noise:
            worst = rows[np.argmax(change[rows])]
            yield Finding(
                "inconclusive",
                f"On {kind} the log-probability of {rows.size} corpus tokens outside the recorded "
                f"ids moves by {moved:.3g}, that of the listed words by {noise:.3g} (rms), and "
                f"noise moves both alike; most in segment {c.segments[c.segment[worst]].id}, "
                f"position {c.pos[worst]}: by {change[worst]:.3g}.",
                "The KL sees these words as one: look at the output head's rows and its shards, "
                "or record both with --full_vocabulary.",
            )


def single_steps(case: Case) -> Iterator[Finding]:
    """Decode steps, and places in a page of keys, whose KL is unlike that of all others.

    A fault of one step, or of every sixteenth position, moves the mean over 128 steps little, and
    faults of both signs not at all. ln KL less its segment's mean has no reason to depend on the
    step; the same step of all segments, or the same place of all pages, is one class.
    """
    c = case.comparison
    for phase in (case.band.level, RESCORE):
        rows = np.nonzero((c.phase == phase) & c.finite)[0]
        if not rows.size:
            continue
        segment, position = c.segment[rows], c.pos[rows]
        values = np.log(np.maximum(c.kl[rows], metrics.KL_FLOOR))
        values = (
            values - (np.bincount(segment, values) / np.maximum(np.bincount(segment), 1))[segment]
        )
        spread = float(values.std())
        contexts = np.array([s.context_len for s in case.segments])
        step = position - contexts[segment]
        classes = [("step {}", step - step.min())]
        classes += [(f"positions {{}} of every {period}", position % period) for period in _PERIODS]
        worst = (0.0, "", 1.0)
        for name, numbers in classes:
            count = np.bincount(numbers)
            mean = np.bincount(numbers, values) / np.maximum(count, 1)
            off = np.where(count >= _LEAST_CLASS, np.abs(mean) * np.sqrt(count), 0.0)
            place = int(off.argmax())
            if spread and off[place] / spread > worst[0]:
                worst = off[place] / spread, name.format(place), math.exp(mean[place])
        if worst[0] > _MAX_DEVIATION:
            yield Finding(
                "inconclusive",
                f"The {PHASES[phase]} rows at {worst[1]} have {worst[2]:.3g} times the KL of the "
                f"others, {worst[0]:.3g} standard errors off: the KL of a right producer does not "
                "go by the step.",
                "Look at what the kernel does there: a page's or a block's first or last key, a "
                "step that rescales or flushes.",
            )


def _offset_segments(case: Case) -> Iterator[Finding]:
    """Segments that are worse than allowed, which others, better than normal, make up for.

    The mean of ln R with every segment that is better than normal taken as normal, over the same of
    the normal producers: for any candidate that is alike in all segments no more than ln R.
    """
    for row in case.band.rows:
        if row.mean is None or row.context is not None:
            continue
        values = case.evidence.values(row)
        if not np.isfinite(values).any():
            continue
        inside = np.array([segment.kind == row.kind for segment in case.band.segments])
        own, normal = (
            float(np.nanmean(np.maximum(v, 0.0)))
            for v in (values, case.normals_apart[row.statistic][:, inside])
        )
        allowed = case.band.limits[row.key].allowed
        if own - normal > allowed and float(np.nanmean(values)) < allowed:
            share = float(np.mean(values[np.isfinite(values)] > allowed))
            yield Finding(
                "inconclusive",
                f"On {row.kind} ({row.stratum}) {share:.0%} of the segments are above the "
                f"{row.shown(allowed):.4g} allowed, and others better than normal make up for "
                f"them: without these the mean would be {math.exp(own - normal):.4g}.",
                "Two code paths ran: find out what the segments of each have in common.",
            )
            return

"""Which layers carry a change: a search by substitution, and shares of the whole effect.

The effect of putting the candidate into some layers only is the mean KL between the base's
distributions and the substituted run's. Independent errors add in KL, so a layer's share is its
effect over the whole candidate's; errors that are correlated or cancel make shares add up to more
or less than one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kernjax.judge import metrics

Effect = Callable[[tuple[int, ...]], float]


@dataclass(frozen=True)
class Part:
    """The candidate in these layers only: its mean KL, and the share of the whole one's."""

    layers: tuple[int, ...]
    kl: float
    share: float


@dataclass(frozen=True)
class Place:
    """Where an effect first shows: the segment, the position in it, and the KL there."""

    segment: str
    pos: int
    kl: float


def search(
    layers: Sequence[int], total: float, effect: Effect, share: float, full_map: bool = False
) -> list[Part]:
    """Parts of `layers` with their effects, in order of the layers.

    By halves: a part with at least `share` of `total` is cut in two until it is one layer, others
    are left whole. `full_map` gives every layer.
    """
    if full_map:
        return [_part((layer,), total, effect) for layer in layers]
    found: list[Part] = []

    def descend(part: Part) -> None:
        if len(part.layers) == 1 or part.share < share:
            found.append(part)
            return
        middle = len(part.layers) // 2
        halves = part.layers[:middle], part.layers[middle:]
        for half in halves:
            descend(_part(half, total, effect))

    if layers:
        descend(_part(tuple(layers), total, effect))
    return found


def share_of(kl: float, total: float) -> float:
    """kl / total; where the whole is not finite, whether the part is not finite either."""
    if not math.isfinite(total):
        return 0.0 if math.isfinite(kl) else 1.0
    return kl / total if total > 0 else 0.0


def mean_kl(base: np.ndarray, subject: np.ndarray) -> float:
    """Mean KL(base || subject) over rows of raw cells [R, K + 1]; inf where any is not finite."""
    kl = row_kl(base, subject)
    return float(kl.mean()) if np.isfinite(kl).all() else math.inf


def row_kl(base: np.ndarray, subject: np.ndarray) -> np.ndarray:
    """KL(base || subject) [R] of raw cells (log-probabilities of ids and tail) [R, K + 1]."""
    finite = np.isfinite(subject).all(axis=1)
    kl = np.full(len(base), np.inf)
    same = np.all(base == subject, axis=1)
    kl[finite] = metrics.kl_divergence(metrics.cells(base[finite]), metrics.cells(subject[finite]))
    kl[same] = 0.0
    return kl


def first_place(
    kl: np.ndarray, segment: np.ndarray, pos: np.ndarray, names: Sequence[str], limit: float
) -> Place | None:
    """The row of the smallest position whose KL is above `limit`, ties by segment."""
    rows = np.nonzero(kl > limit)[0]
    if not rows.size:
        return None
    row = rows[np.lexsort((segment[rows], pos[rows]))[0]]
    return Place(names[int(segment[row])], int(pos[row]), float(kl[row]))


def first_position(error: np.ndarray, share: float = 0.1) -> int | None:
    """The first position whose error is at least `share` of the largest; None: no error at all."""
    error = np.where(np.isfinite(error), error, np.inf)
    largest = float(error.max(initial=0.0))
    if not largest > 0:
        return None
    limit = largest * share if math.isfinite(largest) else math.inf
    return int(np.argmax(error >= limit))


def _part(layers: tuple[int, ...], total: float, effect: Effect) -> Part:
    kl = effect(layers)
    return Part(layers, kl, share_of(kl, total))


@dataclass(frozen=True)
class SiteShare:
    """One of the candidate's changes at all the layers that run it, the others left out."""

    name: str
    change: str
    layers: tuple[int, ...]
    kl: float
    share: float


@dataclass(frozen=True)
class Cell:
    """One change at one layer: its part of the effect, and its error on the base's own inputs.

    Errors are relative to the layer's update; None where a phase was not run. `first_pos` is the
    first position with at least a tenth of the largest error.
    """

    layer: int
    kind: str
    op: str
    site: str
    change: str
    kl: float
    share: float
    prefill_median: float | None
    prefill_max: float | None
    decode_median: float | None
    decode_max: float | None
    first_pos: int | None
    segment: str


@dataclass(frozen=True)
class Attribution:
    """What was found; `located` where one cell (or what lies outside the layers) has half of it."""

    total: float  # mean KL of the whole candidate
    sites: tuple[SiteShare, ...]
    parts: tuple[Part, ...]
    cells: tuple[Cell, ...]  # largest share first
    outside: tuple[str, ...]  # changes outside the layers
    outside_share: float
    first: Place | None
    runs: int
    located: bool
    sentence: str


HALF = 0.5


def conclude(
    total: float,
    sites: Sequence[SiteShare],
    parts: Sequence[Part],
    cells: Sequence[Cell],
    outside: Sequence[str],
    inside_kl: float,
    first: Place | None,
    runs: int,
) -> Attribution:
    """The attribution in a sentence. `inside_kl`: the whole candidate inside the layers alone."""
    cells = sorted(cells, key=lambda cell: -cell.share)
    beyond = 1.0 - share_of(inside_kl, total) if outside and total > 0 else 0.0
    located = True
    if total == 0:
        located, sentence = False, "The candidate changes no recorded bit of these segments."
    elif beyond >= HALF:
        sentence = (
            f"What lies outside the layers ({', '.join(outside)}) carries {_per_cent(beyond)} of "
            f"the change (KL {total:.2g} nats)."
        )
    elif cells and cells[0].share >= HALF:
        sentence = _cell_sentence(cells[0], total)
    else:
        located, sentence = False, _spread_sentence(total, sites, parts)
    if first is not None:
        sentence += f" It first shows at position {first.pos} of {first.segment}."
    return Attribution(
        total, tuple(sites), tuple(parts), tuple(cells), tuple(outside), beyond, first, runs,
        located, sentence,
    )  # fmt: skip


def _cell_sentence(cell: Cell, total: float) -> str:
    errors = [e for e in (cell.prefill_median, cell.decode_median) if e is not None]
    local = f"; its local error is {max(errors):.2g} of the layer's update" if errors else ""
    where = "" if cell.first_pos is None else f", from position {cell.first_pos} on"
    return (
        f"Layer {cell.layer} ({cell.kind}), op {cell.op}, {cell.change}: "
        f"{_per_cent(cell.share)} of the change (KL {cell.kl:.2g} of {total:.2g} nats)"
        f"{local}{where}."
    )


def _spread_sentence(total: float, sites: Sequence[SiteShare], parts: Sequence[Part]) -> str:
    layers = sorted(parts, key=lambda part: -part.share / len(part.layers))[:3]
    largest = ", ".join(f"{layers_label(p.layers)} ({_per_cent(p.share)})" for p in layers)
    count = sum(len(part.layers) for part in parts)
    text = (
        f"No single layer carries half of the change (KL {total:.2g} nats); it is spread over "
        f"{count} layers, the largest parts: {largest}."
    )
    if len(sites) > 1:
        top = max(sites, key=lambda site: site.share)
        text += f" Of the sites {top.change} carries most, {_per_cent(top.share)}."
    return text


def layers_label(layers: Sequence[int]) -> str:
    """`layer 3`, `layers 0-5` or `layers 0,2,4`."""
    if len(layers) == 1:
        return f"layer {layers[0]}"
    if list(layers) == list(range(layers[0], layers[-1] + 1)):
        return f"layers {layers[0]}-{layers[-1]}"
    return f"layers {','.join(map(str, layers))}"


def _per_cent(share: float) -> str:
    return f"{100 * share:.0f} %"

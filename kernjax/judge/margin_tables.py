"""The tables a band keeps so that its flip margins can be computed again without the normals.

`flip_limits` finds two margins in the recordings: the largest at which a normal run flipped, and
the one from which on a flip counts as confident. One number in a file is believed or not; these
are bounded by three counts a kind of text, each over the bins of a fixed grid of margins:

    rows      the reference's rows whose margin lies in the bin
    changes   changes of the margin at these rows, over all normals, by their size
    flips     rows at which a normal flipped, over all normals, by the margin

all of them from the near ties' edge on. A count says where a margin lies to one bin, 4 %, and so
the confident margin to a few.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kernjax.judge.comparison import Comparison
from kernjax.judge.limits import CONFIDENT_EXPECTED
from kernjax.judge.metrics import MARGIN_EDGES

_PER_DOUBLING, _DOUBLINGS = 16, 10
GRID = float(MARGIN_EDGES[1]) * 2.0 ** (np.arange(_PER_DOUBLING * _DOUBLINGS + 1) / _PER_DOUBLING)
"""Lower edges of the bins, 0.05 to 51.2; the last one is open."""

COUNTS = ("rows", "changes", "flips")

_ORDER = 1e-9


def margin_tables(normals: Sequence[Comparison]) -> dict[str, dict[str, list[int]]]:
    """By kind of text: the counts of COUNTS by bin of GRID, trailing zeros left out."""
    first = normals[0]
    kinds = np.array([s.kind for s in first.segments])[first.segment]
    tables = {}
    for kind in sorted(set(kinds.tolist())):
        rows = (kinds == kind) & (first.margin > MARGIN_EDGES[1])
        changes = np.concatenate([c.margin_change[rows] for c in normals])
        flips = np.concatenate([c.margin[(kinds == kind) & c.flipped] for c in normals])
        counts = (first.margin[rows], np.abs(changes), flips)
        tables[kind] = {name: _count(v) for name, v in zip(COUNTS, counts, strict=True)}
    return tables


def _count(values: np.ndarray) -> list[int]:
    place = np.searchsorted(GRID, values[values > MARGIN_EDGES[1]], side="right") - 1
    return np.bincount(np.maximum(place, 0)).tolist()


def confident_range(
    tables: Mapping[str, Mapping[str, Any]], normals: int, largest: float
) -> tuple[float, float]:
    """The least and the greatest confident margin that `flip_limits` can have found.

    `normals`: how many there are; `largest`: the largest margin at which one flipped. Raises
    ValueError for counts that are none.
    """
    fewest, most = np.zeros(len(GRID)), np.zeros(len(GRID))  # expected flips from a bin on
    for table in tables.values():
        rows, changes, _ = (_read(table, name) for name in COUNTS)
        total = normals * int(rows.sum())
        beyond = _from(changes)
        if beyond[0] > total:
            raise ValueError(f"{beyond[0]:.0f} changes of {total} rows")
        if total:
            most += _from(rows * 0.5 * beyond / total)
            fewest += _from(rows * 0.5 * np.append(beyond[1:], 0.0) / total)
    low, high = float(MARGIN_EDGES[1]), float(MARGIN_EDGES[1])
    # A sum may be the limit itself; added in another order it is a little more or less.
    if (reached := np.nonzero(fewest > CONFIDENT_EXPECTED * (1 + _ORDER))[0]).size:
        low = float(GRID[reached[-1]])
    if (reached := np.nonzero(most > CONFIDENT_EXPECTED * (1 - _ORDER))[0]).size:
        high = float(np.append(GRID, np.inf)[reached[-1] + 1])
    return max(largest, low), max(largest, high)


def largest_range(tables: Mapping[str, Mapping[str, Any]]) -> tuple[float, float]:
    """Between what the largest margin of a normal's flip lies; ValueError as above."""
    top = max(np.nonzero(_read(t, "flips"))[0].max(initial=-1) for t in tables.values())
    if top < 0:
        return 0.0, float(GRID[0])
    return float(GRID[top]), float(np.append(GRID, np.inf)[top + 1])


def _read(table: Mapping[str, Any], name: str) -> np.ndarray:
    counts = table[name]
    if len(counts) > len(GRID) or not all(isinstance(n, int) and n >= 0 for n in counts):
        raise ValueError(f"{name} are no counts over {len(GRID)} bins")
    return np.append(np.array(counts, dtype=np.float64), np.zeros(len(GRID) - len(counts)))


def _from(counts: np.ndarray) -> np.ndarray:
    """Sums from each bin to the last."""
    return np.cumsum(counts[::-1])[::-1]

"""How often a candidate's mixtures of experts chose other experts than the reference's."""

from __future__ import annotations

import dataclasses

import numpy as np

from kernjax.recording import Recording


@dataclasses.dataclass(frozen=True)
class RouteChanges:
    """`changed` bool [rows, layers]: another set of experts (their order does not matter).

    `gaps` float32 [rows, layers]: the reference's, how near it was to another choice itself. Rows
    are the candidate's, layers those that are mixtures, in order.
    """

    changed: np.ndarray
    gaps: np.ndarray

    @property
    def choices(self) -> float:
        """The share of choices, of a row at a layer, that differ."""
        return float(self.changed.mean())

    @property
    def rows(self) -> float:
        """The share of rows in which at least one differs."""
        return float(self.changed.any(axis=1).mean())

    @property
    def largest_gap(self) -> float:
        """The clearest choice of the reference that came out otherwise; 0: none did."""
        return float(self.gaps[self.changed].max()) if self.changed.any() else 0.0

    def to_dict(self) -> dict[str, float | list[float]]:
        by_layer = [float(share) for share in self.changed.mean(axis=0)]
        return {
            "choices": self.choices,
            "rows": self.rows,
            "largest_gap": self.largest_gap,
            "by_layer": by_layer,
        }


def route_changes(reference: Recording, candidate: Recording) -> RouteChanges | None:
    """Over the candidate's rows; None where one of them was recorded without routes."""
    if not {"route_ids", "route_gaps"} <= reference.extras.keys() & candidate.extras.keys():
        return None
    reference = reference.select([segment["id"] for segment in candidate.segments])
    if not (
        np.array_equal(reference.pos, candidate.pos)
        and np.array_equal(reference.phase, candidate.phase)
    ):
        raise ValueError("the recordings' rows do not correspond")
    ours, theirs = (np.sort(one.extras["route_ids"], axis=-1) for one in (reference, candidate))
    return RouteChanges((ours != theirs).any(axis=-1), reference.extras["route_gaps"])

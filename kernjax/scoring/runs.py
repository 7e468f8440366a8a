"""The recordings of one candidate. Apart, so that reading finished ones needs no jax."""

from __future__ import annotations

import dataclasses
from typing import Any

from kernjax.recording import Recording


@dataclasses.dataclass
class Runs:
    """The recordings of one candidate; pairs are (reference, candidate)."""

    candidate: Recording
    repeat: Recording | None = None
    isolated: tuple[Recording, Recording] | None = None
    twin: tuple[Recording, Recording] | None = None
    same_experts: Recording | None = None
    notes: list[str] = dataclasses.field(default_factory=list)
    costs: list[dict[str, Any]] = dataclasses.field(default_factory=list)  # run, tokens, seconds
    cost: dict[str, Any] | None = None  # of all of them: `kernjax.scoring.cost`

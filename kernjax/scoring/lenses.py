"""Records a candidate through every lens that was asked for (NUMERICS section 5)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from kernjax.plugins import Kernel
from kernjax.precision import Policy, parse_policy
from kernjax.precision.lenses import delta, isolated, twin
from kernjax.recording import Recording
from kernjax.scoring.door import behind_door
from kernjax.scoring.recorder import Progress
from kernjax.scoring.routes import recorded_experts
from kernjax.scoring.runs import Runs
from kernjax.scoring.session import Session

Announce = Callable[[str], Callable[[Progress], None]]


@dataclasses.dataclass(frozen=True)
class Lenses:
    """Which recordings to make: how many segments of each kind and depth, and which lenses."""

    limit: int | None = None
    isolated: bool = True
    isolated_limit: int = 4
    twin: bool = False
    repeat: bool = False
    same_experts: bool = False


def run_lenses(
    session: Session,
    policy: Policy,
    production: Policy,
    folder: Path,
    kernels: Mapping[str, Kernel] | None = None,
    lenses: Lenses = Lenses(),  # noqa: B008
    announce: Announce = lambda title: lambda progress: None,
) -> Runs:
    """Records `policy` with `kernels` in place, and what `lenses` asks for, under `folder`.

    Isolated, a policy's change sits on float32 and is set against the session's reference; a
    kernel sits behind the door of production's activations and is set against the op's own
    float32 implementation behind the same door. `announce(title)` returns a progress callback.
    """
    kernels = dict(kernels or {})

    def record(
        name: str,
        policy: Policy,
        kernels: Mapping[str, Kernel] | None,
        limit: int | None,
        same_experts: bool = False,
        following: Sequence[tuple[Policy, int | None]] = (),
    ) -> Recording:
        return session.record(
            policy,
            folder / name,
            kernels,
            limit=limit,
            same_experts=same_experts,
            following=following,
            on_progress=announce(_title(name, policy, kernels)),
        )

    if lenses.same_experts:  # what is missing shows before anything runs
        first = session.corpus.segments[0].id
        recorded_experts(session.reference, first, session.checkpoint.config)
    few = min(lenses.isolated_limit, lenses.limit or lenses.isolated_limit)
    alone = isolated(policy, production) if lenses.isolated else None
    base = twin(policy, production) if lenses.twin else None
    runs_alone = alone is not None and not kernels and alone != parse_policy("f32")
    following = [(alone, few)] if runs_alone else []
    following += [] if base is None else [(base, lenses.limit)]
    runs = Runs(record("candidate", policy, kernels, lenses.limit, following=following))
    if lenses.repeat:
        runs.repeat = record("repeat", policy, kernels, lenses.limit)
    if alone is not None:
        if kernels:
            candidates, oracles = behind_door(kernels, production.activations)
            oracle = record("isolated_oracle", alone, oracles, few)
            runs.isolated = (oracle, record("isolated", alone, candidates, few))
        elif runs_alone:
            runs.isolated = (session.reference, record("isolated", alone, None, few))
        elif delta(policy, production):
            runs.notes.append("The change only removes rounding: on float32 it does nothing.")
    if base is not None:
        runs.twin = (record("twin", base, None, lenses.limit), runs.candidate)
    if lenses.same_experts:
        runs.same_experts = record("same_experts", policy, kernels, lenses.limit, True)
    return runs


def _title(name: str, policy: Policy, kernels: Mapping[str, Kernel] | None) -> str:
    """What is run, as progress and cost name it: the kernels, where there are any, come first."""
    if not kernels:
        return f"{name} {policy}"
    return f"{name} {', '.join(kernel.name for kernel in kernels.values())} on {policy}"

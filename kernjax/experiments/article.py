"""What the article's figures need of a model: recordings that are missing, and three short runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kernjax.base.errors import UserError
from kernjax.experiments import attention
from kernjax.experiments.state import Lane, decode
from kernjax.precision import Policy, parse_policy
from kernjax.precision.grammar import parse_setting
from kernjax.precision.policy import apply
from kernjax.recording import Recording, load_recording
from kernjax.reporting.article import Roles
from kernjax.scoring.greedy import continued, first_differences
from kernjax.scoring.recorder import Progress
from kernjax.scoring.session import Session

P_FORMATS = ("bf16", "fp8*448", "fp8")
STATE_FORMATS = ("m16", "m13", "m10", "m7", "m4")
VARIANTS = {
    "chunks of 32": "delta_rule.chunk=32",
    "P in fp8": "attention.p=fp8",
    "state in 4 bits": "delta_rule.state=m4",
}
"""An equally right implementation, and two that are not."""

_SEGMENTS = 2  # of each kind, for the runs of single layers
_PROMPTS = 4  # of each kind, for greedy texts

Announce = Callable[[str], Callable[[Progress], None]]


def changed(policy: Policy, *settings: str) -> Policy:
    """The policy with these settings; one that it already has changes nothing."""
    return apply(map(parse_setting, settings), policy)


def roles(
    session: Session,
    production: Policy,
    places: Sequence[Path],
    make_in: Path | None = None,
    limit: int | None = None,
    announce: Announce = lambda title: lambda progress: None,
) -> Roles:
    """The recordings of the figures: those below `places`, whatever they are called.

    A recording is found by its policy, the reference whose ids it was scored at, and that no
    plug-in took part. Those that are missing are made in `make_in`, or left out where that is None.
    All are cut to the segments that each of them has. UserError where the first place is there
    and holds none, or where there is none of `production`, against which all others are drawn.
    """
    known = _found(session, places, is_made=make_in is not None)
    missing = []

    def recording(policy: Policy, name: str) -> Recording | None:
        for other, one in known:
            if other == policy:
                return one
        if make_in is None:
            missing.append(name)
            return None
        out = make_in / str(policy).replace("*", "x")
        return session.record(policy, out, limit=limit, on_progress=announce(str(policy)))

    def found(wanted: Mapping[str, tuple[str, str]]) -> dict[str, Recording]:
        made = {
            name: recording(changed(production, setting), title)
            for name, (setting, title) in wanted.items()
        }
        return {name: one for name, one in made.items() if one is not None}

    main = recording(production, "production")
    if main is None:
        raise UserError(
            f"There is no recording of {production} at the reference's ids below "
            f"{' or '.join(map(str, places))}.",
            f"Every figure is drawn against what production does. Found: {_listed(known)}.",
            "Name another --recordings or --production_policy, or let --record make it.",
        )
    formats = found({name: (f"attention.p={name}", f"P in {name}") for name in P_FORMATS})
    variants = found({name: (text, name) for name, text in VARIANTS.items()})
    undone = recording(changed(production, "attention.p=f32"), "P in f32")
    return _cut(Roles(main, undone, formats, variants, tuple(dict.fromkeys(missing))))


def _listed(known: Sequence[tuple[Policy, Recording]]) -> str:
    return ", ".join(sorted(str(policy) for policy, _ in known)) or "none"


def _cut(roles: Roles) -> Roles:
    """The roles on the segments that all of the recordings have; UserError where there is none."""

    def ids(one: Recording) -> list[str]:
        return [segment["id"] for segment in one.segments]

    every = [roles.production, *roles.formats.values(), *roles.variants.values()]
    every += [] if roles.undone is None else [roles.undone]
    common = set.intersection(*(set(ids(one)) for one in every))
    names = [name for name in ids(roles.production) if name in common]
    if not names:
        raise UserError(
            "The recordings have no segment in common.",
            "Figures compare what was recorded at the same positions.",
            "Record them with the same --limit.",
        )

    def cut(one: Recording) -> Recording:
        return one if ids(one) == names else one.select(names)

    return dataclasses.replace(
        roles,
        production=cut(roles.production),
        undone=None if roles.undone is None else cut(roles.undone),
        formats={name: cut(one) for name, one in roles.formats.items()},
        variants={name: cut(one) for name, one in roles.variants.items()},
    )


def _found(
    session: Session, places: Sequence[Path], is_made: bool
) -> list[tuple[Policy, Recording]]:
    """The recordings below `places` (their entries and theirs) that fit the session's reference.

    UserError where the first place is there and holds none, unless they are to be made there.
    """
    found: list[tuple[Policy, Recording]] = []
    for folder in places:
        others = 0
        for path in sorted([*folder.glob("*"), *folder.glob("*/*")]):
            if (path / "complete.json").is_file() or path.suffix == ".zip":
                one = _fitting(session, path)
                found += [] if one is None else [one]
                others += one is None
        if not found and folder is places[0] and folder.is_dir() and not is_made:
            what = f"{others} recordings of something else" if others else "no recording"
            raise UserError(
                f"{folder} holds {what}.",
                f"Expected recordings of {session.model.name} on {session.corpus.name}, made with "
                f"--reference={session.reference.path}.",
                "Look at its name, or let --record make the recordings there.",
            )
    return found


def _fitting(session: Session, path: Path) -> tuple[Policy, Recording] | None:
    try:
        one = load_recording(path)
        policy = Policy.from_dict(one.manifest["policy"])
    except (UserError, KeyError):
        return None  # broken, or of another engine: it is no producer of ours
    fits = one.manifest["reference"] == session.reference.identity
    fits = fits and not one.manifest["kernels"] and one.manifest["engine"] == "jax"
    return (policy, one) if fits else None


def measured(session: Session, production: Policy, steps: int) -> dict[str, Any]:
    """`first_layer`, `state` and `greedy` of `kernjax.reporting.article`; None where a model has no
    such layer. `steps`: the tokens of a greedy text, 0 for none.
    """
    kinds = session.checkpoint.config.layer_types
    return {
        "first_layer": first_layer(session, production) if "full_attention" in kinds else None,
        "state": state(session, production) if "linear_attention" in kinds else None,
        "greedy": greedy(session, production, steps) if steps else None,
    }


def _segments(session: Session, depth: int, count: int) -> tuple[np.ndarray, list[str]]:
    """Tokens int32 [B, depth + 1] of `count` segments of each kind, and their kinds."""
    chosen = [
        segment
        for (_, context), group in session.corpus.strata().items()
        if context == depth
        for segment in group[:count]
    ]
    return np.stack([s.tokens[: depth + 1] for s in chosen]), [s.kind for s in chosen]


def first_layer(session: Session, production: Policy) -> dict[str, Any]:
    """The relative error of the first attention layer's output by P format, at its own inputs.

    At the end of the deepest prompts, under production with P in float32.
    """
    depth = max(segment.context_len for segment in session.corpus.segments)
    tokens, kinds = _segments(session, depth, _SEGMENTS)
    base = changed(production, "attention.p=f32")
    effect = attention.measure(
        session.checkpoint, base, P_FORMATS, tokens[:, :depth], min(depth, base.prefill_window)
    )
    last = effect.error[:, 0, -1]  # [formats, B]
    by_kind = {kind: np.array(kinds) == kind for kind in dict.fromkeys(kinds)}
    return {
        "layer": effect.layers[0],
        "depth": depth,
        "error": {
            name: {kind: float(row[own].mean()) for kind, own in by_kind.items()}
            for name, row in zip(P_FORMATS, last, strict=True)
        },
    }


def state(session: Session, production: Policy) -> dict[str, Any]:
    """How far one decode step moves the state by its format: first, middle, last such layer."""
    depth = min(s.context_len for s in session.corpus.segments if s.score_len)
    tokens, _ = _segments(session, depth, _SEGMENTS)
    lanes = [Lane("in place", None, production)]
    lanes += [
        Lane("in place", name, changed(production, f"delta_rule.state={name}"))
        for name in STATE_FORMATS
    ]
    found = decode(session.checkpoint, lanes, tokens, depth).state.mean(axis=(2, 3))
    kinds = session.checkpoint.config.layer_types
    recurrent = [i for i, kind in enumerate(kinds) if kind == "linear_attention"]
    chosen = sorted({0, len(recurrent) // 2, len(recurrent) - 1})
    return {
        "depth": depth,
        "formats": list(STATE_FORMATS),
        "layers": [recurrent[i] for i in chosen],
        "distance": [[float(row[i]) for row in found] for i in chosen],
    }


def greedy(session: Session, production: Policy, steps: int) -> dict[str, Any]:
    """Where greedy texts part from the ground truth's: production, and every variant."""
    depth = min(segment.context_len for segment in session.corpus.segments)
    prompts = _segments(session, depth, _PROMPTS)[0][:, :depth]
    truth = continued(session.producer(parse_policy("f32")), prompts, steps)
    policies = {"production": production}
    policies |= {name: changed(production, text) for name, text in VARIANTS.items()}
    rows = []
    for name, policy in policies.items():
        text = continued(session.producer(policy), prompts, steps)
        rows.append(_parted(name, first_differences(truth, text)))
    return {"steps": steps, "depth": depth, "rows": rows}


def _parted(name: str, places: Sequence[tuple[int, float] | None]) -> Mapping[str, Any]:
    parted = [place for place in places if place is not None]
    tokens, margins = [step + 1 for step, _ in parted], [margin for _, margin in parted]
    return {
        "name": name,
        "texts": len(places),
        "parted": len(parted),
        "first_token": min(tokens, default=None),
        "median_token": float(np.median(tokens)) if parted else None,
        "median_margin": float(np.median(margins)) if parted else None,
        "max_margin": max(margins, default=None),
    }

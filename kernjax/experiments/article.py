"""What the article's figures need of a model: recordings that are missing, and three short runs."""

from __future__ import annotations

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
    folder: Path,
    limit: int | None = None,
    announce: Announce = lambda title: lambda progress: None,
) -> Roles:
    """The recordings of the figures: those in `folder`, whatever they are called, else made there.

    A recording is found by its policy, the reference whose ids it was scored at, and that no
    plug-in took part.
    """
    known = _found(session, folder)

    def recording(policy: Policy) -> Recording:
        for other, one in known:
            if other == policy:
                return one
        out = folder / str(policy).replace("*", "x")
        return session.record(policy, out, limit=limit, on_progress=announce(str(policy)))

    return Roles(
        recording(production),
        recording(changed(production, "attention.p=f32")),
        {name: recording(changed(production, f"attention.p={name}")) for name in P_FORMATS},
        {name: recording(changed(production, text)) for name, text in VARIANTS.items()},
    )


def _found(session: Session, folder: Path) -> list[tuple[Policy, Recording]]:
    """The recordings below `folder` (its entries and theirs) that fit the session's reference."""
    found = []
    for path in sorted([*folder.glob("*"), *folder.glob("*/*")]):
        if not ((path / "complete.json").is_file() or path.suffix == ".zip"):
            continue
        try:
            one = load_recording(path)
            policy = Policy.from_dict(one.manifest["policy"])
        except (UserError, KeyError):
            continue  # broken, or of another engine: it is no producer of ours
        fits = one.manifest["reference"] == session.reference.identity
        if fits and not one.manifest["kernels"] and one.manifest["engine"] == "jax":
            found.append((policy, one))
    return found


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

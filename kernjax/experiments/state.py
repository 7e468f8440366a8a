"""Decode with a rounded recurrent state: several policies step by step on the same tokens.

All of them advance in one compiled program, next to the ground truth: a step's KL and its states'
distances are taken on the device and nothing else is kept, so that thousands of steps fit.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kernjax.experiments.divergence import full_kl
from kernjax.experiments.prefill import prefill
from kernjax.model import capacity_for, forward, logits
from kernjax.precision import Policy, parse_policy
from kernjax.precision.grammar import parse_setting
from kernjax.precision.policy import apply
from kernjax.scoring.producer import Checkpoint, JaxProducer
from pallas_kernels.formats import Format, round_to

_PIECE = 512  # decode steps a call: long runs report on their way


@dataclasses.dataclass(frozen=True)
class Lane:
    """One policy that decodes: a lens, and the format its state is stored in.

    `policy` is what the lens builds on, `state` None where the state is not rounded.
    """

    lens: str  # "isolated" (on float32) or "in place" (on the production policy)
    state: str | None
    policy: Policy

    @property
    def name(self) -> str:
        return f"{self.lens}, {self.state or 'f32'}"

    @property
    def format(self) -> Format:
        return self.policy.delta_rule.state


@dataclasses.dataclass(frozen=True)
class Decoded:
    """What was measured at every decode step of B passages; lanes M without the first one.

    - kl [M, B, steps]: KL(first || lane) over the whole vocabulary, nats.
    - flipped [M, B, steps]: another first choice than the first lane's.
    - state [M, layers, B, steps]: relative Frobenius distance of each recurrent layer's state from
      that of the same lens with an unrounded state; 0 for that one itself.
    """

    lanes: tuple[Lane, ...]
    kl: np.ndarray
    flipped: np.ndarray
    state: np.ndarray


def lanes(base: Policy, formats: Sequence[str]) -> list[Lane]:
    """The truth, production, and both with the state in each of the formats, isolated first."""
    truth = parse_policy("f32")
    found = [Lane("isolated", None, truth), Lane("in place", None, base)]
    for lens, policy in (("isolated", truth), ("in place", base)):
        for name in formats:
            rounded = apply([parse_setting(f"delta_rule.state={name}")], policy)
            found.append(Lane(lens, name, rounded))
    return found


def decode(
    checkpoint: Checkpoint,
    chosen: Sequence[Lane],
    tokens: np.ndarray,
    context_len: int,
    progress: Callable[[int], None] = lambda steps: None,
) -> Decoded:
    """Prefills `context_len` tokens of int32 [B, length], decodes the rest one by one.

    KL is taken against the first of `chosen` (the ground truth); every lens has its unrounded lane.
    `progress` is told how many steps are done.
    """
    producers = _producers(checkpoint, chosen)
    capacity = capacity_for(tokens.shape[1])
    unrounded = {lane.lens: i for i, lane in enumerate(chosen) if lane.state is None}
    filled = {
        lens: prefill(producers[i], tokens[:, :context_len], capacity)[0]
        for lens, i in unrounded.items()
    }
    # A prefill call rounds the state where it stores it, at its end: lanes part there.
    caches = [
        dataclasses.replace(
            jax.tree.map(jnp.copy, filled[lane.lens]),
            state=round_to(filled[lane.lens].state, lane.format),
        )
        for lane in chosen
    ]
    graph = nnx.split(producers[0].decoder)[0]
    params = [nnx.split(producer.decoder)[1] for producer in producers]
    executions = tuple(producer.execution for producer in producers)
    against = tuple(unrounded[lane.lens] for lane in chosen)
    run = jax.jit(functools.partial(_steps, graph, executions, against), donate_argnums=1)
    parts = []
    for start in range(context_len, tokens.shape[1], _PIECE):
        piece = jnp.asarray(tokens[:, start : start + _PIECE])
        caches, measured = run(params, caches, piece)
        parts.append(jax.device_get(measured))
        progress(min(start + _PIECE, tokens.shape[1]) - context_len)
    kl, flipped, state = (np.moveaxis(np.concatenate(x), 0, -1) for x in zip(*parts, strict=True))
    return Decoded(tuple(chosen[1:]), kl, flipped, state)


def _producers(checkpoint: Checkpoint, chosen: Sequence[Lane]) -> list[JaxProducer]:
    """One a lane; those that hold their weights alike are made in a row, and share them."""
    made: dict[int, JaxProducer] = {}
    for index in sorted(range(len(chosen)), key=lambda i: str(chosen[i].policy.weights)):
        made[index] = JaxProducer(checkpoint, chosen[index].policy)
    return [made[index] for index in range(len(chosen))]


def _steps(graph, executions, against, params, caches, tokens):
    """The caches after tokens [B, steps], and what was measured on the way:

    kl and flipped [steps, M - 1, B], state [steps, M - 1, layers, B].
    """

    def step(caches, token):
        after, scores = [], []
        for execution, weights, cache in zip(executions, params, caches, strict=True):
            decoder = nnx.merge(graph, weights)
            hidden, cache, _ = forward(decoder, token[:, None], cache, execution, decode=True)
            after.append(cache)
            scores.append(logits(decoder, hidden[:, 0], execution))
        truth, others = scores[0], jnp.stack(scores[1:])
        kl = full_kl(truth[None], others)
        flipped = jnp.argmax(others, axis=-1) != jnp.argmax(truth, axis=-1)[None]
        state = [
            _distance(cache.state, after[base].state)
            for cache, base in zip(after[1:], against[1:], strict=True)
        ]
        return after, (kl, flipped, jnp.stack(state))

    return jax.lax.scan(step, caches, jnp.swapaxes(tokens, 0, 1))


def _distance(state: jax.Array, base: jax.Array) -> jax.Array:
    """[layers, B]: |S - S'| / |S'| of states [layers, B, Hv, K, V]."""

    def size(x: jax.Array) -> jax.Array:
        return jnp.sqrt(jnp.sum(x * x, axis=(2, 3, 4)))

    return size(state - base) / jnp.maximum(size(base), jnp.finfo(jnp.float32).tiny)

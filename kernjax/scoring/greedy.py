"""Greedy continuations of two producers, and the first token at which they differ: a footnote.

Greedy texts part at the first near tie, whatever the precision: two right implementations do so
after a few dozen tokens. It is shown because people ask, beside the same figure for production.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kernjax.model import capacity_for, forward, init_cache, logits
from kernjax.scoring.producer import JaxProducer


@dataclasses.dataclass(frozen=True)
class Continuation:
    """What a producer says after its prompts: `ids` int32 [B, steps], `margins` float32 alike."""

    ids: np.ndarray
    margins: np.ndarray


def continued(producer: JaxProducer, prompts: np.ndarray, steps: int) -> Continuation:
    """The greedy continuation of prompts int32 [B, T] by `steps` tokens, ties to the lower id."""
    batch, length = prompts.shape
    graph, params = nnx.split(producer.decoder)
    execution, window = producer.execution, producer.policy.prefill_window
    capacity = capacity_for(length + steps)
    cache = init_cache(producer.config, execution, batch, capacity)
    prefill = jax.jit(functools.partial(_prefill, graph, execution), donate_argnums=2)
    for start in range(0, length, window):
        cache, last = prefill(params, jnp.asarray(prompts[:, start : start + window]), cache)
    run = jax.jit(functools.partial(_steps, graph, execution, steps))
    ids, margins = run(params, cache, last)
    return Continuation(np.asarray(ids).T, np.asarray(margins).T)


def first_differences(a: Continuation, b: Continuation) -> list[tuple[int, float] | None]:
    """Per prompt (step, margin of `a` there) of the first token that differs; None: none does."""
    found: list[tuple[int, float] | None] = []
    for ours, theirs, margins in zip(a.ids, b.ids, a.margins, strict=True):
        at = np.nonzero(ours != theirs)[0]
        found.append((int(at[0]), float(margins[at[0]])) if at.size else None)
    return found


def _prefill(graph, execution, params, tokens, cache):
    """(cache, logits float32 [B, V] after the last token)."""
    decoder = nnx.merge(graph, params)
    hidden, cache, _ = forward(decoder, tokens, cache, execution)
    return cache, logits(decoder, hidden[:, -1], execution)


def _steps(graph, execution, steps, params, cache, last):
    decoder = nnx.merge(graph, params)

    def step(carry, _):
        cache, scores = carry
        best, ids = jax.lax.top_k(scores, 2)
        hidden, cache, _ = forward(decoder, ids[:, :1], cache, execution, decode=True)
        carry = cache, logits(decoder, hidden[:, 0], execution)
        return carry, (ids[:, 0], best[:, 0] - best[:, 1])

    return jax.lax.scan(step, (cache, last), None, length=steps)[1]

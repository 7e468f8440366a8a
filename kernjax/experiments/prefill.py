"""Prefill in windows, and the logits before every window's end."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kernjax.model import Cache, forward, init_cache, logits
from kernjax.scoring.producer import JaxProducer


def prefill(
    producer: JaxProducer, tokens: np.ndarray, capacity: int, tail: int = 1
) -> tuple[Cache, list[np.ndarray]]:
    """The cache after int32 [B, T], and per window the logits float32 [B, tail, V] at its end.

    Windows are the policy's `prefill_window`; one shorter than `tail` gives what it has.
    """
    cache = init_cache(producer.config, producer.execution, len(tokens), capacity)
    graph, params = nnx.split(producer.decoder)
    run = jax.jit(functools.partial(_window, graph, producer.execution, tail), donate_argnums=2)
    window, found = producer.policy.prefill_window, []
    for start in range(0, tokens.shape[1], window):
        cache, scores = run(params, jnp.asarray(tokens[:, start : start + window]), cache)
        found.append(np.asarray(scores))
    return cache, found


def _window(graph, execution, tail, params, tokens, cache):
    decoder = nnx.merge(graph, params)
    hidden, cache, _ = forward(decoder, tokens, cache, execution)
    return cache, logits(decoder, hidden[:, -tail:], execution)

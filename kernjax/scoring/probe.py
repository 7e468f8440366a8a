"""What the layers hold after one decode step: the recurrent states and the residual stream."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kernjax.model import capacity_for, forward, init_cache
from kernjax.scoring.producer import JaxProducer


class Probe:
    """A producer's model, stopped after one decode step; compiled once for a batch's shape."""

    def __init__(self, producer: JaxProducer) -> None:
        self.config, self._execution = producer.config, producer.execution
        self._window = producer.policy.prefill_window
        graph, self._params = nnx.split(producer.decoder)
        self._prefill = jax.jit(
            functools.partial(_prefill, graph, self._execution), donate_argnums=2
        )
        self._step = jax.jit(functools.partial(_step, graph, self._execution))

    def after_one_step(self, tokens: np.ndarray, context_len: int) -> dict[str, np.ndarray]:
        """Prefills `context_len` tokens of int32 [B, > context_len] and decodes the next one.

        Returns float32 `stream` [layers, B, D], the residual stream after every layer at that
        step, and `state` [recurrent layers, B, Hv, K, V] as stored after it.
        """
        capacity = capacity_for(context_len + 1)
        cache = init_cache(self.config, self._execution, len(tokens), capacity)
        for start in range(0, context_len, self._window):
            stop = min(start + self._window, context_len)
            cache = self._prefill(self._params, jnp.asarray(tokens[:, start:stop]), cache)
        step = jnp.asarray(tokens[:, context_len : context_len + 1])
        stream, state = self._step(self._params, step, cache)
        return {"stream": np.asarray(stream), "state": np.asarray(state)}


def _prefill(graph, execution, params, tokens, cache):
    _, cache, _ = forward(nnx.merge(graph, params), tokens, cache, execution)
    return cache


def _step(graph, execution, params, token, cache):
    _, cache, captured = forward(
        nnx.merge(graph, params),
        token,
        cache,
        execution,
        decode=True,
        capture=jnp.zeros((1,), jnp.int32),
    )
    return captured.hidden[:, :, 0], cache.state

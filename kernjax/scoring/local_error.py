"""How far a layer under another plan is from the base, given the base's own inputs.

The base runs a segment once and every layer's input is kept; then single layers run on these
inputs, under the base's plan and under another one, each with its own state and cache carried
along. What differs is the layer's own error, not what earlier layers did to its inputs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kernjax.model import Cache, Execution, capacity_for, forward, init_cache, one_layer, run_layer
from kernjax.model.execution import LayerPlan
from kernjax.scoring.producer import JaxProducer
from pallas_kernels.formats import store


@dataclasses.dataclass(frozen=True)
class LocalError:
    """Relative errors of one layer's update by position, float64: |y' - y| / |y - x|.

    y is what the layer makes of x under the base's plan, y' under the other one. `prefill`
    [context_len], `decode` [steps].
    """

    prefill: np.ndarray
    decode: np.ndarray

    @property
    def by_position(self) -> np.ndarray:
        """Both, by position in the segment."""
        return np.concatenate([self.prefill, self.decode])


class LayerBench:
    """One segment's layer inputs under the base; `error(layer, plan)` runs a layer alone.

    `execution` is what the base runs, on the producer's weights; tokens int32
    [context_len + steps + 1]. Holds float32 [layers, tokens, D] on the host.
    """

    def __init__(
        self, base: JaxProducer, execution: Execution, tokens: np.ndarray, context_len: int
    ) -> None:
        self._base, self._execution, self._context_len = base, execution, context_len
        self._tokens = np.asarray(tokens[:-1], np.int32)[None]
        self._window = base.policy.prefill_window
        self._graph, self._params = nnx.split(base.decoder)
        self._inputs = self._layer_inputs()
        self._runs: dict[tuple[int, LayerPlan], np.ndarray] = {}
        self._compiled: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def error(self, layer: int, plan: LayerPlan) -> LocalError:
        """The local error of `layer` under `plan`."""
        x = self._inputs[layer].astype(np.float64)
        own = self._run(layer, self._execution.layers[layer]).astype(np.float64)
        other = self._run(layer, plan).astype(np.float64)
        size = np.maximum(np.linalg.norm(own - x, axis=1), np.finfo(np.float64).tiny)
        error = np.linalg.norm(other - own, axis=1) / size
        return LocalError(error[: self._context_len], error[self._context_len :])

    def _layer_inputs(self) -> np.ndarray:
        """float32 [layers, tokens, D]: the residual stream before every layer."""
        execution, config = self._execution, self._base.config
        cache = init_cache(config, execution, 1, capacity_for(self._tokens.shape[1]))
        prefill = jax.jit(functools.partial(_captured, self._graph, execution, False))
        step = jax.jit(functools.partial(_decoded, self._graph, execution))
        embedded = store(self._base.decoder.embed[...][self._tokens], execution.top.activations)
        first = np.asarray(embedded.astype(jnp.float32))
        parts = []
        for start, stop in self._windows():
            cache, seen = prefill(self._params, cache, self._tokens[:, start:stop])
            parts.append(np.asarray(seen)[:, 0])
        steps = self._tokens[0, self._context_len :]
        if len(steps):
            parts.append(np.moveaxis(np.asarray(step(self._params, cache, steps)), 0, 1))
        after = np.concatenate(parts, axis=1)  # [layers, tokens, D]
        return np.concatenate([first, after[:-1]])

    def _windows(self) -> list[tuple[int, int]]:
        total, size = self._context_len, self._window
        return [(start, min(start + size, total)) for start in range(0, total, size)]

    def _run(self, layer: int, plan: LayerPlan) -> np.ndarray:
        """float32 [tokens, D]: the layer's outputs on the base's inputs under `plan`."""
        if (layer, plan) not in self._runs:
            self._runs[layer, plan] = self._computed(layer, plan)
        return self._runs[layer, plan]

    def _computed(self, layer: int, plan: LayerPlan) -> np.ndarray:
        config, stack = self._base.config, self._base.config.layer_stacks[layer]
        execution = Execution(self._execution.top, (plan,))
        index = jnp.int32(config.stacks[stack].index(layer))
        alone = one_layer(config, config.layer_types[layer])
        cache = init_cache(alone, execution, 1, capacity_for(self._tokens.shape[1]))
        run = self._compile(stack, execution, _layer_prefill)
        x, kept, parts = self._inputs[layer][None], self._kept(layer), []
        for start, stop in self._windows():
            before = None if kept is None else kept[:, :, start:stop]
            y, cache = run(self._params, index, cache, x[:, start:stop], before)
            parts.append(np.asarray(y)[0])
        if x.shape[1] > self._context_len:
            run = self._compile(stack, execution, _layer_decode)
            before = None if kept is None else kept[:, 0, self._context_len :].swapaxes(0, 1)
            steps = x[0, self._context_len :]
            parts.append(np.asarray(run(self._params, index, cache, steps, before)))
        return np.concatenate(parts)

    def _kept(self, layer: int) -> np.ndarray | None:
        """float32 [blocks, 1, tokens, D]: of attention residuals, `Stream.kept` at `layer`."""
        size = self._base.config.block_size
        if size is None:
            return None
        kept = self._inputs[::size, None].copy()
        kept[-(-layer // size) :] = 0  # blocks that have not begun
        return kept

    def _compile(
        self, stack: str, execution: Execution, function: Callable[..., Any]
    ) -> Callable[..., Any]:
        key = (stack, execution, function)
        if key not in self._compiled:
            # The stream's container is the base's: a narrower one would round more than the plan.
            self._compiled[key] = jax.jit(
                functools.partial(function, self._graph, stack, execution, self._stream)
            )
        return self._compiled[key]

    @property
    def _stream(self) -> jnp.dtype:
        return self._execution.container(lambda policy: policy.activations)


def _captured(graph, execution, decode, params, cache, tokens):
    """(cache, float32 [layers, B, T, D]) of tokens [B, T]."""
    decoder = nnx.merge(graph, params)
    columns = jnp.arange(tokens.shape[1])
    _, cache, seen = forward(decoder, tokens, cache, execution, decode=decode, capture=columns)
    return cache, seen.hidden


def _decoded(graph, execution, params, cache, tokens):
    """float32 [steps, layers, D]: tokens int32 [steps] one by one."""

    def step(cache, token):
        cache, seen = _captured(graph, execution, True, params, cache, token[None, None])
        return cache, seen[:, 0, 0]

    return jax.lax.scan(step, cache, tokens)[1]


def _layer_prefill(graph, stack, execution, dtype, params, index, cache, x, kept, decode=False):
    """(float32 [1, T, D], cache) of x float32 [1, T, D] and kept [blocks, 1, T, D] or None."""
    decoder = nnx.merge(graph, params)
    kept = None if kept is None else kept.astype(dtype)
    y, cache = run_layer(
        decoder, stack, index, x.astype(dtype), cache, execution, decode=decode, kept=kept
    )
    return y.astype(jnp.float32), cache


def _layer_decode(graph, stack, execution, dtype, params, index, cache: Cache, x, kept):
    """float32 [steps, D] of x [steps, D] and kept [steps, blocks, D] or None, one by one."""

    def step(cache, inputs):
        x, kept = inputs
        kept = None if kept is None else kept[:, None, None]
        y, cache = _layer_prefill(
            graph, stack, execution, dtype, params, index, cache, x[None, None], kept, decode=True
        )
        return cache, y[0, 0]

    return jax.lax.scan(step, cache, (x, kept))[1]

"""The hybrid decoder: embedding, layers scanned by kind, final norm, logits.

Layers with the same parameters are a stack, and run in loops (`kernjax.model.pattern`), so that
what is compiled does not grow with depth. Layers whose plan differs (a policy or a kernel on some
layers only) become branches of one `lax.switch`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kernjax.model.cache import Cache, row
from kernjax.model.config import STACKS, ModelConfig
from kernjax.model.embedding import look_up
from kernjax.model.execution import Execution, LayerCall, LayerPlan
from kernjax.model.layer import DecoderLayer
from kernjax.model.layers import dot, layer_norm
from kernjax.model.moe import Routes
from kernjax.model.pattern import Captured, Carry, Step, run_pattern
from kernjax.model.residual import Mixture, Stream, new_stream
from kernjax.model.separate import OneOf, Separate
from pallas_kernels.formats import round_to, store


class Decoder(nnx.Module):
    """Weights of the whole model: embed [vocab, D], stacks of layers, norms, output matrix.

    Built from the parameter tree of `kernjax.model.params` (arrays, or shapes under
    `nnx.eval_shape`); `lm_head` is None where it is tied to the embedding, a stack where the model
    has no such layer.
    """

    def __init__(self, config: ModelConfig, params: Mapping[str, Any]) -> None:
        self.config = config
        self.embed = nnx.Param(params["embed"])
        self.final_norm = nnx.Param(params["final_norm"])
        self.lm_head = None if config.tie_word_embeddings else nnx.Param(params["lm_head"])

        def stack(name: str) -> DecoderLayer | None:
            if name not in config.stacks:
                return None
            return DecoderLayer(config, STACKS[name], params[name])

        self.linear, self.full = stack("linear"), stack("full")
        self.linear_moe, self.full_moe = stack("linear_moe"), stack("full_moe")
        blocks = config.block_size is not None
        self.output_res = Mixture(params["output_res"]) if blocks else None


def forward(
    decoder: Decoder,
    tokens: jax.Array,
    cache: Cache,
    execution: Execution,
    *,
    count: jax.Array | None = None,
    decode: bool = False,
    capture: jax.Array | None = None,
    routes: jax.Array | None = None,
    forced: jax.Array | None = None,
    variants: Sequence[Execution] = (),
    which: jax.Array | None = None,
) -> tuple[jax.Array, Cache, Captured]:
    """Runs tokens int32 [B, T] on top of `cache`: (hidden [B, T, D], new cache, captured).

    hidden is after the final norm. `count` (int32 [], default T) tokens are real, the rest is
    padding. `decode` chooses the decode ops (T of 1..8). `capture` and `routes` int32 [R] are
    columns whose residual stream, and whose experts, are captured. `forced` int32 [mixtures of
    experts, B, T, k] are experts to take instead of those the routers choose, where none is
    negative.
    The cache must have room for T more tokens. `which` int32 [layers] chooses for every layer, in
    the compiled program, the plan of `execution` (0) or of `variants[which - 1]`; what is outside
    the layers is always `execution.top`.
    """
    config = decoder.config
    count = jnp.int32(tokens.shape[1]) if count is None else count
    stream_dtype = execution.container(lambda policy: policy.activations)
    x = look_up(decoder.embed[...], tokens, execution.embedding)
    x = store(x, execution.top.activations).astype(stream_dtype)

    step = _Layers(decoder, count, decode, capture, routes, forced).step(
        _stack_plans(config, (execution, *variants)), which, _cache_rows(config), cache.length
    )
    stream = new_stream(x, config.num_layers, config.block_size)
    carry = (stream, cache.keys, cache.values, cache.conv, cache.state)
    carry, captured = run_pattern(config.layer_stacks, step, carry)
    stream, keys, values, conv, state = carry
    hidden = stream.x
    if decoder.output_res is not None:
        hidden = decoder.output_res(
            stream, stream.kept.shape[0], config.rms_norm_eps, execution.top
        )
    hidden = layer_norm(hidden, decoder.final_norm[...], config, execution.top)
    return hidden, Cache(keys, values, conv, state, cache.length + count), captured


def logits(decoder: Decoder, hidden: jax.Array, execution: Execution) -> jax.Array:
    """Logits float32 [..., vocab] of hidden [..., D], rounded only where the policy says so."""
    head = decoder.embed[...].T if decoder.lm_head is None else decoder.lm_head[...]
    return round_to(dot(hidden, head, execution.top), execution.top.logits)


def one_layer(config: ModelConfig, kind: str) -> ModelConfig:
    """The config of a model with a single layer of `kind`: whose cache `run_layer` takes."""
    return dataclasses.replace(config, num_layers=1, layer_types=(kind,), moe_layers=())


def run_layer(
    decoder: Decoder,
    stack: str,
    index: jax.Array,
    x: jax.Array,
    cache: Cache,
    execution: Execution,
    *,
    decode: bool = False,
    kept: jax.Array | None = None,
) -> tuple[jax.Array, Cache]:
    """One layer by itself: the `index`-th of its stack on x [B, T, D], under `execution.layers[0]`.

    `cache` is that of `one_layer`, with room for T more tokens; returns the new x and cache. Where
    the model has attention residuals, `kept` is as in `Stream`.
    """
    count = jnp.int32(x.shape[1])
    plans = {
        stack: _Plans(
            [execution.layers[0]], np.zeros((1, len(decoder.config.stacks[stack])), np.int32)
        )
    }
    rows = {stack: np.zeros(len(decoder.config.stacks[stack]), np.int32)}
    step = _Layers(decoder, count, decode).step(plans, None, rows, cache.length)
    carry = (Stream(x, kept), cache.keys, cache.values, cache.conv, cache.state)
    (stream, keys, values, conv, state), _ = step(stack, index, carry)
    return stream.x, Cache(keys, values, conv, state, cache.length + count)


class _Plans(NamedTuple):
    """The different plans of a stack's layers, and which of them int32 [executions, layers] has."""

    distinct: list[LayerPlan]
    table: np.ndarray


def _stack_plans(config: ModelConfig, executions: Sequence[Execution]) -> dict[str, _Plans]:
    def of(layers: tuple[int, ...]) -> _Plans:
        plans = [[execution.layers[layer] for layer in layers] for execution in executions]
        distinct = list(dict.fromkeys(itertools.chain(*plans)))
        table = [[distinct.index(plan) for plan in ours] for ours in plans]
        return _Plans(distinct, np.asarray(table, np.int32))

    return {name: of(layers) for name, layers in config.stacks.items()}


def _cache_rows(config: ModelConfig) -> dict[str, np.ndarray]:
    """int32 [layers] of every stack: their rows in the cache, which has one a layer of a kind."""
    kinds = config.layer_types
    return {
        name: np.asarray([kinds[:layer].count(kinds[layer]) for layer in layers], np.int32)
        for name, layers in config.stacks.items()
    }


class _Layers:
    """The decoder's stacks, and what one call does with every layer of them."""

    def __init__(
        self,
        decoder: Decoder,
        count: jax.Array,
        decode: bool,
        capture: jax.Array | None = None,
        routes: jax.Array | None = None,
        forced: jax.Array | None = None,
    ) -> None:
        config = self._config = decoder.config
        # Experts stay whole: a layer's are read where they lie in the stack.
        self._parts = {
            name: nnx.split(getattr(decoder, name), nnx.PathContains("experts"), ...)
            for name in config.stacks
        }
        self._count, self._decode, self._capture = count, decode, capture
        self._routes, self._forced = routes, forced
        self._mixtures = {
            name: np.asarray([config.moe_layers.index(layer) for layer in layers], np.int32)
            for name, layers in config.stacks.items()
            if layers[0] in config.moe_layers
        }

    def step(
        self,
        plans: Mapping[str, _Plans],
        which: jax.Array | None,
        rows: Mapping[str, np.ndarray],
        start: jax.Array,
    ) -> Step:
        """A function (stack, index in it, carry) -> (carry, captured), after `start` tokens."""

        def run(name: str, index: jax.Array, carry: Carry) -> tuple[Carry, Captured]:
            graph, experts, params = self._parts[name]
            layer = nnx.merge(graph, experts, _of_layer(params, index))
            at = _looked_up(rows[name], index)
            distinct, table = plans[name]
            forced = None
            if self._forced is not None and name in self._mixtures:
                forced = row(self._forced, _looked_up(self._mixtures[name], index))
            number = _looked_up(np.asarray(self._config.stacks[name], np.int32), index)
            branches = [
                functools.partial(self._run, layer, at, index, number, forced, start, plan)
                for plan in distinct
            ]
            if len(branches) == 1:
                carry, routes = branches[0](carry)
            else:
                variant = 0 if which is None else which[number]
                chosen = jnp.asarray(table)[variant, index]
                carry, routes = jax.lax.switch(chosen, branches, carry)
            capture = self._capture
            seen = None if capture is None else carry[0].x[:, capture].astype(jnp.float32)
            return carry, Captured(seen, routes)

        return run

    def _run(
        self,
        layer: DecoderLayer,
        at: jax.Array,
        place: jax.Array,
        number: jax.Array,
        forced: jax.Array | None,
        start: jax.Array,
        plan: LayerPlan,
        carry: Carry,
    ) -> tuple[Carry, Routes | None]:
        stream, *cached = carry
        cache = Cache(*cached, start)
        call = LayerCall(at, self._count, plan, self._config, self._decode)
        new, cache, routes = layer(stream, cache, call, place, number, forced)
        x = store(new.x, plan.policy.activations).astype(stream.x.dtype)
        if routes is not None:
            columns = self._routes
            routes = (
                None if columns is None else jax.tree.map(lambda leaf: leaf[:, columns], routes)
            )
        return (new._replace(x=x), cache.keys, cache.values, cache.conv, cache.state), routes


def _of_layer(params: Any, index: jax.Array) -> Any:
    """Every stack's parameters of one layer."""

    def of(leaf: jax.Array | Separate) -> jax.Array | OneOf:
        return leaf.row(index) if isinstance(leaf, Separate) else row(leaf, index)

    return jax.tree.map(of, params, is_leaf=lambda leaf: isinstance(leaf, Separate))


def _looked_up(table: np.ndarray, index: jax.Array) -> jax.Array:
    """table[index]; without a table where it is the identity."""
    identity = np.array_equal(table, np.arange(len(table)))
    return index if identity else jnp.asarray(table)[index]

"""The hybrid decoder: embedding, layers scanned by kind, final norm, logits.

The pattern of layers is cut into a unit that repeats (three GDN layers and one attention layer,
say); runs of one kind inside the unit are scanned, and so are the repeats, so that each kind of
layer is compiled once whatever the depth. Layers whose plan differs (a policy or a kernel on some
layers only) become branches of one `lax.switch`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kernjax.model.attention import AttentionLayer
from kernjax.model.cache import Cache
from kernjax.model.config import ModelConfig
from kernjax.model.delta_net import DeltaNetLayer
from kernjax.model.execution import Execution
from kernjax.model.layers import dot, rms_norm
from pallas_kernels.formats import round_to, store

LINEAR, FULL = "linear_attention", "full_attention"


class Decoder(nnx.Module):
    """Weights of the whole model: embed [vocab, D], two stacks of layers, norms, output matrix.

    Built from the parameter tree of `kernjax.model.params` (arrays, or shapes under
    `nnx.eval_shape`); `lm_head` is None where it is tied to the embedding.
    """

    def __init__(self, config: ModelConfig, params: Mapping[str, Any]) -> None:
        self.config = config
        self.embed = nnx.Param(params["embed"])
        self.final_norm = nnx.Param(params["final_norm"])
        self.lm_head = None if config.tie_word_embeddings else nnx.Param(params["lm_head"])
        self.linear = DeltaNetLayer(params["linear"]) if LINEAR in config.layer_types else None
        self.full = AttentionLayer(params["full"]) if FULL in config.layer_types else None


def forward(
    decoder: Decoder,
    tokens: jax.Array,
    cache: Cache,
    execution: Execution,
    *,
    count: jax.Array | None = None,
    decode: bool = False,
    capture: jax.Array | None = None,
    variants: Sequence[Execution] = (),
    which: jax.Array | None = None,
) -> tuple[jax.Array, Cache, jax.Array | None]:
    """Runs tokens int32 [B, T] on top of `cache`: (hidden [B, T, D], new cache, captured).

    hidden is after the final norm. `count` (int32 [], default T) tokens are real, the rest is
    padding. `decode` chooses the decode ops (T of 1..8). `capture` int32 [R] are columns whose
    residual stream is returned after every layer as float32 [layers, B, R, D].
    The cache must have room for T more tokens. `which` int32 [layers] chooses for every layer, in
    the compiled program, the plan of `execution` (0) or of `variants[which - 1]`; what is outside
    the layers is always `execution.top`.
    """
    config = decoder.config
    count = jnp.int32(tokens.shape[1]) if count is None else count
    stream_dtype = execution.container(lambda policy: policy.activations)
    x = store(decoder.embed[...][tokens], execution.top.activations).astype(stream_dtype)

    stacks = {
        LINEAR: None if decoder.linear is None else nnx.split(decoder.linear),
        FULL: None if decoder.full is None else nnx.split(decoder.full),
    }
    executions = (execution, *variants)
    step = _layer_step(config, executions, which, stacks, cache.length, count, decode, capture)
    carry = (x, cache.keys, cache.values, cache.conv, cache.state)
    carry, captured = _run_pattern(config.layer_types, step, carry)
    x, keys, values, conv, state = carry
    hidden = rms_norm(x, decoder.final_norm[...], config.rms_norm_eps, execution.top)
    return hidden, Cache(keys, values, conv, state, cache.length + count), captured


def logits(decoder: Decoder, hidden: jax.Array, execution: Execution) -> jax.Array:
    """Logits float32 [..., vocab] of hidden [..., D], rounded only where the policy says so."""
    head = decoder.embed[...].T if decoder.lm_head is None else decoder.lm_head[...]
    return round_to(dot(hidden, head, execution.top), execution.top.logits)


def one_layer(config: ModelConfig, kind: str) -> ModelConfig:
    """The config of a model with a single layer of `kind`: whose cache `run_layer` takes."""
    return dataclasses.replace(config, num_layers=1, layer_types=(kind,))


def run_layer(
    decoder: Decoder,
    kind: str,
    index: jax.Array,
    x: jax.Array,
    cache: Cache,
    execution: Execution,
    *,
    decode: bool = False,
) -> tuple[jax.Array, Cache]:
    """One layer by itself: the `index`-th of its kind on x [B, T, D], under `execution.layers[0]`.

    `cache` is that of `one_layer`, with room for T more tokens; returns the new x and cache.
    """
    graph, params = nnx.split(decoder.linear if kind == LINEAR else decoder.full)
    stack = {kind: (graph, jax.tree.map(lambda leaf: _at(leaf, index)[None], params))}
    count, config = jnp.int32(x.shape[1]), one_layer(decoder.config, kind)
    step = _layer_step(config, (execution,), None, stack, cache.length, count, decode, None)
    carry = (x, cache.keys, cache.values, cache.conv, cache.state)
    (y, keys, values, conv, state), _ = step(kind, jnp.int32(0), carry)
    return y, Cache(keys, values, conv, state, cache.length + count)


Carry = tuple[jax.Array, ...]
Step = Callable[[str, jax.Array, Carry], tuple[Carry, jax.Array | None]]


def _layer_step(
    config: ModelConfig,
    executions: Sequence[Execution],
    which: jax.Array | None,
    stacks: Mapping[str, Any],
    start: jax.Array,
    count: jax.Array,
    decode: bool,
    capture: jax.Array | None,
) -> Step:
    """A function (kind, index among its kind, carry) -> (carry, captured)."""
    at = {
        kind: np.asarray([i for i, k in enumerate(config.layer_types) if k == kind], np.int32)
        for kind in (LINEAR, FULL)
    }
    plans = {
        kind: _distinct([[execution.layers[i] for i in at[kind]] for execution in executions])
        for kind in (LINEAR, FULL)
    }

    def run(kind: str, plan: Any, layer: Any, index: jax.Array, carry: Carry) -> Carry:
        x, keys, values, conv, state = carry
        if kind == LINEAR:
            y, new_conv, new_state = layer(
                x, _at(conv, index), _at(state, index), count, plan, config, decode
            )
            conv = _put(conv, new_conv, index)
            state = _put(state, new_state, index)
        else:
            y, keys, values = layer(x, keys, values, index, start, count, plan, config, decode)
        return store(y, plan.policy.activations).astype(x.dtype), keys, values, conv, state

    def step(kind: str, index: jax.Array, carry: Carry):
        graph, params = stacks[kind]
        layer = nnx.merge(graph, jax.tree.map(lambda leaf: _at(leaf, index), params))
        distinct, table = plans[kind]
        branches = [
            lambda operands, plan=plan: run(kind, plan, layer, index, operands) for plan in distinct
        ]
        if len(branches) == 1:
            carry = branches[0](carry)
        else:
            variant = 0 if which is None else which[at[kind]][index]
            carry = jax.lax.switch(jnp.asarray(table)[variant, index], branches, carry)
        seen = None if capture is None else carry[0][:, capture].astype(jnp.float32)
        return carry, seen

    return step


def _run_pattern(
    layer_types: tuple[str, ...], step: Step, carry: Carry
) -> tuple[Carry, jax.Array | None]:
    """Runs every layer in order; captured values come back in layer order."""
    unit, repeats = repeating_unit(layer_types)
    per_unit = {kind: unit.count(kind) for kind in (LINEAR, FULL)}

    def run_unit(repeat: jax.Array, layers: tuple[str, ...], carry: Carry):
        seen, position = [], {LINEAR: 0, FULL: 0}
        for kind, group in itertools.groupby(layers):
            length, first = len(list(group)), position[kind]

            def body(carry, offset, kind=kind, first=first):
                index = repeat * per_unit[kind] + first + offset
                return step(kind, index, carry)

            carry, out = jax.lax.scan(body, carry, jnp.arange(length, dtype=jnp.int32))
            position[kind] += length
            seen.append(out)
        return carry, None if seen[0] is None else jnp.concatenate(seen)

    carry, captured = jax.lax.scan(
        lambda carry, repeat: run_unit(repeat, unit, carry),
        carry,
        jnp.arange(repeats, dtype=jnp.int32),
    )
    tail = layer_types[len(unit) * repeats :]
    if captured is not None:
        captured = captured.reshape(-1, *captured.shape[2:])
    if tail:
        carry, more = run_unit(jnp.int32(repeats), tail, carry)
        captured = None if captured is None else jnp.concatenate([captured, more])
    return carry, captured


def repeating_unit(layer_types: tuple[str, ...]) -> tuple[tuple[str, ...], int]:
    """The prefix to repeat, and how often, that leaves the fewest layers to write out.

    A pattern that never repeats is one unit, once; what the repeats do not cover is the tail.
    """

    def repeats_of(size: int) -> int:
        repeats = 1
        while layer_types[repeats * size : (repeats + 1) * size] == layer_types[:size]:
            repeats += 1
        return repeats

    total = len(layer_types)
    written_out = {size: size + total - size * repeats_of(size) for size in range(1, total + 1)}
    size = min(written_out, key=lambda size: (written_out[size], -size * repeats_of(size)))
    return layer_types[:size], repeats_of(size)


def _at(stack: jax.Array, index: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(stack, index, keepdims=False)


def _put(stack: jax.Array, value: jax.Array, index: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(stack, value.astype(stack.dtype), index, 0)


def _distinct(plans: Sequence[Sequence[Any]]) -> tuple[list[Any], np.ndarray]:
    """The different plans in order of appearance, and which each execution's layers have.

    The table is int32 [executions, layers].
    """
    distinct = list(dict.fromkeys(plan for layers in plans for plan in layers))
    table = [[distinct.index(plan) for plan in layers] for layers in plans]
    return distinct, np.asarray(table, np.int32)

"""The two programs of a recording with abstract arguments: a prefill window and a decode step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kernjax.model import (
    Cache,
    Decoder,
    Execution,
    ModelConfig,
    forward,
    init_cache,
    logits,
    plan_execution,
)
from kernjax.model.params import DTYPES, abstract_params, leaves, tree_of
from kernjax.precision import Policy
from kernjax.scoring.positions import prefill_positions
from kernjax.scoring.rows import score_rows
from kernjax.weights.sharding import (
    cache_shardings,
    expert_placement,
    param_shardings,
    partition_spec,
)

_SLOTS = 512  # the cache's capacity is a multiple


@dataclasses.dataclass(frozen=True)
class Setup:
    """What is planned: a model, how it is computed, on how much text, on which devices."""

    config: ModelConfig
    policy: Policy
    mesh: Mesh
    context: int
    batch: int

    @property
    def window(self) -> int:
        """Tokens of a prefill call."""
        return min(self.policy.prefill_window, self.context)

    @property
    def capacity(self) -> int:
        """Slots of the cache: the context and decode steps after it."""
        return (self.context // _SLOTS + 1) * _SLOTS

    @property
    def scored(self) -> int:
        """Positions of the last window whose logits are made."""
        positions = prefill_positions(self.context, self.window, ())
        return int((positions >= self.context - self.window).sum())


@dataclasses.dataclass(frozen=True)
class Program:
    """A function, its abstract arguments (with shardings), and which of them it overwrites."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    donated: tuple[int, ...]
    out_shardings: Any


def abstract_weights(setup: Setup) -> dict[str, Any]:
    """The parameter tree as ShapeDtypeStructs with their shardings, in the policy's dtype."""
    shardings = dict(leaves(param_shardings(setup.config, setup.mesh)))
    held = DTYPES.get(setup.policy.weights.storage_dtype.name, DTYPES["float32"])
    return tree_of(
        (path, jax.ShapeDtypeStruct(spec.shape, spec.dtype(held), sharding=shardings[path]))
        for path, spec in leaves(abstract_params(setup.config))
    )


def abstract_cache(setup: Setup) -> Cache:
    """The cache as ShapeDtypeStructs with their shardings."""
    execution = _execution(setup)
    shapes = jax.eval_shape(
        lambda: init_cache(setup.config, execution, setup.batch, setup.capacity)
    )
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        cache_shardings(setup.config, shapes, setup.mesh),
    )


def prefill_window(setup: Setup) -> Program:
    """Window of tokens, cache -> cache, rows of the scored positions."""
    execution = _execution(setup)

    def window(params, tokens, cache, columns, targets):
        decoder = Decoder(setup.config, params)
        states, cache, _ = forward(decoder, tokens, cache, execution)
        chosen = jnp.take_along_axis(states, columns[:, :, None], axis=1)
        return cache, score_rows(logits(decoder, chosen, execution), targets)

    rows = _tokens(setup, setup.scored)
    return _program(setup, window, _tokens(setup, setup.window), rows, rows)


def decode_step(setup: Setup) -> Program:
    """One token, cache -> cache, its row."""
    execution = _execution(setup)

    def step(params, token, cache, target):
        decoder = Decoder(setup.config, params)
        states, cache, _ = forward(decoder, token, cache, execution, decode=True)
        return cache, score_rows(logits(decoder, states[:, 0], execution), target[:, 0])

    return _program(setup, step, _tokens(setup, 1), _tokens(setup, 1))


def _execution(setup: Setup) -> Execution:
    experts = expert_placement(setup.config, setup.mesh)
    return plan_execution(setup.policy, setup.config.num_layers, experts=experts)


def _tokens(setup: Setup, width: int) -> jax.ShapeDtypeStruct:
    shape = (setup.batch, width)
    spec = partition_spec(("batch", "sequence"), shape, setup.mesh)
    return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=NamedSharding(setup.mesh, spec))


def _program(
    setup: Setup,
    function: Callable[..., Any],
    tokens: jax.ShapeDtypeStruct,
    *rows: jax.ShapeDtypeStruct,
) -> Program:
    cache = abstract_cache(setup)
    arguments = (abstract_weights(setup), tokens, cache, *rows)
    kept = jax.tree.map(lambda leaf: leaf.sharding, cache)
    # Rows are small and go to the host: every device may hold them.
    return Program(function, arguments, (2,), (kept, NamedSharding(setup.mesh, PartitionSpec())))

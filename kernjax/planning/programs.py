"""The two programs of a recording with abstract arguments: a prefill window and a decode step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

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
from kernjax.model.config import STACKS
from kernjax.model.packed import Packed
from kernjax.model.params import DTYPES, LeafPath, ParamSpec, abstract_params, leaves, tree_of
from kernjax.precision import Policy
from kernjax.scoring.placement import Placement
from kernjax.scoring.positions import prefill_positions
from kernjax.scoring.rows import score_rows
from kernjax.weights.packing import abstract_packed
from kernjax.weights.quantisation import MXFP4, Scheme
from kernjax.weights.sharding import (
    cache_shardings,
    mesh_plans,
    param_shardings,
    partition_spec,
)

_SLOTS = 512  # the cache's capacity is a multiple


@dataclasses.dataclass(frozen=True)
class Setup:
    """What is planned: a model, how it is computed, on how much text, on which devices.

    `quantised`: how the checkpoint holds its matrices; None: it is not quantised.
    """

    config: ModelConfig
    policy: Policy
    mesh: Mesh
    context: int
    batch: int
    quantised: Scheme | None = None

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
    """The parameter tree as ShapeDtypeStructs with their shardings, in the policy's dtype.

    Quantised ones as they lie in the file where the policy keeps them so (`dequantise=layer`).
    """
    shardings = dict(leaves(param_shardings(setup.config, setup.mesh)))
    held = DTYPES.get(setup.policy.weights.storage_dtype.name, DTYPES["float32"])

    def abstract(path: LeafPath, spec: ParamSpec) -> jax.ShapeDtypeStruct | Packed:
        sharding, dtype = shardings[path], spec.dtype(held)
        if setup.policy.dequantise == "layer" and is_quantised(setup, path, spec):
            return abstract_packed(spec, setup.quantised, sharding, dtype)
        return jax.ShapeDtypeStruct(spec.shape, dtype, sharding=sharding)

    tree = abstract_params(setup.config)
    return tree_of((path, abstract(path, spec)) for path, spec in leaves(tree))


def is_quantised(setup: Setup, path: LeafPath, spec: ParamSpec) -> bool:
    """Whether published checkpoints of this format have the parameter quantised.

    FP8: the layers' matrices of at least a block each way. MXFP4: a mixture's routed experts; in a
    dense model as FP8's.
    """
    if setup.quantised is None or path[0] not in STACKS or spec.keep_float32:
        return False
    if isinstance(setup.quantised, MXFP4) and setup.config.moe is not None:
        return "experts" in path
    least = max(setup.quantised.block)
    return len(spec.shape) >= 3 and min(spec.shape[-2:]) >= least


def abstract_cache(setup: Setup) -> Cache:
    """The cache as ShapeDtypeStructs with their shardings."""
    execution, place = _execution(setup), _placement(setup)
    shapes = jax.eval_shape(
        lambda: init_cache(setup.config, execution, setup.batch, place.slots(setup.capacity))
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
    return _program(setup, window, "wbcbb", _tokens(setup, setup.window), rows, rows)


def decode_step(setup: Setup) -> Program:
    """One token, cache -> cache, its row."""
    execution = _execution(setup)

    def step(params, token, cache, target):
        decoder = Decoder(setup.config, params)
        states, cache, _ = forward(decoder, token, cache, execution, decode=True)
        return cache, score_rows(logits(decoder, states[:, 0], execution), target[:, 0])

    return _program(setup, step, "wbcb", _tokens(setup, 1), _tokens(setup, 1))


def _execution(setup: Setup) -> Execution:
    on_mesh = mesh_plans(setup.config, setup.mesh)
    return plan_execution(setup.policy, setup.config.num_layers, **on_mesh)


def _placement(setup: Setup) -> Placement:
    return Placement(setup.config, _execution(setup), setup.mesh)


def _tokens(setup: Setup, width: int) -> jax.ShapeDtypeStruct:
    shape = (setup.batch, width)
    spec = partition_spec(("batch", None), shape, setup.mesh)
    return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=NamedSharding(setup.mesh, spec))


def _program(
    setup: Setup,
    function: Callable[..., Any],
    takes: str,
    tokens: jax.ShapeDtypeStruct,
    *rows: jax.ShapeDtypeStruct,
) -> Program:
    """Of a function that gives (cache, rows); `takes` as in `Placement.by_parts`."""
    place = _placement(setup)
    arguments = (abstract_weights(setup), tokens, abstract_cache(setup), *rows)
    function = place.by_parts(function, takes, "cb")
    return Program(function, arguments, (2,), (place.cache, place.rows))

"""Where a batch lies: on the default device, or over a mesh, maybe of many hosts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from kernjax.model import Cache, Execution, ModelConfig, init_cache
from kernjax.weights.sharding import RULES, cache_shardings

_BATCH, _SLOTS = RULES["batch"], RULES["slots"]


class Placement:
    """Puts tokens, ids and caches on a mesh by the rules of `kernjax.weights.sharding`.

    `cache` and `rows` are what a program's outputs are sharded as (None without a mesh): rows are
    small and go to the host, so every device gets them all.
    """

    def __init__(
        self, config: ModelConfig, stored: Execution, mesh: Mesh | AbstractMesh | None
    ) -> None:
        self._config, self._stored, self._mesh = config, stored, mesh
        self.cache: Any = None
        self.rows: Any = None
        self._makers: dict[tuple[int, int], Any] = {}  # compiled, by batch and capacity
        if mesh is not None:
            self.cache = self._cache_shardings()
            self.rows = NamedSharding(mesh, PartitionSpec())

    def by_parts(self, function: Callable[..., Any], takes: str, gives: str) -> Any:
        """`function`, each part of the mesh's axes `data` and `sequence` by itself.

        A letter says what an argument or result is: `w` whole on every part (weights), `c` the
        cache, `b` with the batch as its first axis. Nothing is exchanged over `data`: left to the
        compiler, attention, which goes over sequences one by one, would bring all of them to every
        device. Over `sequence`, attention merges what the parts of the cache give; all else is
        computed alike by every part.
        """
        parted = self.parted
        if not parted:
            return function

        def only_parted(spec: PartitionSpec) -> PartitionSpec:
            return PartitionSpec(*(axis if axis in parted else None for axis in spec))

        cache = jax.tree.map(lambda sharding: only_parted(sharding.spec), self.cache)
        specs = {"w": PartitionSpec(), "b": only_parted(PartitionSpec(_BATCH)), "c": cache}
        results = tuple(specs[letter] for letter in gives)
        return jax.shard_map(
            function,
            mesh=self._mesh,
            in_specs=tuple(specs[letter] for letter in takes),
            out_specs=results if len(results) > 1 else results[0],
            axis_names=parted,
            check_vma=False,
        )

    @property
    def parted(self) -> set[str]:
        """The mesh axes whose parts run by themselves; over the others the compiler divides the
        work, or what runs (a mixture of experts) does."""
        return {axis for axis in (_BATCH, _SLOTS) if self._shards(axis) > 1}

    def filled(self, batch: int) -> int:
        """The least number of sequences, at least `batch`, that the mesh can split."""
        return _multiple(batch, self._shards(_BATCH))

    def slots(self, capacity: int) -> int:
        """The least number of cache slots, at least `capacity`, that the mesh can split."""
        return _multiple(capacity, self._shards(_SLOTS))

    def put(self, array: np.ndarray | None) -> Any:
        """An array [batch, ...] on the devices; every host holds the whole of it and puts its part.

        None stays None: an argument that is left out.
        """
        if array is None:
            return None
        if self._mesh is None:
            return jnp.asarray(array)
        sharding = NamedSharding(self._mesh, PartitionSpec(_BATCH))
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    def empty_cache(self, batch: int, capacity: int) -> Cache:
        """`init_cache` with at least that capacity, each device holding its part from the start."""
        capacity = self.slots(capacity)
        if self._mesh is None:
            return init_cache(self._config, self._stored, batch, capacity)
        if (batch, capacity) not in self._makers:
            make = functools.partial(init_cache, self._config, self._stored, batch, capacity)
            self._makers[batch, capacity] = jax.jit(make, out_shardings=self.cache)
        return self._makers[batch, capacity]()

    def _shards(self, axis: str) -> int:
        return 1 if self._mesh is None else self._mesh.shape[axis]

    def _cache_shardings(self) -> Any:
        batch, slots = self.filled(1), self.slots(1)
        shapes = jax.eval_shape(lambda: init_cache(self._config, self._stored, batch, slots))
        return cache_shardings(self._config, shapes, self._mesh)


def _multiple(count: int, of: int) -> int:
    return -(-count // of) * of

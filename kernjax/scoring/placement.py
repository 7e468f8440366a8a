"""Where a batch lies: on the default device, or over a mesh, maybe of many hosts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kernjax.model import Cache, Execution, ModelConfig, init_cache
from kernjax.weights.sharding import RULES, cache_shardings

_BATCH = RULES["batch"]
_JAXLIB = tuple(int(part) for part in version("jaxlib").split(".")[:2])


class Placement:
    """Puts tokens, ids and caches on a mesh by the rules of `kernjax.weights.sharding`.

    `cache` and `rows` are what a program's outputs are sharded as (None without a mesh): rows are
    small and go to the host, so every device gets them all.
    """

    def __init__(self, config: ModelConfig, stored: Execution, mesh: Mesh | None) -> None:
        self._config, self._stored, self._mesh = config, stored, mesh
        self.cache: Any = None
        self.rows: Any = None
        self._makers: dict[tuple[int, int], Any] = {}  # compiled, by batch and capacity
        if mesh is not None:
            self.cache = self._cache_shardings(self.filled(1))
            self.rows = NamedSharding(mesh, PartitionSpec())

    def by_sequences(self, function: Callable[..., Any], takes: str, gives: str) -> Any:
        """`function`, each part of the `data` axis by itself: nothing is exchanged over it.

        A letter says what an argument or result is: `w` whole on every part (weights), `c` the
        cache, `b` with the batch as its first axis. Left to the compiler, attention, which goes
        over sequences one by one, would bring all of them to every device.
        """
        if not self.is_split:
            return function
        cache = jax.tree.map(lambda sharding: _only_batch(sharding.spec), self.cache)
        specs = {"w": PartitionSpec(), "b": PartitionSpec(_BATCH), "c": cache}
        results = tuple(specs[letter] for letter in gives)
        return jax.shard_map(
            function,
            mesh=self._mesh,
            in_specs=tuple(specs[letter] for letter in takes),
            out_specs=results if len(results) > 1 else results[0],
            axis_names={_BATCH},
            check_vma=False,
        )

    @property
    def is_split(self) -> bool:
        """Whether the parts of `data` run by themselves; if not, the compiler divides the work."""
        if self._mesh is None or self._mesh.shape[_BATCH] == 1:
            return False
        others = sum(size > 1 for axis, size in self._mesh.shape.items() if axis != _BATCH)
        # The mixture of experts divides the whole mesh by itself. XLA of jaxlib 0.12 ends the
        # process over the embedding's gather (a failed check in ExpandDeviceGroupsWithIota) where
        # two more axes are left to it.
        return self._config.moe is None and (others < 2 or _JAXLIB < (0, 11))

    def filled(self, batch: int) -> int:
        """The least number of sequences, at least `batch`, that the mesh can split."""
        shards = 1 if self._mesh is None else self._mesh.shape[_BATCH]
        return -(-batch // shards) * shards

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
        """`init_cache`, each device holding its part from the start."""
        if self._mesh is None:
            return init_cache(self._config, self._stored, batch, capacity)
        if (batch, capacity) not in self._makers:
            make = functools.partial(init_cache, self._config, self._stored, batch, capacity)
            self._makers[batch, capacity] = jax.jit(make, out_shardings=self.cache)
        return self._makers[batch, capacity]()

    def _cache_shardings(self, batch: int) -> Any:
        shapes = jax.eval_shape(lambda: init_cache(self._config, self._stored, batch, 1))
        return cache_shardings(self._config, shapes, self._mesh)


def _only_batch(spec: PartitionSpec) -> PartitionSpec:
    return PartitionSpec(*(axis if axis == _BATCH else None for axis in spec))

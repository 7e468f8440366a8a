"""An HF directory as the decoder's parameters: jax arrays, on one device or sharded over a mesh.

Each process reads only the bytes its devices hold. Small parameters are stacked on the host; a
large stack is allocated on the devices and filled layer by layer in place, so that the host never
holds more than one layer's tensor per device. `np.memmap` reads: a slice touches only its pages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import DTypeLike
from tqdm import tqdm

from kernjax.model import Decoder
from kernjax.model.config import ModelConfig
from kernjax.model.params import tree_of, weight_dtype
from kernjax.weights.match import text_tensors
from kernjax.weights.names import Leaf, Part, table
from kernjax.weights.sharding import partition_spec
from kernjax.weights.sources import Source

# Stacks up to this size (of the whole parameter, in bytes) are assembled on the host, without
# compiling anything.
_HOST_STACK_BYTES = 64 << 20

Index = tuple[slice, ...]


def load_params(
    directory: str | Path,
    config: ModelConfig,
    *,
    dtype: str | DTypeLike | None = None,
    mesh: Mesh | None = None,
    progress: bool = False,
) -> dict[str, Any]:
    """The parameters of the checkpoint in `directory`, as the tree of `abstract_params(config)`.

    `dtype` None keeps each parameter's own dtype, by its tensor headers (the widest, where layers
    differ; of quantised weights, one that holds their values); otherwise bfloat16, float16 or
    float32. Quantised weights are dequantised as they are read. Norms, A_log and dt_bias are
    float32 always.
    With a `mesh` the arrays are global and sharded by `sharding.RULES`; without, they lie on the
    default device. `progress` draws a bar on standard error.

    UserError, before any data is read, where the directory and `config` do not match.
    """
    wanted = None if dtype is None else weight_dtype(dtype)
    leaves = table(config)
    specs = {  # before reading: a mesh that does not fit is an error now
        leaf.path: partition_spec(leaf.spec.axes, leaf.spec.units, mesh) if mesh else None
        for leaf in leaves
    }
    tensors = text_tensors(directory, config)
    total = sum(_source_bytes(tensors, leaf, part) for leaf in leaves for part in leaf.parts)
    with tqdm(total=total, desc="loading", unit="B", unit_scale=True, disable=not progress) as bar:

        def load(leaf: Leaf) -> jax.Array:
            own = [tensors[part.name].value_dtype for part in leaf.parts]
            target = leaf.spec.dtype(_widest(own) if wanted is None else wanted)
            return _load_leaf(leaf, tensors, target, _Placement(mesh, specs[leaf.path]), bar)

        return tree_of((leaf.path, load(leaf)) for leaf in leaves)


def _widest(dtypes: list[np.dtype]) -> np.dtype:
    """One dtype that holds all of these exactly: bfloat16 and float16 meet in float32."""
    return dtypes[0] if len(set(dtypes)) == 1 else np.dtype(np.float32)


def _source_bytes(tensors: Mapping[str, Source], leaf: Leaf, part: Part) -> int:
    """Bytes of the file that become this part of this leaf (q_proj serves two leaves)."""
    source = tensors[part.name]
    return source.nbytes * math.prod(leaf.part_shape) // math.prod(source.shape)


class _Placement:
    """Puts host data where it belongs: the default device, or each device's slice of a mesh."""

    def __init__(self, mesh: Mesh | None, spec: PartitionSpec | None) -> None:
        self.mesh, self.spec = mesh, spec

    def of_one_layer(self) -> _Placement:
        spec = None if self.spec is None else PartitionSpec(*self.spec[1:])
        return _Placement(self.mesh, spec)

    @property
    def sharding(self) -> NamedSharding | None:
        return None if self.mesh is None else NamedSharding(self.mesh, self.spec)

    def put(
        self, shape: tuple[int, ...], dtype: np.dtype, read: Callable[[Index], np.ndarray]
    ) -> jax.Array:
        """An array whose slices come from `read`; a slice that several devices hold is read once.

        `read` gets explicit bounds and must return memory that nobody will change.
        """
        if self.sharding is None:
            return jax.device_put(read(tuple(slice(0, size) for size in shape)))
        cache: dict[tuple[tuple[int, int], ...], np.ndarray] = {}

        def read_once(index: Index) -> np.ndarray:
            bounds = tuple(s.indices(size)[:2] for s, size in zip(index, shape, strict=True))
            if bounds not in cache:
                cache[bounds] = read(tuple(slice(*pair) for pair in bounds))
            return cache[bounds]

        return jax.make_array_from_callback(shape, self.sharding, read_once, dtype=dtype)


def _load_leaf(
    leaf: Leaf,
    tensors: Mapping[str, Source],
    dtype: np.dtype,
    placement: _Placement,
    bar: tqdm,
) -> jax.Array:
    def read_part(part: Part, index: Index) -> np.ndarray:
        return tensors[part.name].read(part.layout, index, dtype)

    def done(part: Part) -> None:
        bar.update(_source_bytes(tensors, leaf, part))

    shape = leaf.spec.shape
    if not leaf.stacked:
        (part,) = leaf.parts
        result = placement.put(shape, dtype, partial(read_part, part))
        done(part)
        return result

    if leaf.spec.size * dtype.itemsize <= _HOST_STACK_BYTES:

        def read_stack(index: Index) -> np.ndarray:
            pieces = [read_part(part, index[1:]) for part in leaf.parts[index[0]]]
            # Filled in the files' order (the last axis of a matrix outermost): see layouts.py.
            reverse = np.empty((len(pieces), *pieces[0].shape[::-1]), dtype)
            stack = reverse.transpose(0, *range(reverse.ndim - 1, 0, -1))
            for layer, piece in enumerate(pieces):
                stack[layer] = piece
            return stack

        result = placement.put(shape, dtype, read_stack)
        for part in leaf.parts:
            done(part)
        return result

    one_layer = placement.of_one_layer()
    stack = jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=placement.sharding)()
    # Donated: updated in place, so that the devices hold one stack and one layer.
    insert = jax.jit(
        lambda stack, layer, at: jax.lax.dynamic_update_index_in_dim(stack, layer, at, 0),
        donate_argnums=0,
        out_shardings=placement.sharding,
    )
    for at, part in enumerate(leaf.parts):
        layer = one_layer.put(leaf.part_shape, dtype, partial(read_part, part))
        stack = insert(stack, layer, at)
        done(part)
    return stack


def load_model(
    directory: str | Path,
    *,
    dtype: str | DTypeLike | None = None,
    mesh: Mesh | None = None,
    progress: bool = False,
) -> Decoder:
    """The decoder of an HF directory: its own config.json, and `load_params`."""
    config = ModelConfig.from_directory(directory)
    params = load_params(directory, config, dtype=dtype, mesh=mesh, progress=progress)
    return Decoder(config, params)

"""An HF directory as the decoder's parameters: jax arrays, on one device or sharded over a mesh.

Each process reads only the bytes its devices hold, one device's slice after another. Small
parameters are stacked on the host; a large stack is allocated on the devices and filled layer by
layer in place. The host holds the slice it reads, and the one before while that is on its way to a
device: never more.
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
from kernjax.weights.converted import is_converted, load_converted
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
    default device. `progress` draws a bar on standard error, of the bytes that this process reads.

    UserError, before any data is read, where the directory and `config` do not match.
    """
    if is_converted(directory):
        return load_converted(directory, config, dtype=dtype, mesh=mesh)
    wanted = None if dtype is None else weight_dtype(dtype)
    leaves = table(config)
    specs = {  # before reading: a mesh that does not fit is an error now
        leaf.path: partition_spec(leaf.spec.axes, leaf.spec.units, mesh) if mesh else None
        for leaf in leaves
    }
    tensors = text_tensors(directory, config)
    placements = {leaf.path: _Placement(mesh, specs[leaf.path]) for leaf in leaves}
    total = sum(
        _file_bytes(tensors[part.name], leaf.part_shape) * placements[leaf.path].share(leaf)
        for leaf in leaves
        for part in leaf.parts
    )
    with tqdm(
        total=round(total), desc="loading", unit="B", unit_scale=True, disable=not progress
    ) as bar:

        def load(leaf: Leaf) -> jax.Array:
            own = [tensors[part.name].value_dtype for part in leaf.parts]
            target = leaf.spec.dtype(_widest(own) if wanted is None else wanted)
            return _load_leaf(leaf, tensors, target, placements[leaf.path], bar.update)

        tree = tree_of((leaf.path, load(leaf)) for leaf in leaves)
        bar.update(bar.total - bar.n)  # what rounding left over
        return tree


def _widest(dtypes: list[np.dtype]) -> np.dtype:
    """One dtype that holds all of these exactly: bfloat16 and float16 meet in float32."""
    return dtypes[0] if len(set(dtypes)) == 1 else np.dtype(np.float32)


def _file_bytes(source: Source, shape: tuple[int, ...]) -> float:
    """Bytes of the file that become an array of `shape` (q_proj serves two leaves)."""
    return source.nbytes * math.prod(shape) / math.prod(source.shape)


def _shape_of(index: Index) -> tuple[int, ...]:
    return tuple(part.stop - part.start for part in index)


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

    def slices(self, shape: tuple[int, ...]) -> list[tuple[Index, list[jax.Device | None]]]:
        """The slices that this process's devices hold, each with all that hold it."""
        if self.sharding is None:
            return [(tuple(slice(0, size) for size in shape), [None])]
        holders: dict[tuple[tuple[int, int], ...], list[jax.Device | None]] = {}
        for device, index in self.sharding.addressable_devices_indices_map(shape).items():
            bounds = tuple(s.indices(size)[:2] for s, size in zip(index, shape, strict=True))
            holders.setdefault(bounds, []).append(device)
        return [(tuple(slice(*pair) for pair in bounds), at) for bounds, at in holders.items()]

    def share(self, leaf: Leaf) -> float:
        """How much of the leaf this process reads: 1 is all of it, once."""
        held = sum(math.prod(_shape_of(index)) for index, _ in self.slices(leaf.spec.shape))
        return held / leaf.spec.size

    def put(self, shape: tuple[int, ...], read: Callable[[Index], np.ndarray]) -> jax.Array:
        """An array whose slices come from `read`; a slice that several devices hold is read once.

        `read` gets explicit bounds and must return memory that nobody will change.
        """
        pieces: list[jax.Array] = []
        for index, devices in self.slices(shape):
            values = read(index)
            # The one before has to be gone by now: two slices are held, never all.
            jax.block_until_ready(pieces)
            pieces += [jax.device_put(values, device) for device in devices]
        if self.sharding is None:
            return pieces[0]
        return jax.make_array_from_single_device_arrays(shape, self.sharding, pieces)


def _load_leaf(
    leaf: Leaf,
    tensors: Mapping[str, Source],
    dtype: np.dtype,
    placement: _Placement,
    done: Callable[[float], Any],
) -> jax.Array:
    """One parameter; `done` is told the bytes that were read."""

    def read_part(part: Part, index: Index) -> np.ndarray:
        values = tensors[part.name].read(part.layout, index, dtype)
        done(_file_bytes(tensors[part.name], _shape_of(index)))
        return values

    shape = leaf.spec.shape
    if not leaf.stacked:
        (part,) = leaf.parts
        return placement.put(shape, partial(read_part, part))

    if leaf.spec.size * dtype.itemsize <= _HOST_STACK_BYTES:

        def read_stack(index: Index) -> np.ndarray:
            pieces = [read_part(part, index[1:]) for part in leaf.parts[index[0]]]
            # Filled in the files' order (the last axis of a matrix outermost): see layouts.py.
            reverse = np.empty((len(pieces), *pieces[0].shape[::-1]), dtype)
            stack = reverse.transpose(0, *range(reverse.ndim - 1, 0, -1))
            for layer, piece in enumerate(pieces):
                stack[layer] = piece
            return stack

        return placement.put(shape, read_stack)

    one_layer = placement.of_one_layer()
    stack = jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=placement.sharding)()
    # Donated: updated in place, so that the devices hold one stack and one layer.
    insert = jax.jit(
        lambda stack, layer, at: jax.lax.dynamic_update_index_in_dim(stack, layer, at, 0),
        donate_argnums=0,
        out_shardings=placement.sharding,
    )
    layer = None
    for at, part in enumerate(leaf.parts):
        jax.block_until_ready(layer)  # two layers may be on their way
        layer = one_layer.put(leaf.part_shape, partial(read_part, part))
        stack = insert(stack, layer, at)
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

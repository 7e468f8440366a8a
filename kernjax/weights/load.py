"""An HF directory as the decoder's parameters: jax arrays, on one device or sharded over a mesh.

Each process reads only the bytes its devices hold, one device's slice after another. Small
parameters are stacked on the host; a large stack is allocated on the devices and filled layer by
layer in place. The host holds the slice it reads, and the one before while that is on its way to a
device: never more.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import DTypeLike

from kernjax.base.progress import Work
from kernjax.model import Decoder
from kernjax.model.config import ModelConfig
from kernjax.model.packed import Packed
from kernjax.model.params import abstract_params, tree_of, weight_dtype
from kernjax.model.params import leaves as walk
from kernjax.weights.converted import is_converted, load_converted, refuse_packed
from kernjax.weights.match import text_tensors
from kernjax.weights.names import Leaf, Part, experts_in, table
from kernjax.weights.packing import Content, codes_and_scales, file_bytes, is_packable, values
from kernjax.weights.sharding import partition_spec

# Stacks up to this size (of the whole parameter, in bytes) are assembled on the host, without
# compiling anything.
_HOST_STACK_BYTES = 64 << 20

_EXPERTS_AT_ONCE = 64

Index = tuple[slice, ...]


def load_params(
    directory: str | Path,
    config: ModelConfig,
    *,
    dtype: str | DTypeLike | None = None,
    mesh: Mesh | None = None,
    packed: bool = False,
    progress: bool = False,
) -> dict[str, Any]:
    """The parameters of the checkpoint in `directory`, as the tree of `abstract_params(config)`.

    `dtype` None keeps each parameter's own dtype, by its tensor headers (the widest, where layers
    differ; of quantised weights, one that holds their values); otherwise bfloat16, float16 or
    float32. Norms, A_log and dt_bias are float32 always. Quantised weights are dequantised as they
    are read, or with `packed` held as they are (`kernjax.model.packed.Packed`): of parameters that
    are quantised in every layer, but for the embedding and what is float32 always.
    With a `mesh` the arrays are global and sharded by `sharding.RULES`; without, they lie on the
    default device. `progress` shows the bytes that this process reads on standard error (`Work`).

    UserError, before any data is read, where the directory and `config` do not match, and where
    `packed` finds nothing to hold.
    """
    if is_converted(directory):
        return load_converted(directory, config, dtype=dtype, mesh=mesh, packed=packed)
    wanted = None if dtype is None else weight_dtype(dtype)
    specs = {  # before reading: a mesh that does not fit is an error now
        path: partition_spec(spec.axes, spec.units, mesh) if mesh else None
        for path, spec in walk(abstract_params(config))
    }
    tensors = text_tensors(directory, config)
    leaves = table(config, experts_in(tensors, config))
    placements = {path: _Placement(mesh, spec) for path, spec in specs.items()}
    total = sum(
        sum(file_bytes(tensors[part.name], leaf.part_shape) for part in leaf.parts)
        * placements[leaf.path].share(leaf)
        for leaf in leaves
    )
    shown = progress and jax.process_index() == 0
    kept = {
        leaf.path: codes_and_scales(leaf, tensors, specs[leaf.path], mesh)
        for leaf in leaves
        if packed and is_packable(leaf, tensors)
    }
    if packed and not kept:
        refuse_packed(directory)
    with Work("reading weights", "B", total, shown=shown) as work:

        def load(leaf: Leaf) -> jax.Array | Packed:
            own = [tensors[part.name].value_dtype for part in leaf.parts]
            target = leaf.spec.dtype(_widest(own) if wanted is None else wanted)
            contents = kept.get(leaf.path) or [values(leaf, tensors, target)]
            arrays = [
                _load_array(leaf, content, placements[leaf.path], work.advance)
                for content in contents
            ]
            return Packed(*arrays, target) if leaf.path in kept else arrays[0]

        return tree_of((leaf.path, load(leaf)) for leaf in leaves)


def _widest(dtypes: list[np.dtype]) -> np.dtype:
    """One dtype that holds all of these exactly: bfloat16 and float16 meet in float32."""
    return dtypes[0] if len(set(dtypes)) == 1 else np.dtype(np.float32)


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


def _load_array(
    leaf: Leaf, content: Content, placement: _Placement, done: Callable[[float], Any]
) -> jax.Array:
    """One array of a parameter; `done` is told the bytes that were read."""
    shape, dtype = content.shape, content.dtype
    of_a_part = math.prod(shape[len(leaf.stack) :])

    def read(index: Index) -> np.ndarray:
        """array[index]; in the axes counted by parts, all that the slices name."""
        lead, rest = index[: len(leaf.stack)], index[len(leaf.stack) :]
        parts = _parts(leaf, lead)
        apply = _in_threads if len(leaf.stack) > 1 else map
        share = math.prod(_shape_of(rest)) / of_a_part
        sizes = [content.nbytes(part) * share for part in parts]
        pieces = _counted(apply(content.read, parts, itertools.repeat(rest)), sizes, done)
        if len(parts) == 1:
            return next(pieces)[(None,) * len(lead)]
        return _stacked(pieces, _shape_of(lead), dtype)

    if not leaf.stack or math.prod(shape) * dtype.itemsize <= _HOST_STACK_BYTES:
        return placement.put(shape, read)

    one_layer = placement.of_one_layer()
    stack = jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=placement.sharding)()
    # Donated: updated in place, so that the devices hold one stack and one layer.
    insert = jax.jit(
        lambda stack, layer, at: jax.lax.dynamic_update_index_in_dim(stack, layer, at, 0),
        donate_argnums=0,
        out_shardings=placement.sharding,
    )
    layer = None
    for at in range(leaf.stack[0]):

        def read_layer(index: Index, at: int = at) -> np.ndarray:
            return read((slice(at, at + 1), *index))[0]

        jax.block_until_ready(layer)  # two layers may be on their way
        layer = one_layer.put(shape[1:], read_layer)
        stack = insert(stack, layer, at)
    return stack


def _parts(leaf: Leaf, lead: Index) -> list[Part]:
    """The parts that slices of the leaf's leading axes name, in order."""
    numbers = np.arange(len(leaf.parts)).reshape(leaf.stack)[lead]
    return [leaf.parts[number] for number in numbers.ravel()]


def _counted(
    pieces: Iterable[np.ndarray], sizes: Iterable[float], done: Callable[[float], Any]
) -> Iterator[np.ndarray]:
    """`pieces`; `done` is told each one's size when it is there."""
    for piece, size in zip(pieces, sizes, strict=True):
        done(size)
        yield piece


def _in_threads(
    read: Callable[[Part, Index], np.ndarray], parts: list[Part], index: Iterable[Index]
) -> Iterator[np.ndarray]:
    """As `map`. Experts are many and small: a thread each, where large tensors are read by several.

    Some at a time: what has been read waits in memory until it is taken.
    """
    for start in range(0, len(parts), _EXPERTS_AT_ONCE):
        yield from _threads().map(read, parts[start : start + _EXPERTS_AT_ONCE], index)


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(16, os.cpu_count() or 1), thread_name_prefix="experts")


def _stacked(pieces: Iterable[np.ndarray], lead: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """[*lead, ...] of as many pieces, each in the order it has in memory: see layouts.py."""
    stack = None
    for number, piece in enumerate(pieces):
        if stack is None:
            order = sorted(range(piece.ndim), key=lambda axis: -piece.strides[axis])
            shape = tuple(piece.shape[axis] for axis in order)
            back = np.argsort(order)
            stack = np.empty((math.prod(lead), *shape), dtype).transpose(0, *(1 + back))
        stack[number] = piece
    assert stack is not None
    return stack.reshape(*lead, *stack.shape[1:])


def load_model(
    directory: str | Path,
    *,
    dtype: str | DTypeLike | None = None,
    mesh: Mesh | None = None,
    packed: bool = False,
    progress: bool = False,
) -> Decoder:
    """The decoder of an HF directory: its own config.json, and `load_params`."""
    config = ModelConfig.from_directory(directory)
    params = load_params(
        directory, config, dtype=dtype, mesh=mesh, packed=packed, progress=progress
    )
    return Decoder(config, params)

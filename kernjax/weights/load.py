"""An HF directory as the decoder's parameters: jax arrays, on one device or sharded over a mesh.

Each process reads only the bytes its devices hold, one device's slice after another, in bands that
threads read, turn and convert straight into the slice's place on the host; bands of what follows
are read while a slice is on its way. On a CPU the slice is the array: jax takes it over as it is.
Elsewhere a large stack is allocated on the devices and filled layer by layer, and the host holds
the slice it fills, one before that on its way if that is small, and some bands.
"""

from __future__ import annotations

import collections
import functools
import gc
import itertools
import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import DTypeLike

from kernjax.base.progress import Work
from kernjax.model import Decoder
from kernjax.model.config import ModelConfig
from kernjax.model.packed import Packed
from kernjax.model.params import LeafPath, abstract_params, tree_of, weight_dtype
from kernjax.model.params import leaves as walk
from kernjax.weights.converted import is_converted, load_converted, refuse_packed
from kernjax.weights.match import text_tensors
from kernjax.weights.names import Leaf, experts_in, table
from kernjax.weights.packing import Content, codes_and_scales, file_bytes, is_packable, values
from kernjax.weights.sharding import partition_spec

# Stacks up to this size (of the whole parameter, in bytes) are assembled on the host, without
# compiling anything.
_HOST_STACK_BYTES = 64 << 20

# A larger slice is gone from the host before the next one is filled.
_ON_ITS_WAY_BYTES = 256 << 20

# More than cores: some wait for the disk.
_THREADS = min(32, 2 * (os.cpu_count() or 1))
_STEPS_AHEAD = 8 * _THREADS

# Devices whose memory is the host's: jax takes over what is aligned, and copies nothing.
_ON_HOST = ("cpu",)
_ALIGNMENT = 64

Index = tuple[slice, ...]


class Step(NamedTuple):
    """Work for a thread, and the bytes of the file that it takes.

    `after` is the main thread's, when this step and all before it are done.
    """

    work: Callable[[], None] | None = None
    nbytes: float = 0.0
    after: Callable[[], None] | None = None


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
    arrays: dict[LeafPath, list[_Array]] = {}
    targets: dict[LeafPath, np.dtype] = {}
    for leaf in leaves:
        own = [tensors[part.name].value_dtype for part in leaf.parts]
        target = leaf.spec.dtype(_widest(own) if wanted is None else wanted)
        contents = kept.get(leaf.path) or [values(leaf, tensors, target)]
        arrays[leaf.path] = [_Array(leaf, one, placements[leaf.path]) for one in contents]
        targets[leaf.path] = target
    steps = (step for of_leaf in arrays.values() for array in of_leaf for step in array.steps())
    with Work("reading weights", "B", total, shown=shown) as work:
        for step in _done(steps):
            if step.nbytes:
                work.advance(step.nbytes)

    def value(path: LeafPath) -> jax.Array | Packed:
        held = [array.value for array in arrays[path]]
        return Packed(*held, targets[path]) if path in kept else held[0]

    return tree_of((path, value(path)) for path in arrays)


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

    @property
    def shares_memory(self) -> bool:
        """Whether an array on the devices can be memory of the host."""
        device = jax.local_devices()[0] if self.mesh is None else self.mesh.devices.flat[0]
        return device.platform in _ON_HOST

    def together(self, shape: tuple[int, ...], pieces: list[jax.Array]) -> jax.Array:
        """One array of what lies on this process's devices, in the order of `slices`."""
        if self.sharding is None:
            return pieces[0]
        return jax.make_array_from_single_device_arrays(shape, self.sharding, pieces)


class _Array:
    """An array of a parameter: `value`, once its `steps` are done."""

    def __init__(self, leaf: Leaf, content: Content, placement: _Placement) -> None:
        self._leaf, self._content, self._placement = leaf, content, placement
        self.value: jax.Array | None = None

    def steps(self) -> Iterator[Step]:
        shape, dtype = self._content.shape, self._content.dtype
        is_small = math.prod(shape) * dtype.itemsize <= _HOST_STACK_BYTES
        if is_small or not self._leaf.stack or self._placement.shares_memory:
            yield from self._slices(self._placement, shape, (), self._hold)
            return
        one_layer, sharding = self._placement.of_one_layer(), self._placement.sharding
        # Donated: updated in place, so that the devices hold one stack and two layers.
        insert = jax.jit(
            lambda stack, layer, at: jax.lax.dynamic_update_index_in_dim(stack, layer, at, 0),
            donate_argnums=0,
            out_shardings=sharding,
        )
        before: list[jax.Array] = []

        def into_stack(layer: jax.Array, at: int) -> None:
            if self.value is None:
                self.value = jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)()
            jax.block_until_ready(before)
            before[:] = [layer]
            self.value = insert(self.value, layer, at)

        for at in range(shape[0]):
            after = functools.partial(into_stack, at=at)
            yield from self._slices(one_layer, shape[1:], (slice(at, at + 1),), after)

    def _hold(self, value: jax.Array) -> None:
        self.value = value

    def _slices(
        self,
        placement: _Placement,
        shape: tuple[int, ...],
        lead: Index,
        after: Callable[[jax.Array], None],
    ) -> Iterator[Step]:
        """`after` gets array[lead], of `shape` where `lead` counts axes of one element away."""
        pieces: list[jax.Array] = []

        def put(memory: np.ndarray, devices: list[jax.Device | None]) -> None:
            jax.block_until_ready(pieces)
            pieces.extend(
                jax.device_put(memory, device, may_alias=placement.shares_memory)
                for device in devices
            )
            if memory.nbytes > _ON_ITS_WAY_BYTES and not placement.shares_memory:
                jax.block_until_ready(pieces)
                gc.collect(0)  # jax lets go of what it was given at a collection

        for index, devices in placement.slices(shape):
            # Takes no memory before it is filled.
            memory = _aligned(_shape_of(index), self._content.dtype)
            yield from self._fill((*lead, *index), memory)
            yield Step(after=functools.partial(put, memory, devices))
            del memory
        yield Step(after=lambda: after(placement.together(shape, pieces)))

    def _fill(self, index: Index, memory: np.ndarray) -> Iterator[Step]:
        """memory = array[index]; in the axes counted by parts, all that the slices name."""
        counted = len(self._leaf.stack)
        lead, rest = index[:counted], index[counted:]
        numbers = np.arange(len(self._leaf.parts)).reshape(self._leaf.stack)[lead].ravel()
        of_a_part = math.prod(self._content.shape[counted:])
        blocks = memory.reshape(len(numbers), *_shape_of(rest))

        def of_part(number: int, block: np.ndarray) -> Iterator[Step]:
            part = self._leaf.parts[number]
            nbytes = self._content.nbytes(part) / of_a_part
            for inside, fill in self._content.bands(part, rest):
                place = block[inside]
                yield Step(functools.partial(fill, place), nbytes * place.size)

        # Threads that fill one part touch its memory together, and the system clears it for each.
        yield from _in_turn(map(of_part, numbers, blocks), _THREADS)


def _in_turn(series: Iterator[Iterator[Step]], most: int) -> Iterator[Step]:
    """The steps of all series, one of each in turn, of at most so many series at a time."""
    begun = collections.deque(itertools.islice(series, most))
    while begun:
        one = begun.popleft()
        step = next(one, None)
        if step is None:
            begun.extend(itertools.islice(series, 1))
        else:
            begun.append(one)
            yield step


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Memory for an array, as jax takes it over on a CPU."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def _done(steps: Iterator[Step]) -> Iterator[Step]:
    """The steps, each when it is done, in their order; threads are some steps ahead."""
    begun: collections.deque[tuple[Step, Future | None]] = collections.deque()

    def first_done() -> Step:
        step, future = begun.popleft()
        if future is not None:
            future.result()  # raises what the work raised
        if step.after is not None:
            step.after()
        return step

    try:
        for step in steps:
            begun.append((step, None if step.work is None else _threads().submit(step.work)))
            if len(begun) > _STEPS_AHEAD:
                yield first_done()
        while begun:
            yield first_done()
    finally:
        left = [future for _, future in begun if future is not None]
        wait([future for future in left if not future.cancel()])


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_THREADS, thread_name_prefix="weights")


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

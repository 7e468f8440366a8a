"""Where parameters, caches and batches lie on a mesh: logical axes -> mesh axes, in one table.

To try another placement, change `RULES`; nothing else names a mesh axis.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax
from jax.experimental.mesh_utils import create_device_mesh
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from kernjax.base.errors import UserError
from kernjax.model.cache import Cache
from kernjax.model.config import ModelConfig
from kernjax.model.embedding import EmbeddingPlacement
from kernjax.model.moe import ExpertPlacement
from kernjax.model.params import abstract_params, leaves, tree_of

# Outermost first: the more an axis has to send, the nearer its devices should be to each other.
MESH_AXES = ("data", "sequence", "fsdp", "expert", "tensor")

# The compiler propagates shardings. Said, for the defaults of jax change: a mesh without devices is
# of type Explicit from 0.12 on.
_AUTO = (AxisType.Auto,) * len(MESH_AXES)

# Of several mesh axes the first one that a mesh has must divide; others join it where they do.
Rule: TypeAlias = str | tuple[str, ...] | None
RULES: Mapping[str, Rule] = {
    "batch": "data",
    "slots": "sequence",  # of keys and values; recurrent states have none, every part has them
    "layers": None,  # scanned: every device holds its part of every layer
    "embed": "fsdp",
    "vocab": "tensor",
    "mlp": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "linear_heads": "tensor",
    "linear_qkv": "tensor",
    # Every device computes its experts, for all tokens of its batch,
    "expert": ("expert", "tensor"),
    "expert_mlp": "fsdp",  # and, of each, its part of the width inside.
}

# What else parts an axis, where it divides and nothing else of the array lies on it: matrices
# without experts would lie whole on every device of `expert`.
SPARE: Mapping[str, str] = {"embed": "expert"}

# Replicated where the mesh axis does not divide them: a model has few KV heads, and every query
# head of a shard needs its own. Any other axis that does not divide is an error.
REPLICATED_IF_INDIVISIBLE = frozenset({"kv_heads"})


def partition_spec(
    axes: Sequence[str | None],
    units: Sequence[int],
    mesh: Mesh | AbstractMesh,
    rules: Mapping[str, Rule] = RULES,
) -> PartitionSpec:
    """The placement of an array with these logical axes on `mesh`, by `rules` and `SPARE`.

    `units`: each axis's length, counted in what may not be split (heads, for heads * dim). A mesh
    axis that the mesh lacks, or that has size 1, shards nothing. ValueError for an unknown logical
    axis, and for two axes of one array on the same mesh axis; UserError where it does not divide.
    """
    for axis in axes:
        if axis is not None and axis not in rules:
            raise ValueError(f"unknown logical axis {axis!r}; known: {', '.join(rules)}")
    targets = [() if axis is None else _mesh_axes(rules[axis]) for axis in axes]
    taken = [target for several in targets for target in several]
    if len(set(taken)) != len(taken):  # whatever the sizes: a wrong table shows on a laptop too
        raise ValueError(
            f"logical axes {tuple(axes)} collide: they map to mesh axes {tuple(taken)}, "
            "and a mesh axis can shard one axis of an array only"
        )
    placement: list[str | tuple[str, ...] | None] = []
    for axis, several, count in zip(axes, targets, units, strict=True):
        chosen: list[str] = []
        spare = [SPARE[axis]] if axis in SPARE and SPARE[axis] not in taken else []
        for target in (*several, *spare):
            shards = mesh.shape.get(target, 1)
            if shards == 1:
                continue
            if count % shards == 0:
                chosen.append(target)
                count //= shards
            elif not chosen and target in several and axis not in REPLICATED_IF_INDIVISIBLE:
                raise UserError(
                    f"Mesh {format_mesh(mesh)}: {target}={shards} does not divide the model's "
                    f"{count} {axis}.",
                    f"Expected {target} to be a divisor of {count}.",
                    "Choose another --mesh.",
                )
        placement.append(tuple(chosen) if len(chosen) > 1 else next(iter(chosen), None))
    return PartitionSpec(*placement)


def _mesh_axes(entry: Rule) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else entry


def shards_of(mesh: Mesh | AbstractMesh, entry: Rule) -> int:
    """In how many parts an axis lies that has this entry in a PartitionSpec."""
    return math.prod(mesh.shape[axis] for axis in _mesh_axes(entry))


def param_shardings(
    config: ModelConfig, mesh: Mesh, rules: Mapping[str, Rule] = RULES
) -> dict[str, Any]:
    """The tree of `abstract_params(config)` with a `NamedSharding` at each leaf."""
    return tree_of(
        (path, NamedSharding(mesh, partition_spec(spec.axes, spec.units, mesh, rules)))
        for path, spec in leaves(abstract_params(config))
    )


def check_mesh(config: ModelConfig, text: str) -> AbstractMesh:
    """The mesh of `--mesh=text`; UserError where a model of `config` cannot lie on it.

    Needs no devices: a laptop can say it of a pod's mesh.
    """
    mesh = abstract_mesh(parse_mesh_sizes(text))
    for _, spec in leaves(abstract_params(config)):
        partition_spec(spec.axes, spec.units, mesh)
    return mesh


def abstract_mesh(sizes: Mapping[str, int]) -> AbstractMesh:
    """A mesh without devices, of the sizes that `parse_mesh_sizes` gives."""
    return AbstractMesh(
        tuple(sizes.get(axis, 1) for axis in MESH_AXES), MESH_AXES, axis_types=_AUTO
    )


def cache_shardings(config: ModelConfig, cache: Cache, mesh: Mesh) -> Cache:
    """The tree of `cache` (arrays or shapes) with a `NamedSharding` at each leaf."""

    def placed(leaf: Any, axes: Sequence[str | None], units: Mapping[int, int]) -> NamedSharding:
        counts = [units.get(axis, size) for axis, size in enumerate(leaf.shape)]
        return NamedSharding(mesh, partition_spec(axes, counts, mesh))

    key_value = ("layers", "batch", "slots", "kv_heads", None)
    return Cache(
        keys=placed(cache.keys, key_value, {}),
        values=placed(cache.values, key_value, {}),
        # q, k and v lie one after another, as in the parameters.
        conv=placed(
            cache.conv, ("layers", "batch", None, "linear_qkv"), {3: config.linear_key_heads}
        ),
        state=placed(cache.state, ("layers", "batch", "linear_heads", None, None), {}),
        length=NamedSharding(mesh, PartitionSpec()),
    )


def mesh_plans(config: ModelConfig, mesh: Mesh | AbstractMesh | None) -> dict[str, Any]:
    """What `plan_execution` is told of `mesh`: how experts, embedding and cache lie on it."""
    if mesh is None or mesh.size == 1:
        return {}
    vocab, width = partition_spec(("vocab", "embed"), (config.vocab_size, config.hidden_size), mesh)
    slots = RULES["slots"]
    return {
        "experts": _expert_placement(config, mesh),
        "embedding": EmbeddingPlacement(vocab, width) if vocab or width else None,
        "sequence": slots if mesh.shape[slots] > 1 else None,
    }


def _expert_placement(config: ModelConfig, mesh: Mesh) -> ExpertPlacement | None:
    """How a mixture of experts computes on `mesh`; None: there is none."""
    if config.moe is None:
        return None
    layers, experts, _, width = partition_spec(
        ("layers", "expert", None, "expert_mlp"),
        (1, config.moe.num_experts, 1, config.moe.expert_size),
        mesh,
    )
    del layers
    return ExpertPlacement(mesh, RULES["batch"], experts, width)


def parse_mesh_sizes(text: str) -> dict[str, int]:
    """The size of every mesh axis in `data=1,tensor=8`; axes not named have size 1.

    UserError for unknown, repeated or malformed axes.
    """
    expected = f"Expected NAME=SIZE[,NAME=SIZE...] with names among {', '.join(MESH_AXES)}."
    sizes: dict[str, int] = {}
    for item in text.split(","):
        name, _, size = item.strip().partition("=")
        if name not in MESH_AXES:
            raise UserError(f"--mesh={text}: unknown axis {name!r}.", expected)
        if name in sizes:
            raise UserError(f"--mesh={text}: axis {name!r} is given twice.", expected)
        if not size.isdecimal() or int(size) < 1:
            raise UserError(f"--mesh={text}: size {size!r} of axis {name!r}.", expected)
        sizes[name] = int(size)
    return {name: sizes.get(name, 1) for name in MESH_AXES}


def parse_mesh(text: str, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh of `--mesh=data=1,tensor=8`, axes of type Auto.

    Over all devices, of all hosts; or, in a run of many, over those of this host, where the sizes
    are theirs. UserError as `parse_mesh_sizes`, and where the product of the sizes is neither.
    """
    shape = tuple(parse_mesh_sizes(text).values())
    wanted = math.prod(shape)
    local = jax.local_devices() if devices is None else []
    devices = jax.devices() if devices is None else list(devices)
    if wanted == len(local):
        devices = local
    if wanted != len(devices):
        of_all = "" if len(local) in (0, len(devices)) else f", {len(local)} of them on this host"
        raise UserError(
            f"--mesh={text} needs {wanted} devices, but there are {len(devices)} "
            f"({devices[0].platform}){of_all}.",
            "Expected the product of the axis sizes to be the number of devices"
            + (", of all hosts or of one." if of_all else "."),
            f"For example --mesh=tensor={len(devices)}.",
        )
    # As jax.make_mesh does, but for axes that no product of a TPU slice's own axes makes, as 32 of
    # 4 x 4 x 4 chips: those are split.
    grid = create_device_mesh(shape, devices, allow_split_physical_axes=True)
    return Mesh(grid, MESH_AXES, axis_types=_AUTO)


def format_mesh(mesh: Mesh | AbstractMesh) -> str:
    """`data=1,fsdp=1,tensor=8`: what `parse_mesh` reads.

    `sequence` and `expert` only where they split something: recordings say their mesh, and older
    ones lack them.
    """
    shown = (pair for pair in mesh.shape.items() if pair not in (("sequence", 1), ("expert", 1)))
    return ",".join(f"{name}={size}" for name, size in shown)

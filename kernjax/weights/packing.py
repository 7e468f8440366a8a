"""The arrays that hold a parameter: one of values, or, kept quantised, codes and scales."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from kernjax.base.errors import UserError
from kernjax.model.packed import Packed, packed_shapes
from kernjax.model.params import ParamSpec
from kernjax.weights.layouts import ExpertRows, HeadPart, Index, Interleaved, Transposed
from kernjax.weights.names import Leaf, Part
from kernjax.weights.quantisation import Scheme
from kernjax.weights.safetensors_files import READABLE
from kernjax.weights.sharding import format_mesh, shards_of
from kernjax.weights.sources import Band, Quantised, Source

# Their columns are the file's, along which codes are packed and scales shared, one to one.
_KEEP_COLUMNS = (Transposed, HeadPart, Interleaved, ExpertRows)


@dataclass(frozen=True)
class Content:
    """An array of a parameter.

    `bands(part, index)` fill what one part contributes (`sources.Source.bands`): `index` counts in
    this array, without the axes that count the parts. `nbytes`: what one part's whole contribution
    is in the file.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    bands: Callable[[Part, Index], Iterator[Band]]
    nbytes: Callable[[Part], float]


def file_bytes(source: Source, shape: tuple[int, ...]) -> float:
    """Bytes of the file that become an array of `shape` (q_proj serves two leaves)."""
    return source.nbytes * math.prod(shape) / math.prod(source.shape)


def values(leaf: Leaf, tensors: Mapping[str, Source], dtype: np.dtype) -> Content:
    """The parameter's values in `dtype`, dequantised where the file is quantised."""
    return Content(
        leaf.spec.shape,
        dtype,
        lambda part, index: tensors[part.name].bands(part.layout, index),
        lambda part: file_bytes(tensors[part.name], leaf.part_shape),
    )


def is_packable(leaf: Leaf, tensors: Mapping[str, Source]) -> bool:
    """Whether the parameter can be held quantised: all of it is, along the rows of our matrix."""
    return not leaf.spec.keep_float32 and all(
        isinstance(tensors[part.name], Quantised) and isinstance(part.layout, _KEEP_COLUMNS)
        for part in leaf.parts
    )


def codes_and_scales(
    leaf: Leaf, tensors: Mapping[str, Source], spec: PartitionSpec | None, mesh: Mesh | None
) -> tuple[Content, Content]:
    """What `Packed` takes of a parameter that `is_packable`, sharded by `spec`."""
    sources = [tensors[part.name] for part in leaf.parts]
    scheme = sources[0].scheme
    codes, scales = _shapes(leaf.spec, scheme, spec, mesh)
    group = leaf.spec.shape[-2] // scales[-2]
    dtypes = {READABLE.get(source.scales.dtype, np.dtype(np.uint8)) for source in sources}
    widest = dtypes.pop() if len(dtypes) == 1 else np.dtype(np.float32)
    return (
        Content(
            codes,
            scheme.packed_dtype,
            lambda part, index: tensors[part.name].code_bands(part.layout, index),
            lambda part: file_bytes(tensors[part.name], leaf.part_shape),
        ),
        Content(
            scales,
            widest,
            lambda part, index: tensors[part.name].scale_bands(part.layout, index, group),
            lambda part: 0.0,  # counted with the codes
        ),
    )


def abstract_packed(
    spec: ParamSpec, scheme: Scheme, sharding: NamedSharding, dtype: np.dtype
) -> Packed:
    """`Packed` with ShapeDtypeStructs in place of arrays; scales as published, in 8 or 16 bits."""
    codes, scales = _shapes(spec, scheme, sharding.spec, sharding.mesh)
    scale_dtype = READABLE["BF16"] if "BF16" in scheme.scale_dtypes else np.dtype(np.uint8)
    return Packed(
        jax.ShapeDtypeStruct(codes, scheme.packed_dtype, sharding=sharding),
        jax.ShapeDtypeStruct(scales, scale_dtype, sharding=sharding),
        dtype,
    )


def _shapes(
    spec: ParamSpec, scheme: Scheme, place: PartitionSpec | None, mesh: Mesh | AbstractMesh | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of codes and scales; UserError where the mesh would part what a byte holds."""
    rows, shards = spec.shape[-2], 1
    if place is not None and mesh is not None:
        shards = shards_of(mesh, place[len(spec.shape) - 2])
    found = packed_shapes(spec.shape, scheme.per_byte, scheme.block[1], rows // shards)
    if found is None:
        raise UserError(
            f"Mesh {format_mesh(mesh)} gives a device {rows // shards} rows of a matrix"
            f" {list(spec.shape[-2:])}, of which two are in a byte.",
            "Expected an even number where weights stay quantised (dequantise=layer).",
            "Choose another --mesh, or leave dequantise=layer out.",
        )
    return found

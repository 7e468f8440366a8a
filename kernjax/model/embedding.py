"""Looking tokens up in an embedding that a mesh has in parts."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec


@dataclasses.dataclass(frozen=True)
class EmbeddingPlacement:
    """The mesh axes over which the vocabulary and the width of the embedding are split, or None."""

    vocab: str | None = None
    width: str | tuple[str, ...] | None = None


def look_up(
    table: jax.Array, tokens: jax.Array, placement: EmbeddingPlacement | None = None
) -> jax.Array:
    """table [vocab, D] at tokens int32 [...]: [..., D].

    Inside a program over parts of the mesh (`jax.shard_map`), each device looks into its own rows
    and zeros are added: XLA of jaxlib 0.12 ends the process over the gather that it is left to
    divide there (a failed check in ExpandDeviceGroupsWithIota).
    """
    mesh = jax.sharding.get_abstract_mesh()
    if placement is None or not mesh.manual_axes:
        return table[tokens]
    inner = set(mesh.axis_names) - set(mesh.manual_axes)
    whole = (None,) * tokens.ndim

    def of_part(rows: jax.Array, tokens: jax.Array) -> jax.Array:
        if placement.vocab is None:
            return rows[tokens]
        local = tokens - jax.lax.axis_index(placement.vocab) * rows.shape[0]
        own = (local >= 0) & (local < rows.shape[0])
        found = rows[jnp.clip(local, 0, rows.shape[0] - 1)]
        return jax.lax.psum(jnp.where(own[..., None], found, 0), placement.vocab)

    return jax.shard_map(
        of_part,
        mesh=mesh,
        in_specs=(PartitionSpec(placement.vocab, placement.width), PartitionSpec()),
        out_specs=PartitionSpec(*whole, placement.width),
        axis_names=inner,
        check_vma=False,
    )(table, tokens)

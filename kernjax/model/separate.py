"""Stacks of matrices held as an array a layer, for CPUs.

Inside the scan over layers a matrix is read out of its stack: XLA's CPU compiler copies it first,
and of bfloat16 it makes a float32 copy of the whole stack in every call. Matrices that are arrays
of their own are read where they lie. Which one a layer takes is known only in the loop, so a
product with one becomes a `lax.switch` over the layers' products, each of them one call of a
library: what is compiled hardly grows with depth.

Such a product has the very bits of one with a stack's matrix, as meshes compute it. (Held as
[out, in], products of few rows would be up to twice as quick, and round otherwise.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from kernjax.model.config import ModelConfig
from kernjax.model.packed import Packed
from kernjax.model.params import LeafPath, abstract_params, leaves


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Separate:
    """Matrices [D, F] of one shape and dtype in place of a stack [layers, D, F]."""

    matrices: tuple[Any, ...]

    def row(self, index: jax.Array) -> OneOf:
        return OneOf(self.matrices, index)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OneOf:
    """The matrix [D, F] of a layer, not read yet: matrices[index], index int32 []."""

    matrices: tuple[jax.Array, ...]
    index: jax.Array

    def __getitem__(self, key: Any) -> OneOf:
        """[...] only, as code reads any parameter."""
        if key is not Ellipsis:
            raise TypeError(
                f"OneOf[{key!r}]: of a matrix that is not read yet only [...] is known."
            )
        return self

    def apply(self, function: Callable[[Any, jax.Array], jax.Array], x: Any) -> jax.Array:
        """function(x, matrices[index])."""
        branches = [lambda x, matrix=matrix: function(x, matrix) for matrix in self.matrices]
        return jax.lax.switch(self.index, branches, x)


def whole(matrix: jax.Array | OneOf) -> jax.Array:
    """The matrix itself."""
    return matrix.apply(lambda x, chosen: chosen, ()) if isinstance(matrix, OneOf) else matrix


def suits(mesh: Mesh | AbstractMesh | None) -> bool:
    """Whether programs of this process run quicker on separate matrices."""
    return mesh is None and jax.default_backend() == "cpu"


def separated(params: dict[str, Any], config: ModelConfig) -> dict[str, Any]:
    """The tree of parameters (arrays or shapes) with `Separate` in place of stacks of matrices.

    Takes them out of `params`, which is empty then: so at most one stack is held twice.
    """
    specs = dict(leaves(abstract_params(config)))

    def one(path: LeafPath, leaf: Any) -> Any:
        if isinstance(leaf, Packed) or not specs[path].is_stack:
            return leaf
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return Separate((jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype),) * leaf.shape[0])
        return Separate(tuple(leaf[layer] for layer in range(leaf.shape[0])))

    def emptied(tree: dict[str, Any], at: LeafPath) -> dict[str, Any]:
        taken = {}
        for name in list(tree):
            value = tree.pop(name)
            path = (*at, name)
            taken[name] = emptied(value, path) if isinstance(value, dict) else one(path, value)
            del value
        return taken

    return emptied(params, ())

"""What runs at each layer: the policy's formats there and the function that computes each op."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kernjax.model.config import ModelConfig
from kernjax.model.embedding import EmbeddingPlacement
from kernjax.model.moe import ExpertPlacement
from kernjax.model.sequence import attend_by_parts
from kernjax.precision import LayerPolicy, Policy
from pallas_kernels.formats import Format, from_bits
from pallas_kernels.ops import OPS

Op = Callable[..., jax.Array | tuple[jax.Array, jax.Array]]


@dataclasses.dataclass(frozen=True)
class LayerPlan:
    """One layer's formats, and plug-ins in place of ops; equal plans compile once.

    `experts`: how a mixture of experts lies on a mesh. `sequence`: the mesh axis over which the
    cache's slots are split, None where every device has them all.
    """

    policy: LayerPolicy
    kernels: tuple[tuple[str, Op], ...] = ()
    experts: ExpertPlacement | None = None
    sequence: str | None = None

    def op(self, name: str) -> Op:
        """The function that computes op `name` at this layer, called with the public signature."""
        if (kernel := dict(self.kernels).get(name)) is not None:
            return kernel
        return functools.partial(OPS[name], implementation=self.policy.implementation(name))

    def attend(
        self,
        name: str,
        q: jax.Array,
        keys: jax.Array,
        values: jax.Array,
        layer: jax.Array,
        *,
        q_offset: jax.Array,
        kv_length: jax.Array,
        **rest: Any,
    ) -> jax.Array:
        """Attention op `name` over row `layer` of the cached stacks `Cache.keys` and `.values`.

        Ours reads the stacks in place; a plug-in has the signature for one layer and gets a copy.
        """
        stored = self.policy.kv_cache
        caches = ((keys, stored.k), (values, stored.v))
        if name in dict(self.kernels):
            caches = tuple(
                (jax.lax.dynamic_index_in_dim(bits, layer, keepdims=False), fmt)
                for bits, fmt in caches
            )
        else:
            rest["layer"] = layer
        # Integers hold one narrow format for all layers; where layers differ, floats do.
        k, v = (
            from_bits(x, fmt.storage_dtype) if jnp.issubdtype(x.dtype, jnp.integer) else x
            for x, fmt in caches
        )
        attention = functools.partial(
            self.op(name), q, k, v, k_scale=stored.k_scale, v_scale=stored.v_scale, **rest
        )
        visible = {"q_offset": q_offset, "kv_length": kv_length}
        if self.sequence is None:
            return attention(**visible)
        attention = functools.partial(attention, return_lse=True)
        return attend_by_parts(attention, keys.shape[2], self.sequence, **visible)


class LayerCall(NamedTuple):
    """What a layer is called with, beside what flows through it.

    `index` int32 []: the layer's row in the cache, among those of its kind. `count` int32 []: how
    many of the call's tokens are real; the rest is padding. `decode` chooses the decode ops.
    """

    index: jax.Array
    count: jax.Array
    plan: LayerPlan
    config: ModelConfig
    decode: bool


@dataclasses.dataclass(frozen=True)
class Execution:
    """A plan for every layer, static under jit; `top` governs embedding, final norm and logits.

    `embedding`: how the embedding lies on a mesh.
    """

    top: LayerPolicy
    layers: tuple[LayerPlan, ...]
    embedding: EmbeddingPlacement | None = None

    def container(self, site: Callable[[LayerPolicy], Format]) -> jnp.dtype:
        """One dtype that holds `site` at every layer: the common storage dtype, else float32."""
        dtypes = {site(policy).storage_dtype for policy in self._policies()}
        return dtypes.pop() if len(dtypes) == 1 else jnp.dtype(jnp.float32)

    def _policies(self) -> list[LayerPolicy]:
        return [self.top, *(plan.policy for plan in self.layers)]


def plan_execution(
    policy: Policy,
    num_layers: int,
    kernels: Mapping[str, Op] | None = None,
    experts: ExpertPlacement | None = None,
    sequence: str | None = None,
    embedding: EmbeddingPlacement | None = None,
) -> Execution:
    """The execution of `policy` on a model of `num_layers`, with plug-ins in place of named ops.

    `kernels` maps an op's name (`attention.prefill`, ...) to a function of the op's public
    signature; the others come from `pallas_kernels`, where the policy names an implementation. One
    with a method `covers(layer)` stands in where that says so. `experts`, `sequence` and
    `embedding` say how things lie on a mesh: see `LayerPlan` and `Execution`.
    """
    plugged = sorted((kernels or {}).items(), key=lambda item: item[0])

    def at(layer: int) -> LayerPlan:
        here = (pair for pair in plugged if getattr(pair[1], "covers", _everywhere)(layer))
        return LayerPlan(policy.for_layer(layer), tuple(here), experts, sequence)

    return Execution(policy.without_overrides(), tuple(map(at, range(num_layers))), embedding)


def _everywhere(layer: int) -> bool:
    del layer
    return True

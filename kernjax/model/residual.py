"""The residual stream, plain or with attention over blocks of layers (AttnRes; Kimi K3).

Every `size` layers a block begins: what came before it is kept (the first block keeps the
embedding), and the stream starts again at nothing. What a mixer, an MLP or the final norm reads is
a mixture of the kept streams and the running one, weighted per token:

score_i = sum_d w_norm[d] w_proj[d] rms(s_i)[d];   sum_i softmax(score)_i s_i          float32
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from kernjax.model.layers import normalised
from kernjax.precision import LayerPolicy
from pallas_kernels.formats import store


class Stream(NamedTuple):
    """x [B, T, D], and of AttnRes the kept streams [blocks, B, T, D]; those to come are zero."""

    x: jax.Array
    kept: jax.Array | None = None


def new_stream(x: jax.Array, num_layers: int, size: int | None) -> Stream:
    """The stream of an embedding x; `size` layers are a block of AttnRes, None without it."""
    if size is None:
        return Stream(x)
    return Stream(x, jnp.zeros((-(-num_layers // size), *x.shape), x.dtype))


def begin_block(stream: Stream, layer: jax.Array, size: int) -> Stream:
    """`stream` as layer `layer` (int32 []) adds to it: kept and empty where a block begins."""
    begins = layer % size == 0
    block = layer // size
    before = jax.lax.dynamic_index_in_dim(stream.kept, block, keepdims=False)
    kept = jax.lax.dynamic_update_index_in_dim(
        stream.kept, jnp.where(begins, stream.x, before), block, 0
    )
    return Stream(jnp.where(begins, jnp.zeros_like(stream.x), stream.x), kept)


class Mixture(nnx.Module):
    """What scores the streams of a mixture: norm and proj [D] (leading axes when stacked)."""

    def __init__(self, params: Mapping[str, Any]) -> None:
        self.norm = nnx.Param(params["norm"])
        self.proj = nnx.Param(params["proj"])

    def __call__(
        self, stream: Stream, count: jax.Array | int, eps: float, policy: LayerPolicy
    ) -> jax.Array:
        """activations [B, T, D]: the mixture of the first `count` kept streams and of x."""
        weight = self.norm[...].astype(jnp.float32) * self.proj[...].astype(jnp.float32)

        def score(values: jax.Array) -> jax.Array:
            return jnp.sum(normalised(values, eps) * weight, axis=-1)

        kept = stream.kept.astype(jnp.float32)
        exists = jnp.arange(kept.shape[0])[:, None, None] < count
        scores = jnp.where(exists, score(kept), -jnp.inf)
        scores = jnp.concatenate([scores, score(stream.x)[None]])
        shares = jax.nn.softmax(scores, axis=0)[..., None]
        y = shares[-1] * stream.x.astype(jnp.float32)
        for block in range(kept.shape[0]):  # few; a sum over them is slow on a CPU, or wrong
            y += shares[block] * kept[block]
        return store(y, policy.activations)

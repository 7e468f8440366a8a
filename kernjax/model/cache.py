"""What a hybrid keeps between calls: keys and values, recurrent state, convolution window."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from kernjax.model.config import ModelConfig
from kernjax.model.execution import Execution
from pallas_kernels.formats import bits_dtype


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Cache:
    """State of B sequences after `length` tokens; the leading axis runs over layers of one kind.

    - keys, values: [full layers, B, S, G, H], the bits (`pallas_kernels.formats.as_bits`) of the
      KV cache's storage dtype, S the capacity (split over a mesh: that of a part, inside its
      program); slots from `length` on are undefined. Of latent attention one head, of unlike widths
      (`ModelConfig.cached_widths`).
    - conv: [linear layers, B, conv_kernel - 1, C], the last inputs of the causal convolution, as
      bits too.
    - state: [linear layers, B, Hv, K, V] float32, already rounded to the state's format.
    - length: int32 [], tokens seen; the same for all rows (a batch holds one depth).
    """

    keys: jax.Array
    values: jax.Array
    conv: jax.Array
    state: jax.Array
    length: jax.Array

    @property
    def capacity(self) -> int:
        return self.keys.shape[2]


_CAPACITY_STEP = 512


def capacity_for(tokens: int) -> int:
    """Cache slots for so many tokens: lengths close to each other share their programs."""
    return -(-tokens // _CAPACITY_STEP) * _CAPACITY_STEP


def init_cache(config: ModelConfig, execution: Execution, batch: int, capacity: int) -> Cache:
    """An empty cache for `batch` sequences of at most `capacity` tokens."""
    full = config.layer_types.count("full_attention")
    linear = config.layer_types.count("linear_attention")
    slots, (key_dim, value_dim) = (full, batch, capacity, config.num_kv_heads), config.cached_widths
    channels = (
        2 * config.linear_key_heads * config.linear_key_dim
        + config.linear_value_heads * config.linear_value_dim
    )
    state_shape = (config.linear_value_heads, config.linear_key_dim, config.linear_value_dim)
    return Cache(
        keys=jnp.zeros(
            (*slots, key_dim), bits_dtype(execution.container(lambda policy: policy.kv_cache.k))
        ),
        values=jnp.zeros(
            (*slots, value_dim), bits_dtype(execution.container(lambda policy: policy.kv_cache.v))
        ),
        conv=jnp.zeros(
            (linear, batch, config.conv_kernel - 1, channels),
            bits_dtype(execution.container(lambda policy: policy.activations)),
        ),
        state=jnp.zeros((linear, batch, *state_shape), jnp.float32),
        length=jnp.zeros((), jnp.int32),
    )


def row(stack: jax.Array, index: jax.Array) -> jax.Array:
    """stack[index]."""
    return jax.lax.dynamic_index_in_dim(stack, index, keepdims=False)


def put_row(stack: jax.Array, value: jax.Array, index: jax.Array) -> jax.Array:
    """`stack` with `value`, in its dtype, at `index`."""
    return jax.lax.dynamic_update_index_in_dim(stack, value.astype(stack.dtype), index, 0)

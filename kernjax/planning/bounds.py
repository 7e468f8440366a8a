"""Lower bounds of a phase's time: bytes that must be read, and multiplications that must be done.

Counted from shapes, not from the compiler, which counts a scanned layer once. Nothing is added for
communication, norms, softmax or convolution, work is spread evenly over the devices, and a step
takes the longer of the two: a real one is slower.

- bytes, per device: its part of the weights (not the embedding, of which rows are read; of experts
  as many as the tokens can choose, evenly spread), the keys and values of the tokens so far, the
  recurrent state and the window of the convolution, read and written.
- FLOPs: 2 per weight and token (of experts, those a token goes to); 4 H per query, key it sees, and
  head (of latent attention 2 a number of the cached key and value); 6 K V per token and value head
  of the delta rule (k^T S, k d^T, q^T S). float32 products of weights with dot=highest take six
  bfloat16 passes (bfloat16 in three parts, the six leading products).
"""

from __future__ import annotations

import dataclasses
import math

import jax

from kernjax.model.config import STACKS
from kernjax.model.params import abstract_params, leaves
from kernjax.planning.chips import Topology
from kernjax.planning.programs import Setup, abstract_cache, abstract_weights
from pallas_kernels.formats import BF16, F16

_FLOAT32_PASSES = 6


@dataclasses.dataclass(frozen=True)
class Bound:
    """Of one call: bytes read and written by a device, bfloat16 FLOPs it does, least seconds."""

    bytes: float
    flops: float
    seconds: float
    limited_by: str  # "bytes" or "flops"


def prefill_bound(setup: Setup, topology: Topology, start: int, stop: int) -> Bound:
    """Of a window over positions start..stop - 1 of every row of the batch."""
    keys_seen = (stop * (stop + 1) - start * (start + 1)) // 2
    return _bound(setup, topology, stop - start, stop, keys_seen, setup.scored)


def decode_bound(setup: Setup, topology: Topology, length: int) -> Bound:
    """Of the step that follows `length` tokens."""
    return _bound(setup, topology, 1, length + 1, length + 1, 1)


def whole_prefill_seconds(setup: Setup, topology: Topology) -> float:
    """Of all windows of the context."""
    starts = range(0, setup.context, setup.window)
    return sum(
        prefill_bound(setup, topology, start, min(start + setup.window, setup.context)).seconds
        for start in starts
    )


def _bound(
    setup: Setup, topology: Topology, tokens: int, length: int, keys_seen: int, scored: int
) -> Bound:
    moved = _weight_bytes(setup, tokens) + _cache_bytes(setup, length)
    flops = _flops(setup, tokens, keys_seen, scored) / topology.devices
    by_bytes, by_flops = moved / topology.device_bandwidth, flops / topology.device_flops
    limited_by = "bytes" if by_bytes >= by_flops else "flops"
    return Bound(moved, flops, max(by_bytes, by_flops), limited_by)


def _weight_bytes(setup: Setup, tokens: int) -> float:
    skipped = () if setup.config.tie_word_embeddings else (("embed",),)
    weights, moe = leaves(abstract_weights(setup)), setup.config.moe
    chosen = 1.0
    if moe is not None:
        chosen = min(1.0, setup.batch * tokens * moe.experts_per_token / moe.num_experts)
    return sum(
        _local_bytes(array) * (chosen if "experts" in path else 1)
        for path, leaf in weights
        if path not in skipped
        for array in jax.tree.leaves(leaf)
    )


def _cache_bytes(setup: Setup, length: int) -> float:
    cache = abstract_cache(setup)
    filled = length / cache.capacity
    keys_values = _local_bytes(cache.keys) + _local_bytes(cache.values)
    return filled * keys_values + 2 * (_local_bytes(cache.conv) + _local_bytes(cache.state))


def _local_bytes(leaf: jax.ShapeDtypeStruct) -> int:
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def _flops(setup: Setup, tokens: int, keys_seen: int, scored: int) -> float:
    config = setup.config
    share = config.moe.experts_per_token / config.moe.num_experts if config.moe else 1
    matrices = sum(
        spec.size * (share if "experts" in path else 1)
        for path, spec in leaves(abstract_params(config))
        if path[0] in STACKS and len(spec.shape) >= 3 and not path[-1].startswith("conv")
    )
    weights = 2 * matrices * tokens + 2 * config.hidden_size * config.vocab_size * scored
    per_key = 2 * sum(config.cached_widths) * config.num_heads
    attention = per_key * keys_seen * len(config.full_layers)
    state = config.linear_key_dim * config.linear_value_dim * config.linear_value_heads
    rule = 6 * state * tokens * len(config.linear_layers)
    return setup.batch * (weights * _passes(setup) + attention + rule)


def _passes(setup: Setup) -> int:
    """bfloat16 passes that a product of activations and weights takes on the matrix unit."""
    policy = setup.policy
    half = policy.weights == policy.activations and policy.weights in (BF16, F16)
    return 1 if half or policy.dot == "default" else _FLOAT32_PASSES

"""The demo's optimiser: Muon on the matrices, AdamW on everything else.

Muon (Jordan et al., 2024; scaled to AdamW's update size as by Liu et al., arXiv 2502.16982)
reaches a loss in clearly fewer tokens than AdamW, and tokens are what a CPU is short of. Its
Newton-Schulz iterations run in bfloat16 products, each device on its share of the matrices.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

MUON_PEAK, ADAM_PEAK = 8e-3, 3e-3
WEIGHT_DECAY = 0.1
WARMUP_STEPS = 60
MOMENTUM = 0.95
UPDATE_RMS = 0.2  # of a Muon update before the learning rate, AdamW's typical size
_NOT_MATRICES = ("b", "a", "conv")  # stacked, with two axes more, yet no wide projection
_STEPS = 5
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan's quintic: singular values to about 1


def make_optimiser(axis: str, devices: int) -> optax.GradientTransformation:
    """Clipping to norm 1, then Muon or AdamW at their peak rates; scale the updates by `rate`.

    Runs inside shard_map over mesh axis `axis` of `devices`, with replicated gradients.
    """
    matrices = optax.chain(
        scale_by_muon(axis, devices),
        optax.add_decayed_weights(WEIGHT_DECAY),
        optax.scale(-MUON_PEAK),
    )
    others = optax.adamw(ADAM_PEAK, b1=0.9, b2=0.95, weight_decay=0.0)
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.multi_transform({"muon": matrices, "adam": others}, _labels),
    )


class MuonState(NamedTuple):
    mu: Any


def scale_by_muon(axis: str, devices: int) -> optax.GradientTransformation:
    """Nesterov momentum, then the nearest semi-orthogonal matrix, of leaves [layers, in, out]."""

    def init(params: Any) -> MuonState:
        return MuonState(jax.tree.map(jnp.zeros_like, params))

    def update(grads: Any, state: MuonState, params: Any = None) -> tuple[Any, MuonState]:
        mu = jax.tree.map(lambda m, g: MOMENTUM * m + (1 - MOMENTUM) * g, state.mu, grads)
        ahead = jax.tree.map(lambda m, g: MOMENTUM * m + (1 - MOMENTUM) * g, mu, grads)
        leaves, tree = jax.tree.flatten(ahead)
        return jax.tree.unflatten(tree, _orthogonalise_all(leaves, axis, devices)), MuonState(mu)

    return optax.GradientTransformation(init, update)


def _orthogonalise_all(leaves: list[jax.Array], axis: str, devices: int) -> list[jax.Array]:
    """Each leaf [layers, in, out] orthogonalised; matrices of one shape go together, and every
    device works on its share of them."""
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    wide = [x if x.shape[1] <= x.shape[2] else jnp.swapaxes(x, 1, 2) for x in leaves]
    for index, x in enumerate(wide):
        groups[x.shape[1:]].append(index)
    results: list[jax.Array] = [x for x in leaves]
    for shape, members in groups.items():
        stacked = jnp.concatenate([wide[i] for i in members])
        count = stacked.shape[0]
        share = -(-count // devices)
        stacked = jnp.pad(stacked, ((0, share * devices - count), (0, 0), (0, 0)))
        mine = jax.lax.dynamic_slice_in_dim(stacked, jax.lax.axis_index(axis) * share, share)
        done = jax.lax.all_gather(orthogonalise(mine), axis, tiled=True)
        start = 0
        for i in members:
            part = done[start : start + leaves[i].shape[0]] * (UPDATE_RMS * max(shape) ** 0.5)
            results[i] = part if wide[i] is leaves[i] else jnp.swapaxes(part, 1, 2)
            start += leaves[i].shape[0]
    return results


def orthogonalise(x: jax.Array) -> jax.Array:
    """Newton-Schulz towards U V^T of x = U S V^T, for x [n, rows, columns], rows <= columns."""
    a, b, c = _COEFFICIENTS
    x = x / (jnp.sqrt(jnp.sum(x * x, axis=(1, 2), keepdims=True)) + 1e-8)
    for _ in range(_STEPS):
        gram = _matmul(x, jnp.swapaxes(x, 1, 2))
        x = a * x + _matmul(b * gram + c * _matmul(gram, gram), x)
    return x


def _matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    low = jnp.bfloat16
    return jnp.matmul(a.astype(low), b.astype(low), preferred_element_type=jnp.float32)


def _labels(params: Any) -> Any:
    """ "muon" for every stacked projection [layers, in, out], "adam" for the rest."""
    return jax.tree_util.tree_map_with_path(
        lambda path, x: "muon" if x.ndim == 3 and path[-1].key not in _NOT_MATRICES else "adam",
        params,
    )


def rate(step: int, progress: float, decay_fraction: float) -> float:
    """Warm-up, stable, then linear decay over the last `decay_fraction` of the run: [0, 1].

    `progress` in [0, 1] is the share of the run that is done (of steps, or of time).
    """
    return min(1.0, (step + 1) / WARMUP_STEPS, max(0.0, 1.0 - progress) / decay_fraction)

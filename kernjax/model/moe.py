"""A mixture of experts in place of the MLP (transformers: `Qwen3_5MoeSparseMoeBlock`, and Kimi's).

s = x W_router                                     scores, one an expert
ids = the k best of s, or of sigmoid(s) + correction; of equal ones the smallest ids
w = softmax(s)[ids], or sigmoid(s)[ids];  w / sum(w);  * scaling
y = sum_i w_i down_i(act(gate_i(h), up_i(h)))      h = x, or x W_down where experts are latent
y + sigmoid(x w_g) * shared(x)                     y: norm(y) W_up where experts are latent

Only chosen experts are computed: rows (a token at one of its experts) are sorted by expert, and
each expert multiplies its own, a block of rows at a time, in a loop over the blocks in use. Weights
are read where they lie in the stack of all layers: neither gathered nor copied layer by layer, and
dequantised, where they are held packed, for one block of rows.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from kernjax.model.config import SOFTMAX, MoEConfig
from kernjax.model.layers import MLP, Glu, dot, linear, normalised, rounder, swiglu
from kernjax.model.packed import Packed, unpacked
from kernjax.precision import LayerPolicy
from pallas_kernels.formats import round_to, store

# Rows of one expert multiplied at once. Fewer: its weights are read more often; more: more padding.
_LEAST_BLOCK, _MOST_BLOCK = 8, 128

# Added to the sum of sigmoid scores, which may all be zero (transformers does the same).
_TINY = 1e-20


class Routes(NamedTuple):
    """Which experts each token went to, and how nearly to others.

    ids int32 [..., k], best first. gaps float32 [...]: the router's score (logits where they go
    through a softmax, sigmoid + correction otherwise) of the worst chosen expert less that of the
    best one not chosen: float32's largest number where all are chosen, negative where others than
    the best were forced on it.
    """

    ids: jax.Array
    gaps: jax.Array


class Stacks(NamedTuple):
    """Experts of all layers: gate and up [layers, E, W, F], down [layers, E, F, W]."""

    gate: jax.Array | Packed
    up: jax.Array | Packed
    down: jax.Array | Packed


@dataclasses.dataclass(frozen=True)
class ExpertPlacement:
    """How tokens and experts lie on a mesh; None in its place: on one device.

    `tokens` is the axis of the batch, `experts` and `width` those of E and F in `Stacks`; None:
    not sharded. Of several, the first is the outermost. Every device computes the experts it holds,
    for all tokens of its batch.
    """

    mesh: Mesh
    tokens: str | None = None
    experts: str | tuple[str, ...] | None = None
    width: str | None = None


class MoE(nnx.Module):
    """Parameters named as in `params.py`: one layer's, but for `experts`, the stacks of all."""

    def __init__(self, params: Mapping[str, Any]) -> None:
        def optional(name: str) -> nnx.Param | None:
            return nnx.Param(params[name]) if name in params else None

        self.router = nnx.Param(params["router"])
        self.correction = optional("correction")
        self.experts = MLP(params["experts"])
        self.shared = MLP(params["shared"]) if "shared" in params else None
        self.shared_gate = optional("shared_gate")
        self.latent_down = optional("latent_down")
        self.latent_norm = optional("latent_norm")
        self.latent_up = optional("latent_up")

    def __call__(
        self,
        x: jax.Array,
        index: jax.Array,
        policy: LayerPolicy,
        config: MoEConfig,
        *,
        eps: float,
        glu: Glu = swiglu,
        forced: jax.Array | None = None,
        placement: ExpertPlacement | None = None,
    ) -> tuple[jax.Array, Routes]:
        """(activations [B, T, D], routes of [B, T]) of normed x [B, T, D].

        index int32 []: this layer among the stacked ones. eps: of the latent norm. `glu` is the
        activation of experts and shared expert. forced int32 [B, T, k] are experts to take instead
        of the router's choice; a token with a negative one is routed as it is.
        """
        r = rounder(policy)
        router, correction = self.router[...], self.correction
        bias = None if correction is None else correction[...]
        routes, weights = route(x, router, bias, policy, config, forced)

        h = x if self.latent_down is None else linear(x, self.latent_down[...], policy)
        held = (self.experts.gate, self.experts.up, self.experts.down)
        stacks = Stacks(*(weight.get_value() for weight in held))
        exact = config.float32_router
        y = weighted_experts(h, routes.ids, weights, stacks, index, policy, glu, exact, placement)
        if self.latent_norm is not None:
            y = normalised(y, eps) * self.latent_norm[...].astype(jnp.float32)
        y = store(y, policy.activations)
        if self.latent_up is not None:
            y = linear(y, self.latent_up[...], policy)

        if self.shared is not None:
            shared = self.shared(x, policy, glu).astype(jnp.float32)
            if self.shared_gate is not None:
                gate = linear(x, self.shared_gate[...], policy).astype(jnp.float32)
                shared = r(r(jax.nn.sigmoid(gate)) * shared)
            y = store(y.astype(jnp.float32) + shared, policy.activations)
        return y, routes


def route(
    x: jax.Array,
    router: jax.Array,
    correction: jax.Array | None,
    policy: LayerPolicy,
    config: MoEConfig,
    forced: jax.Array | None = None,
) -> tuple[Routes, jax.Array]:
    """(routes, weights float32 [..., k]) of x [..., D] by router [D, E] and correction [E].

    Logits and weights are rounded to the activations' format unless `config.float32_router`.
    """
    r = (lambda value: value) if config.float32_router else rounder(policy)
    logits = r(dot(x, router, policy))
    if config.scoring == SOFTMAX:
        shares, scores = jax.nn.softmax(logits, axis=-1), logits
    else:
        shares = scores = jax.nn.sigmoid(logits)
    if correction is not None:
        scores = scores + correction.astype(jnp.float32)
    # top_k takes the lower index of two that are equal.
    ids = jax.lax.top_k(scores, config.experts_per_token)[1]
    if forced is not None:
        ids = jnp.where(jnp.all(forced >= 0, axis=-1, keepdims=True), forced, ids)
    weights = jnp.take_along_axis(shares, ids, axis=-1)
    if config.normalise:
        total = jnp.sum(weights, axis=-1, keepdims=True)
        weights = weights / (total if config.scoring == SOFTMAX else total + _TINY)
    return Routes(ids, _gaps(scores, ids)), r(weights * config.scaling)


def _gaps(scores: jax.Array, ids: jax.Array) -> jax.Array:
    """float32 [...]: least score among ids less the greatest among the others."""
    chosen = jnp.any(ids[..., None] == jnp.arange(scores.shape[-1], dtype=ids.dtype), axis=-2)
    least = jnp.min(jnp.take_along_axis(scores, ids, axis=-1), axis=-1)
    gaps = least - jnp.max(jnp.where(chosen, -jnp.inf, scores), axis=-1)
    return jnp.minimum(gaps, jnp.finfo(jnp.float32).max)


def weighted_experts(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    stacks: Stacks,
    layer: jax.Array,
    policy: LayerPolicy,
    glu: Glu = swiglu,
    exact: bool = True,
    placement: ExpertPlacement | None = None,
) -> jax.Array:
    """float32 [B, T, W]: the sum over a token's experts ids [B, T, k] of weight * expert(x).

    x [B, T, W] in activations; weights float32 [B, T, k]. The products are rounded to activations
    unless `exact`; their sum is not, and runs in the order of ids.
    """
    held = functools.partial(_experts_here, policy=policy, glu=glu, exact=exact)
    if placement is None:
        return held(x, ids, weights, stacks, layer)
    around = jax.sharding.get_abstract_mesh()
    # Axes whose parts run by themselves already: there, x is a part of the batch.
    parted = set(around.manual_axes)
    shards = placement.mesh.shape.get(placement.tokens, 1)
    # A batch that does not divide is computed by every device.
    divided = placement.tokens not in parted and x.shape[0] % shards == 0
    batch = PartitionSpec(placement.tokens if divided else None)
    across = PartitionSpec(None, placement.experts, None, placement.width)
    down = PartitionSpec(None, placement.experts, placement.width, None)
    return jax.shard_map(
        functools.partial(held, experts=placement.experts, width=placement.width),
        mesh=around if parted else placement.mesh,
        axis_names=set(placement.mesh.axis_names) - parted,
        in_specs=(batch, batch, batch, Stacks(across, across, down), PartitionSpec()),
        out_specs=batch,
        check_vma=False,
    )(x, ids, weights, stacks, layer)


def _experts_here(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    stacks: Stacks,
    layer: jax.Array,
    *,
    policy: LayerPolicy,
    glu: Glu,
    exact: bool,
    experts: str | tuple[str, ...] | None = None,
    width: str | None = None,
) -> jax.Array:
    """`weighted_experts` by the experts that `stacks` holds: of mesh axes `experts`, this part.

    Parts of an expert's width (mesh axis `width`) are summed before anything is rounded.
    """
    number, k = stacks.gate.shape[1], ids.shape[-1]
    first = 0 if experts is None else jax.lax.axis_index(experts) * number
    local = ids - first
    here = (local >= 0) & (local < number)
    rows = jnp.where(here, local, number).reshape(-1)  # others come last when sorted
    out_dtype = jnp.float32 if width is not None else policy.activations.storage_dtype
    y = _by_expert(x.reshape(-1, x.shape[-1]), rows, k, stacks, layer, policy, glu, out_dtype)
    if width is not None:
        y = jax.lax.psum(y, width)
    y = round_to(y.astype(jnp.float32), policy.activations).reshape(*ids.shape, x.shape[-1])
    y = y * weights[..., None]
    y = jnp.where(here[..., None], y if exact else round_to(y, policy.activations), 0.0)
    y = functools.reduce(jnp.add, (y[..., at, :] for at in range(k)))
    return y if experts is None else jax.lax.psum(y, experts)


def _by_expert(
    x: jax.Array,
    rows: jax.Array,
    k: int,
    stacks: Stacks,
    layer: jax.Array,
    policy: LayerPolicy,
    glu: Glu,
    out_dtype: jnp.dtype,
) -> jax.Array:
    """[N * k, W]: expert rows[i] of x[i // k]; where rows[i] is none (= E), anything finite.

    x [N, W]; rows int32 [N * k], local experts.
    """
    number, total, width = stacks.gate.shape[1], rows.shape[0], x.shape[1]
    block = _block_rows(total, number, x.shape[0])
    order = jnp.argsort(rows, stable=True)
    starts = jnp.searchsorted(rows[order], jnp.arange(number + 1, dtype=rows.dtype))
    blocks = -(-jnp.diff(starts) // block)
    ends = jnp.cumsum(blocks)
    padded = jnp.pad(order, (0, block))

    def one_block(at: jax.Array, out: jax.Array) -> jax.Array:
        expert = jnp.sum(ends <= at, dtype=jnp.int32)
        begin = starts[expert] + (at - (ends - blocks)[expert]) * block
        tokens = jax.lax.dynamic_slice_in_dim(padded, begin, block) // k
        h = x[tokens]
        gate, up, down = (_matrix(stack, layer, expert) for stack in stacks)
        hidden = glu(linear(h, gate, policy), linear(h, up, policy), policy)
        y = dot(hidden, down, policy)
        # Rows past the expert's last are overwritten by the blocks that follow.
        return jax.lax.dynamic_update_slice(out, y.astype(out.dtype), (begin, jnp.int32(0)))

    out = jnp.zeros((total + block, width), out_dtype)
    out = jax.lax.fori_loop(0, ends[-1], one_block, out)
    # Not argsort(order): a TPU's compiler takes long over a sort.
    back = jnp.zeros_like(order).at[order].set(jnp.arange(total, dtype=order.dtype))
    return out[back]


def _matrix(stack: jax.Array | Packed, layer: jax.Array, expert: jax.Array) -> jax.Array:
    """stack [layers, E, ...] at one layer and expert."""
    start = (layer, expert, jnp.int32(0), jnp.int32(0))

    def at(leaf: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice(leaf, start, (1, 1, *leaf.shape[2:]))[0, 0]

    return unpacked(jax.tree.map(at, stack))


def _block_rows(rows: int, experts: int, tokens: int) -> int:
    """A power of two near the rows of an average expert, within bounds; no more than tokens."""
    mean = max(1, rows // experts)
    return min(max(_LEAST_BLOCK, 1 << (mean - 1).bit_length()), _MOST_BLOCK, tokens)

"""One training step and the held-out loss, compiled, with the batch split over the devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from kernjax.demo import net
from kernjax.demo.data import KINDS, sample_windows
from kernjax.model.config import ModelConfig


def replicate(mesh: Mesh, tree: Any) -> Any:
    """The tree on every device of the mesh."""
    return jax.device_put(tree, NamedSharding(mesh, P()))


def arrange(windows: np.ndarray, devices: int) -> tuple[np.ndarray, np.ndarray]:
    """Windows [kinds, n, T + 1] as rows [kinds * n, T + 1] and their kinds int32 [kinds * n].

    Every device gets rows of both kinds where they divide, so that no device waits for another.
    """
    kinds, count, length = windows.shape
    labels = np.broadcast_to(np.arange(kinds, dtype=np.int32)[:, None], (kinds, count))
    if count % devices == 0:
        windows = windows.reshape(kinds, devices, -1, length).swapaxes(0, 1)
        labels = labels.reshape(kinds, devices, -1).swapaxes(0, 1)
    return windows.reshape(-1, length), np.ascontiguousarray(labels).reshape(-1)


def make_train_step(
    config: ModelConfig, optimiser: optax.GradientTransformation, mesh: Mesh
) -> Callable[..., tuple[Any, Any, jax.Array, jax.Array]]:
    """(params, opt_state, rows, kinds, rate) -> (params, opt_state, loss by kind, gradient norm).

    Parameters and optimiser state are donated: their old buffers are gone after the call.
    """

    def loss(params: Any, rows: jax.Array):
        per_row = jnp.mean(net.token_losses(params, rows, config), axis=-1)
        return jnp.mean(per_row), per_row

    def local(params: Any, opt_state: Any, rows: jax.Array, kinds: jax.Array, rate: jax.Array):
        (_, per_row), grads = jax.value_and_grad(loss, has_aux=True)(params, rows)
        grads = jax.lax.pmean(grads, "data")
        with jax.numpy_dtype_promotion("standard"):  # optax raises a float to a whole number
            updates, opt_state = optimiser.update(grads, opt_state, params)
        params = jax.tree.map(lambda p, u: p + rate * u, params, updates)
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
        return params, opt_state, _by_kind(per_row, kinds), norm

    sharded = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(P(), P(), P("data"), P("data"), P()),
        out_specs=P(),
        check_vma=False,
    )
    return jax.jit(sharded, donate_argnums=(0, 1))


def make_evaluate(
    config: ModelConfig, mesh: Mesh, held_out: Mapping[str, np.ndarray], length: int, count: int
) -> Callable[[Any], dict[str, float]]:
    """params -> mean loss in nats a token by kind, over `count` held-out windows of each."""
    windows = np.stack([sample_windows(held_out[kind], 0, count, length) for kind in KINDS])
    devices = mesh.devices.size
    rows, kinds = arrange(windows, devices)

    def local(params: Any, row: jax.Array, kind: jax.Array) -> jax.Array:
        per_row = jnp.mean(net.token_losses(params, row, config), axis=-1)
        return _by_kind(per_row, kind)

    sharded = jax.jit(
        jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(P(), P("data"), P("data")),
            out_specs=P(),
            check_vma=False,
        )
    )

    def evaluate(params: Any) -> dict[str, float]:
        # Two rows of each kind a call: attention over all rows at once would fill the memory.
        rows_at = [np.flatnonzero(kinds == kind) for kind in range(len(KINDS))]
        losses = []
        for start in range(0, count, devices):
            chosen = np.concatenate([at[start : start + devices] for at in rows_at])
            losses.append(sharded(params, rows[chosen], kinds[chosen]))
        means = np.mean([np.asarray(x) for x in losses], axis=0)
        return {kind: round(float(x), 4) for kind, x in zip(KINDS, means, strict=True)}

    return evaluate


def _by_kind(per_row: jax.Array, kinds: jax.Array) -> jax.Array:
    """Mean of per_row [rows] by kind [kinds], over all devices."""
    member = kinds == jnp.arange(len(KINDS))[:, None]
    total = jax.lax.psum(jnp.sum(jnp.where(member, per_row, 0.0), axis=1), "data")
    return total / jax.lax.psum(jnp.sum(member, axis=1, dtype=jnp.float32), "data")

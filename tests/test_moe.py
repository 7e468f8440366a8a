"""The mixture of experts against a float64 transcription of its equations, token by token."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernjax.base.errors import UserError
from kernjax.model.config import SIGMOID, MoEConfig
from kernjax.model.moe import MoE, route
from kernjax.precision import parse_policy
from pallas_kernels.formats import store

LAYERS, D, EPS = 2, 24, 1e-5
F32 = parse_policy("f32").without_overrides()

# As Qwen3.5 has it; and with all that Kimi K3's has: sigmoid, bias, latent width, norm, scaling.
GATED = MoEConfig(7, 3, 10, shared_size=12, shared_gate=True)
LATENT = MoEConfig(
    11, 4, 6, scoring=SIGMOID, correction_bias=True, scaling=2.5, float32_router=True,
    shared_size=9, latent_size=8, latent_norm=True,
)  # fmt: skip
PLAIN = MoEConfig(5, 2, 6, normalise=False)


def draw(config: MoEConfig, seed: int = 0) -> dict[str, Any]:
    """float32 parameters of LAYERS layers."""
    rng = np.random.default_rng(seed)

    def matrix(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * shape[-2] ** -0.5).astype(np.float32)

    def mlp(*lead: int, width: int, size: int) -> dict[str, np.ndarray]:
        wide = {name: matrix(*lead, width, size) for name in ("gate", "up")}
        return wide | {"down": matrix(*lead, size, width)}

    width = config.latent_size or D
    params: dict[str, Any] = {
        "router": 2 * matrix(LAYERS, D, config.num_experts),
        "experts": mlp(LAYERS, config.num_experts, width=width, size=config.expert_size),
    }
    if config.correction_bias:
        params["correction"] = 0.3 * rng.standard_normal((LAYERS, config.num_experts))
    if config.shared_size:
        params["shared"] = mlp(LAYERS, width=D, size=config.shared_size)
    if config.shared_gate:
        params["shared_gate"] = matrix(LAYERS, D, 1)
    if config.latent_size:
        params |= {"latent_down": matrix(LAYERS, D, width), "latent_up": matrix(LAYERS, width, D)}
    if config.latent_norm:
        params["latent_norm"] = 1 + 0.2 * rng.standard_normal((LAYERS, width))
    return jax.tree.map(np.float32, params)


def layer_of(params: dict[str, Any], layer: int) -> MoE:
    one = {
        name: value if name == "experts" else jax.tree.map(lambda leaf: leaf[layer], value)
        for name, value in params.items()
    }
    return MoE(jax.tree.map(jnp.asarray, one))


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def expected(params: dict[str, Any], layer: int, config: MoEConfig, x: np.ndarray, forced=None):
    """(y [B, T, D], ids [B, T, k], gaps [B, T]) in float64."""
    p = jax.tree.map(lambda leaf: leaf[layer].astype(np.float64), params)
    y = np.empty(x.shape)
    ids = np.empty((*x.shape[:2], config.experts_per_token), int)
    gaps = np.empty(x.shape[:2])

    def mlp(x: np.ndarray, w: dict[str, np.ndarray], *at: int) -> np.ndarray:
        gate = x @ w["gate"][at]
        return (gate * sigmoid(gate) * (x @ w["up"][at])) @ w["down"][at]

    for at in np.ndindex(x.shape[:2]):
        token = x[at].astype(np.float64)
        scores = token @ p["router"]
        if config.scoring == SIGMOID:
            shares = sigmoid(scores)
            scores = shares + p["correction"]
        else:
            shares = np.exp(scores) / np.exp(scores).sum()
        chosen = np.argsort(-scores, kind="stable")[: config.experts_per_token]
        chosen = chosen if forced is None else forced[at]
        ids[at], rest = chosen, np.delete(scores, chosen)
        gaps[at] = scores[chosen].min() - rest.max()
        weights = shares[chosen]
        if config.normalise:
            weights = weights / weights.sum()
        h = token @ p["latent_down"] if config.latent_size else token
        pairs = zip(config.scaling * weights, chosen, strict=True)
        out = sum(weight * mlp(h, p["experts"], expert) for weight, expert in pairs)
        if config.latent_norm:
            out = out / np.sqrt(np.mean(out**2) + EPS) * p["latent_norm"]
        if config.latent_size:
            out = out @ p["latent_up"]
        if config.shared_size:
            shared = mlp(token, p["shared"])
            out = out + (sigmoid(token @ p["shared_gate"]) if config.shared_gate else 1) * shared
        y[at] = out
    return y, ids, gaps


def run(params, layer, config, x, forced=None, policy=F32):
    call = jax.jit(
        lambda x, index, forced: layer_of(params, layer)(
            x, index, policy, config, eps=EPS, forced=forced
        )
    )
    return call(jnp.asarray(x), jnp.int32(layer), forced)


@pytest.mark.parametrize(
    ("config", "time"),
    [(GATED, 37), (LATENT, 37), (PLAIN, 37), (GATED, 1)],
    ids=["gated", "latent", "plain", "one token"],
)
def test_equals_its_equations(config, time) -> None:
    params = draw(config)
    x = np.random.default_rng(1).standard_normal((2, time, D)).astype(np.float32)
    y, routes = run(params, 1, config, x)
    want, ids, gaps = expected(params, 1, config, x)
    np.testing.assert_array_equal(routes.ids, ids)
    np.testing.assert_allclose(routes.gaps, gaps, atol=1e-5)
    assert np.asarray(routes.gaps).min() >= 0
    np.testing.assert_allclose(y, want, atol=1e-5)


def test_forced_experts_are_taken_and_weighted_by_their_own_scores() -> None:
    params, rng = draw(LATENT), np.random.default_rng(2)
    x = rng.standard_normal((2, 9, D)).astype(np.float32)
    forced = np.stack([rng.permutation(11)[:4] for _ in range(18)]).reshape(2, 9, 4)
    forced = forced.astype(np.int32)
    want, _, gaps = expected(params, 1, LATENT, x, forced)
    assert (gaps < 0).any()
    # A token that is not forced goes where the router sends it.
    own, own_ids, own_gaps = expected(params, 1, LATENT, x[1:, 3:4])
    want[1, 3], gaps[1, 3] = own[0, 0], own_gaps[0, 0]
    taken = forced.copy()
    taken[1, 3], forced[1, 3, 2] = own_ids[0, 0], -1
    y, routes = run(params, 1, LATENT, x, jnp.asarray(forced))
    np.testing.assert_array_equal(routes.ids, taken)
    np.testing.assert_allclose(routes.gaps, gaps, atol=1e-5)
    np.testing.assert_allclose(y, want, atol=1e-5)


def test_of_equal_experts_the_smallest_ids() -> None:
    """All scores equal; then two pairs of equal ones, of which one lies across the cutoff."""
    config = MoEConfig(6, 3, 4)
    x = np.ones((1, 2), np.float32)
    for column, ids in (([0] * 6, [0, 1, 2]), ([0, 2, 1, 1, 2, 0], [1, 4, 2])):
        router = np.stack([np.float32(column), np.zeros(6, np.float32)])
        routes, weights = route(jnp.asarray(x), jnp.asarray(router), None, F32, config)
        assert routes.ids.tolist() == [ids] and routes.gaps.tolist() == [0.0]
        assert float(weights.sum()) == pytest.approx(1)


def test_where_all_are_chosen_nothing_is_near() -> None:
    config = MoEConfig(3, 3, 4)
    routes, _ = route(jnp.ones((2, 2)), jnp.ones((2, 3)), None, F32, config)
    assert (np.asarray(routes.gaps) == np.finfo(np.float32).max).all()


def test_values_are_rounded_as_the_policy_says() -> None:
    """bfloat16 in between moves the outputs by bfloat16's precision, and the same inputs' routes
    only where the router's logits are that near."""
    policy = parse_policy("bf16").without_overrides()
    params = draw(GATED)
    params = jax.tree.map(lambda leaf: np.asarray(store(leaf, policy.weights), np.float32), params)
    x = np.asarray(store(np.random.default_rng(3).standard_normal((1, 64, D)), policy.activations))
    y, routes = run(params, 0, GATED, x, policy=policy)
    want, ids, gaps = expected(params, 0, GATED, x.astype(np.float32))
    same = (np.sort(routes.ids, axis=-1) == np.sort(ids, axis=-1)).all(axis=-1)
    assert same[gaps > 0.05].all() and y.dtype == jnp.bfloat16
    error = np.abs(np.asarray(y, np.float64) - want)[same]
    assert 1e-4 < np.max(error) < 0.05


def test_more_experts_a_token_than_there_are() -> None:
    with pytest.raises(UserError, match="at most as many experts as there are"):
        MoEConfig(4, 5, 8)
    with pytest.raises(UserError, match="unknown function, 'tanh'"):
        MoEConfig(4, 2, 8, scoring="tanh")


EIGHT_DEVICES = """
    import sys
    import jax, numpy as np
    jax.config.update("jax_num_cpu_devices", 8)
    import jax.numpy as jnp
    sys.path.insert(0, sys.argv[1])
    from test_moe import EPS, F32, draw, expected, layer_of
    from kernjax.model.config import SIGMOID, MoEConfig
    from kernjax.model.moe import ExpertPlacement
    from kernjax.weights import parse_mesh

    config = MoEConfig(8, 3, 6, scoring=SIGMOID, correction_bias=True, shared_size=4)
    params = draw(config)
    x = np.random.default_rng(1).standard_normal((4, 5, 24)).astype(np.float32)
    want, ids, _ = expected(params, 1, config, x)
    for text in ("data=2,tensor=4", "fsdp=2,expert=2,tensor=2"):
        mesh = parse_mesh(text)
        width = "fsdp" if mesh.shape["fsdp"] > 1 else None
        placement = ExpertPlacement(mesh, "data", ("expert", "tensor"), width)
        call = jax.jit(lambda x: layer_of(params, 1)(
            x, jnp.int32(1), F32, config, eps=EPS, placement=placement))
        for batch in (4, 1):  # one does not divide: every device computes it
            y, routes = call(jnp.asarray(x[:batch]))
            np.testing.assert_array_equal(routes.ids, ids[:batch])
            np.testing.assert_allclose(y, want[:batch], atol=1e-5)
    print("same numbers")
"""


def test_experts_on_a_mesh() -> None:
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(EIGHT_DEVICES), str(root / "tests")],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "same numbers"

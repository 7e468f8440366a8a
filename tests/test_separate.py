"""Stacks of matrices held as an array a layer: the same numbers, read where they lie."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import jaxlib.version
import numpy as np
import pytest
from flax import nnx
from tiny import CONFIG

from kernjax.model import Decoder, ModelConfig, forward, init_cache, logits, plan_execution
from kernjax.model.params import random_params
from kernjax.model.separate import OneOf, Separate, separated, whole
from kernjax.precision import parse_policy

TYPES = ["linear_attention"] * 3 + ["full_attention"]
MODEL = ModelConfig.from_dict(CONFIG | {"num_hidden_layers": 4, "layer_types": TYPES})
TOKENS = np.random.default_rng(0).integers(0, MODEL.vocab_size, (2, 24)).astype(np.int32)


def run(params, policy: str, compiled: list[str] | None = None):
    """Logits after prefill of 20 tokens, and of each of four steps."""
    execution = plan_execution(parse_policy(policy), MODEL.num_layers)
    graph, state = nnx.split(Decoder(MODEL, params))

    def step(decode, state, tokens, cache):
        decoder = nnx.merge(graph, state)
        hidden, cache, _ = forward(decoder, tokens, cache, execution, decode=decode)
        return logits(decoder, hidden[:, -1], execution), cache

    prefill, decode = jax.jit(lambda *a: step(False, *a)), jax.jit(lambda *a: step(True, *a))
    cache = init_cache(MODEL, execution, 2, 32)
    program = prefill.lower(state, TOKENS[:, :20], cache).compile()
    if compiled is not None:
        compiled.append(program.as_text())
    out, cache = program(state, TOKENS[:, :20], cache)
    seen = [out]
    for at in range(20, 24):
        out, cache = decode(state, TOKENS[:, at : at + 1], cache)
        seen.append(out)
    return np.stack(seen)


def apart(params):
    return separated(jax.tree.map(lambda leaf: leaf, params), MODEL)


def test_which_parameters_are_separate_and_how() -> None:
    params = random_params(MODEL, 0)
    given = jax.tree.map(lambda leaf: leaf, params)
    found = separated(given, MODEL)
    assert given == {}, "what was taken apart is held no longer"
    up = found["linear"]["mlp"]["up"]
    assert isinstance(up, Separate) and len(up.matrices) == 3
    for layer, matrix in enumerate(up.matrices):
        np.testing.assert_array_equal(matrix, params["linear"]["mlp"]["up"][layer])
    full = found["full"]["o"]
    assert isinstance(full, Separate) and len(full.matrices) == 1
    for stack, name in (("linear", "conv"), ("linear", "A_log"), ("full", "post_norm")):
        assert found[stack][name] is params[stack][name]
    assert found["embed"] is params["embed"]
    shapes = jax.eval_shape(lambda: params)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), separated(shapes, MODEL)) == (
        jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), found)
    )


@pytest.mark.parametrize("policy", ["f32", "f32,attention.p=e4m3*448@layers=3"])
def test_the_very_logits_of_stacks(policy: str) -> None:
    """Also where a layer's own policy makes branches around the product."""
    params = random_params(MODEL, 1)
    np.testing.assert_array_equal(run(apart(params), policy), run(params, policy))


def test_bfloat16_matrices_are_never_widened() -> None:
    """Of stacks, XLA makes a float32 copy of all layers in every call (jaxlib below 0.12)."""
    params = random_params(MODEL, 2, "bfloat16")
    texts: list[str] = []
    stacked = run(params, "bf16", texts)
    separate = run(apart(params), "bf16", texts)
    np.testing.assert_array_equal(separate, stacked)
    rows, columns = params["linear"]["mlp"]["up"].shape[1:]
    wide = [re.findall(rf"f32\[(?:3,)?(?:{rows},{columns}|{columns},{rows})\]", t) for t in texts]
    assert wide[0] or jaxlib.version.__version_info__ >= (0, 12)
    assert not wide[1]


def test_one_of_many_is_known_only_when_it_is_read() -> None:
    matrices = tuple(jnp.arange(6.0).reshape(2, 3) + 10 * layer for layer in range(3))
    read = jax.jit(lambda index: whole(Separate(matrices).row(index)))
    for layer in range(3):
        np.testing.assert_array_equal(read(jnp.int32(layer)), matrices[layer])
    assert whole(matrices[0]) is matrices[0]
    one = OneOf(matrices, jnp.int32(0))
    assert one[...] is one
    with pytest.raises(TypeError, match="not read yet"):
        one[0]

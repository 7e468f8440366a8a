"""Kimi Linear and Kimi K3 against a NumPy float64 transcription, whole and block by block."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import kimi_checkpoints as checkpoints
import numpy as np
import pytest
from flax import nnx
from kimi_numpy import Kimi, situ

from kernjax.model import (
    Decoder,
    ModelConfig,
    forward,
    init_cache,
    logits,
    one_layer,
    plan_execution,
    run_layer,
)
from kernjax.model.execution import LayerCall
from kernjax.model.layers import situ_glu
from kernjax.model.params import abstract_params, leaves, tree_of
from kernjax.precision import LayerPolicy, parse_policy
from kernjax.weights import load_model, load_params

TOKENS = np.random.default_rng(2).integers(0, 50, (1, 80)).astype(np.int32)
PREFILLED = 72


@functools.cache
def compiled(graph, execution, decode):
    """One program a (model, decode) and shape of tokens."""

    def call(params, tokens, cache, count):
        model = nnx.merge(graph, params)
        hidden, cache, seen = forward(
            model, tokens, cache, execution, count=count, decode=decode,
            capture=jnp.arange(tokens.shape[1]),
        )  # fmt: skip
        return logits(model, hidden, execution), cache, seen.hidden

    return jax.jit(call)


def run(model: Decoder, windows: list[tuple[int, int]], steps: int = 0):
    """(logits [T, vocab], hidden [layers, T, D]) of TOKENS in windows (size, real), then steps."""
    execution = plan_execution(parse_policy("f32"), model.config.num_layers)
    graph, params = nnx.split(model)
    cache = init_cache(model.config, execution, 1, 128)
    out, seen, at = [], [], 0
    for size, real in [*windows, *[(1, 1)] * steps]:
        tokens = np.zeros((1, size), np.int32)
        tokens[:, :real] = TOKENS[:, at : at + real]
        step = compiled(graph, execution, size == 1)
        scored, cache, hidden = step(params, tokens, cache, jnp.int32(real))
        out.append(np.asarray(scored)[0, :real])
        seen.append(np.asarray(hidden)[:, 0, :real])
        at += real
    return np.concatenate(out), np.concatenate(seen, axis=1)


@pytest.fixture(scope="module")
def k3(tmp_path_factory):
    """(model, NumPy's) of a K3 checkpoint whose experts are MXFP4, held in float32."""
    directory = tmp_path_factory.mktemp("k3")
    values = checkpoints.write_k3(directory, seed=5)
    return load_model(directory, dtype="float32"), Kimi(checkpoints.K3_TEXT, values)


@pytest.fixture(scope="module")
def k3_run(k3):
    """What `run` gives in two windows, the second padded, and then token by token."""
    return run(k3[0], [(40, 40), (40, PREFILLED - 40)], steps=80 - PREFILLED)


def test_k3_in_windows_and_token_by_token_is_the_transcription_in_one_pass(k3, k3_run):
    expected = k3[1].logits(TOKENS[0])
    assert 0.5 < expected.std() < 20
    np.testing.assert_allclose(k3_run[0], expected, atol=1e-4)


def test_bits_do_not_depend_on_when_experts_are_dequantised(k3, tmp_path):
    """A checkpoint of the values themselves gives the same parameters."""
    model, numpy = k3
    tensors = {name: x.astype(np.float32) for name, x in numpy.t.items()}
    plain = load_params(checkpoints.write(tmp_path, checkpoints.K3, tensors), model.config)
    ours = nnx.split(model.linear_moe)[1]["moe"]["experts"]
    for part in ("gate", "up", "down"):
        np.testing.assert_array_equal(ours[part][...], plain["linear_moe"]["moe"]["experts"][part])


@pytest.fixture(scope="module", params=["kimi_linear", "kimi_k3"])
def blocks(request):
    """(config, decoder on the drawn tensors, NumPy's, layer inputs float32 [T, D])."""
    raw = {"kimi_linear": checkpoints.LINEAR, "kimi_k3": checkpoints.K3}[request.param]
    tensors = checkpoints.draw(raw, seed=5)
    x = np.random.default_rng(6).standard_normal((70, raw_width(raw))).astype(np.float32)
    return raw, tensors, Kimi(checkpoints.text_of(raw), tensors), x


def raw_width(raw: dict) -> int:
    return checkpoints.text_of(raw)["hidden_size"]


@pytest.fixture(scope="module")
def loaded(blocks, tmp_path_factory):
    raw, tensors, _, _ = blocks
    return load_model(checkpoints.write(tmp_path_factory.mktemp("blocks"), raw, tensors))


def mixed(model: Decoder, stack: str, index: int, x: np.ndarray) -> np.ndarray:
    """The mixer alone on x [T, D]: all of it at once."""
    execution = plan_execution(parse_policy("f32"), model.config.num_layers)
    cache = init_cache(model.config, execution, 1, 72)
    graph, params = nnx.split(getattr(model, stack))
    count, plan = jnp.int32(len(x)), execution.layers[0]

    @jax.jit
    def call(params, x, cache):
        layer = nnx.merge(graph, jax.tree.map(lambda leaf: leaf[index], params))
        of = LayerCall(jnp.int32(0), count, plan, model.config, False)
        return layer.mixer(x, cache, of)[0]

    return np.asarray(call(params, x[None], cache)[0])


def test_delta_mixer(blocks, loaded):
    _, _, numpy, x = blocks
    found = mixed(loaded, "linear_moe", 1, x)
    np.testing.assert_allclose(found, numpy.delta("layers.3.self_attn.", x), atol=2e-5)


def test_latent_attention(blocks, loaded):
    _, _, numpy, x = blocks
    found = mixed(loaded, "full_moe", 1, x)
    np.testing.assert_allclose(found, numpy.latent_attention("layers.4.self_attn.", x), atol=2e-5)


def test_situ():
    gate, up = np.random.default_rng(7).standard_normal((2, 50)) * 12
    found = situ_glu(4.0, 25.0)(*(jnp.asarray(v, jnp.float32) for v in (gate, up)), LayerPolicy())
    np.testing.assert_allclose(found, situ(gate, up, 4.0, 25.0), rtol=1e-5, atol=1e-5)
    # By hand: the gate saturates at beta, the other factor at linear_beta.
    huge = jnp.float32(1e4)
    np.testing.assert_allclose(situ_glu(4.0, 25.0)(huge, huge, LayerPolicy()), 100.0, rtol=1e-6)


def test_layers_with_attention_residuals_restart_the_stream(k3, k3_run):
    """What every layer leaves is the running block's sum: float64's, block by block."""
    numpy, hidden = k3[1], k3_run[1]
    size, x = 2, numpy.t["embed_tokens.weight"][TOKENS[0]]
    blocks: list[np.ndarray] = []
    for layer in range(6):
        at = f"layers.{layer}."
        h = numpy.mixture(at + "self_attention_res", [*blocks, x])
        if layer % size == 0:
            blocks, x = [*blocks, x], 0.0
        x = x + numpy.mixer(at, layer, numpy.norm(at + "input_layernorm", h))
        h = numpy.mixture(at + "mlp_res", [*blocks, x])
        x = x + numpy.mlp(at, layer, numpy.norm(at + "post_attention_layernorm", h))
        np.testing.assert_allclose(hidden[layer], x, atol=1e-4)
    assert len(blocks) == 3


def test_a_layer_by_itself_reads_the_streams_that_earlier_blocks_kept(k3, k3_run):
    """Layers 4 and 5, of which the first begins a block, on what went into them."""
    model, hidden = k3[0], k3_run[1][:, None, :40]
    stack, first = "full_moe", np.asarray(model.embed[...])[TOKENS[:, :40]]
    graph, params = nnx.split(model)
    plan = plan_execution(parse_policy("f32"), 1)
    cache = init_cache(one_layer(model.config, "full_attention"), plan, 1, 64)

    @jax.jit
    def layer(params, index, x, kept):
        model = nnx.merge(graph, params)
        return run_layer(model, stack, index, x, cache, plan, kept=kept)[0]

    for number in (4, 5):
        begun = -(-number // 2)  # blocks before this layer
        kept = np.zeros((3, *first.shape), np.float32)
        kept[:begun] = np.concatenate([first[None], hidden[1::2]])[:begun]
        index = jnp.int32(model.config.stacks[stack].index(number))
        found = layer(params, index, hidden[number - 1], kept)
        np.testing.assert_allclose(found, hidden[number], atol=2e-5)


def test_what_is_compiled_does_not_grow_with_depth():
    """K3's pattern at 13 and 29 layers, in 4 blocks, lowers to programs of one length but for
    some tables."""

    def lines(depth: int, block: int) -> int:
        full = [*range(4, depth, 4), depth]
        linear = [i for i in range(1, depth + 1) if i not in full]
        text = checkpoints.K3_TEXT | {"num_hidden_layers": depth, "attn_res_block_size": block}
        text["linear_attn_config"] = text["linear_attn_config"] | {
            "full_attn_layers": full, "kda_layers": linear,
        }  # fmt: skip
        config = ModelConfig.from_dict(checkpoints.K3 | {"text_config": text})
        execution = plan_execution(parse_policy("f32"), depth)
        model = nnx.eval_shape(lambda: Decoder(config, zeros(config)))
        graph, params = nnx.split(model)
        cache = jax.eval_shape(lambda: init_cache(config, execution, 1, 64))
        tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)

        def step(params, tokens, cache):
            return forward(nnx.merge(graph, params), tokens, cache, execution, decode=True)[0]

        return len(jax.jit(step).lower(params, tokens, cache).as_text().splitlines())

    shallow, deep = lines(13, block=4), lines(29, block=8)
    assert abs(deep - shallow) < 0.01 * shallow


def zeros(config: ModelConfig) -> dict:
    """The parameters' tree of zeros, for `eval_shape`."""
    return tree_of(
        (path, jnp.zeros(spec.shape, spec.dtype("float32")))
        for path, spec in leaves(abstract_params(config))
    )

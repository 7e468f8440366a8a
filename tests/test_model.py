"""The decoder agrees with itself however the tokens are fed, and follows the layer pattern."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny import CONFIG

from kernjax.model import Decoder, ModelConfig, forward, init_cache, logits, plan_execution
from kernjax.model.config import FULL, LINEAR
from kernjax.model.params import random_params
from kernjax.model.pattern import cycle_of, repeating_unit
from kernjax.precision import parse_policy

TOKENS = np.random.default_rng(1).integers(0, CONFIG["vocab_size"], (2, 96)).astype(np.int32)


def make(policy: str = "f32", **changes):
    config = ModelConfig.from_dict({**CONFIG, **changes})
    execution = plan_execution(parse_policy(policy), config.num_layers)
    return Decoder(config, random_params(config, 0)), execution


def run(decoder, execution, pieces, *, decode_from=None, counts=None, capture=None):
    """Logits [B, T, V] of TOKENS fed in `pieces`, single tokens from `decode_from` on."""
    graph, params = nnx.split(decoder)
    cache = init_cache(decoder.config, execution, TOKENS.shape[0], 128)
    step = jax.jit(
        lambda params, tokens, cache, count, decode: forward(
            nnx.merge(graph, params), tokens, cache, execution, count=count, decode=decode,
            capture=capture,
        ),
        static_argnames="decode",
    )  # fmt: skip
    out, at, seen = [], 0, None
    for number, size in enumerate(pieces):
        tokens = TOKENS[:, at : at + size]
        real = size if counts is None else counts[number]
        decode = decode_from is not None and at >= decode_from
        hidden, cache, seen = step(params, jnp.asarray(tokens), cache, jnp.int32(real), decode)
        out.append(logits(decoder, hidden[:, :real], execution))
        at += real
    return jnp.concatenate(out, axis=1), cache, seen


@pytest.mark.parametrize("pieces", [(64, 32), (1, 95), (33, 63), (16,) * 6])
def test_prefill_in_windows_is_one_prefill(pieces):
    decoder, execution = make()
    whole, cache, _ = run(decoder, execution, (96,))
    split, split_cache, _ = run(decoder, execution, pieces)
    np.testing.assert_allclose(whole, split, atol=2e-5)
    np.testing.assert_allclose(cache.state, split_cache.state, atol=2e-5)
    np.testing.assert_allclose(cache.conv, split_cache.conv, atol=2e-5)
    assert int(split_cache.length) == 96


def test_decode_token_by_token_is_prefill():
    decoder, execution = make()
    whole, cache, _ = run(decoder, execution, (96,))
    steps, step_cache, _ = run(decoder, execution, (64, *(1,) * 32), decode_from=64)
    np.testing.assert_allclose(whole, steps, atol=3e-5)
    np.testing.assert_allclose(cache.state, step_cache.state, atol=3e-5)


def test_padding_leaves_no_trace():
    """A window of 64 with 40 real tokens: whatever the padding holds, the rest is unchanged."""
    decoder, execution = make()
    exact, cache, _ = run(decoder, execution, (40, 56))
    padded, padded_cache, _ = run(decoder, execution, (64, 56), counts=(40, 56))
    np.testing.assert_allclose(exact, padded, atol=2e-5)
    np.testing.assert_allclose(cache.state, padded_cache.state, atol=2e-5)
    np.testing.assert_array_equal(cache.length, padded_cache.length)


@pytest.mark.parametrize(
    "head, unit, repeats, tail",
    [
        ("", "LLLF", 4, ""),
        ("", "F", 5, ""),
        ("", "LFF", 1, ""),
        ("", "LF", 3, "L"),
        ("", "L", 1, ""),
        # Kimi K3: the first layer is dense, and the last two attend.
        ("dLL", "FLLL", 22, "FF"),
    ],
)
def test_repeating_unit(head, unit, repeats, tail):
    layers = tuple(head + unit * repeats + tail)
    assert repeating_unit(layers) == (tuple(head), tuple(unit), repeats, tuple(tail))


@pytest.mark.parametrize(
    ("layers", "head", "stacks", "lengths"),
    [
        ("LLLFLLLF", "", "LF", ((3, 1), (3, 1))),
        ("LLFL", "", "LF", ((2, 1), (1, 0))),
        ("dLLFLLLFF", "d", "LF", ((2, 1), (3, 2))),
        ("LLL", "", "L", ((3,),)),
        ("abcab", "", "abc", ((1, 1, 1), (1, 1, 0))),
    ],
)
def test_cycles(layers, head, stacks, lengths):
    assert cycle_of(tuple(layers)) == (tuple(head), tuple(stacks), lengths)
    told = list(head)
    for one_round in lengths:
        for name, length in zip(stacks, one_round, strict=True):
            told += [name] * length
    assert told == list(layers)


@pytest.mark.parametrize(
    "pattern",
    [
        ["linear_attention", "full_attention"] * 2 + ["linear_attention"],
        ["full_attention", "linear_attention"],
        ["full_attention"],
        ["linear_attention"] * 3,
    ],
)
def test_captured_layers_are_in_layer_order(pattern):
    """Layer n of a model is the last layer of the model cut after n."""
    changes = {"layer_types": pattern, "num_hidden_layers": len(pattern)}
    decoder, execution = make(**changes)
    columns = jnp.asarray([0, 5, 95])
    _, _, seen = run(decoder, execution, (96,), capture=columns)
    assert seen.hidden.shape == (len(pattern), 2, 3, CONFIG["hidden_size"]) and not seen.routes
    for depth in range(1, len(pattern) + 1):
        config = ModelConfig.from_dict(
            {**CONFIG, "layer_types": pattern[:depth], "num_hidden_layers": depth}
        )
        full = random_params(decoder.config, 0)
        kinds = {"linear": pattern[:depth].count(LINEAR), "full": pattern[:depth].count(FULL)}
        params = {
            name: jax.tree.map(lambda leaf, count=kinds[name]: leaf[:count], value)
            if name in kinds
            else value
            for name, value in full.items()
            if kinds.get(name, 1)
        }
        cut = Decoder(config, params)
        _, _, short = run(cut, plan_execution(parse_policy("f32"), depth), (96,), capture=columns)
        np.testing.assert_allclose(seen.hidden[depth - 1], short.hidden[depth - 1], atol=1e-5)


def test_a_policy_at_one_layer_changes_that_layer_and_those_after():
    decoder, plain = make()
    columns = jnp.arange(96)
    _, _, before = run(decoder, plain, (96,), capture=columns)
    policy = parse_policy("f32,delta_rule.v_new=bf16@layers=1")
    execution = plan_execution(policy, decoder.config.num_layers)
    assert len(set(execution.layers)) == 2
    _, _, after = run(decoder, execution, (96,), capture=columns)
    pairs = zip(before.hidden, after.hidden, strict=True)
    changed = [not np.array_equal(a, b) for a, b in pairs]
    assert changed == [False, True, True, True]


def test_batch_rows_do_not_see_each_other():
    decoder, execution = make()
    together, _, _ = run(decoder, execution, (96,))
    global TOKENS
    saved, TOKENS = TOKENS, TOKENS[::-1]
    try:
        swapped, _, _ = run(decoder, execution, (96,))
    finally:
        TOKENS = saved
    np.testing.assert_array_equal(together, swapped[::-1])


def test_ground_truth_states_its_precision():
    """Every matrix product of the f32 policy asks for HIGHEST in the lowered program."""
    decoder, execution = make()
    graph, params = nnx.split(decoder)
    cache = init_cache(decoder.config, execution, 2, 128)

    def whole(params, tokens, cache, decode):
        model = nnx.merge(graph, params)
        hidden, cache, _ = forward(model, tokens, cache, execution, decode=decode)
        return logits(model, hidden, execution), cache

    for tokens, decode in ((TOKENS, False), (TOKENS[:, :1], True)):
        text = jax.jit(whole, static_argnums=3).lower(params, tokens, cache, decode).as_text()
        dots = [line for line in text.splitlines() if "dot_general" in line]
        assert dots
        loose = [line for line in dots if "precision = [HIGHEST, HIGHEST]" not in line]
        assert not loose, loose[:3]

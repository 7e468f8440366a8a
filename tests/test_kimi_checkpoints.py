"""Configs and files of Kimi Linear and Kimi K3: what is read, and what is refused."""

from __future__ import annotations

import kimi_checkpoints as checkpoints
import numpy as np
import pytest

from kernjax.base.errors import UserError
from kernjax.model import ModelConfig
from kernjax.model.params import abstract_params, leaves
from kernjax.planning.models import read_model
from kernjax.precision import parse_policy
from kernjax.weights import load_params, text_tensors
from kernjax.weights.names import expected_shapes


def test_published_k3():
    config = read_model("kimi-k3")
    assert len(config.linear_layers) == 69 and config.full_layers[-2:] == (91, 92)
    assert config.moe_layers == tuple(range(1, 93))
    assert config.cached_widths == (576, 512) and config.num_kv_heads == 1
    assert (config.delta.lower_bound, config.situ_betas) == (-5.0, (4.0, 25.0))
    # Read from the published headers: 92 x 896 experts of 3 x 3584 x 3072, and everything else.
    sizes = {"/".join(path): spec.size for path, spec in leaves(abstract_params(config))}
    routed = sum(size for name, size in sizes.items() if "/experts/" in name)
    assert routed == 92 * 896 * 3 * 3584 * 3072
    assert abs(sum(sizes.values()) / 2.7795e12 - 1) < 2e-5


@pytest.mark.parametrize("raw", [checkpoints.LINEAR, checkpoints.K3], ids=["linear", "k3"])
def test_names_and_shapes_are_the_published_ones(raw):
    text = checkpoints.text_of(raw)
    heads = text["linear_attn_config"]["num_heads"]
    assert expected_shapes(ModelConfig.from_dict(raw)) == checkpoints.shapes(text, (1, 1, heads, 1))


def test_transformers_own_config_reads_the_same():
    """It writes lists of kinds beside, or in place of, the published lists counted from 1."""
    raw = checkpoints.LINEAR
    kinds = {
        "layer_types": ["linear_attention"] + ["linear_attention", "full_attention"] * 2
        + ["linear_attention"],
        "mlp_layer_types": ["dense"] + ["sparse"] * 5,
    }  # fmt: skip
    expected = ModelConfig.from_dict(raw)
    assert ModelConfig.from_dict(raw | kinds) == expected
    nested = raw["linear_attn_config"]
    flat = {name: value for name, value in raw.items() if name != "linear_attn_config"} | kinds
    flat |= {
        "linear_head_dim": nested["head_dim"],
        "linear_num_heads": nested["num_heads"],
        "linear_conv_kernel_dim": nested["short_conv_kernel_size"],
    }
    flat["model_max_length"] = flat.pop("max_position_embeddings")
    assert ModelConfig.from_dict(flat) == expected


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu'.*'silu' or 'situ'"),
        ({"hidden_act": "situ"}, "activation_situ_beta is missing"),
        ({"mla_use_nope": False}, "mla_use_nope=False is not implemented"),
        ({"num_expert_group": 2}, "num_expert_group=2 is not implemented"),
        ({"num_experts_per_token": 9}, "9 experts a token, but 6 experts"),
        ({"num_key_value_heads": 2}, "num_key_value_heads=2.*num_attention_heads"),
        ({"attn_res_block_size": 0}, "attn_res_block_size=0.*positive whole number"),
        ({"layer_types": ["full_attention"] * 6}, "layer_types has attention in layers 1, 2"),
        ({"mlp_layer_types": ["sparse"] * 6}, "mlp_layer_types has experts in layers 1, 2"),
        ({"first_k_dense_replace": None}, "first_k_dense_replace and mlp_layer_types are missing"),
        ({"num_experts_per_tok": 3}, "num_experts_per_token=2 but num_experts_per_tok=3"),
    ],
)
def test_refused_configs(changes, message):
    with pytest.raises(UserError, match=message):
        ModelConfig.from_dict(checkpoints.LINEAR | changes)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"full_attn_layers": [2, 5]}, "both has layer 2 and neither has layer 3"),
        ({"full_attn_layers": [0, 3, 5]}, "full_attn_layers has layer 0.*counted from 1 to"),
        ({"kda_layers": [1, 2, 4, 7]}, "kda_layers has layer 7"),
        ({"kda_layers": [1, 1, 2, 4, 6]}, "kda_layers has a layer twice"),
        ({"kda_layers": None}, "kda_layers is missing.*a list of layers, counted from 1"),
        ({"gate_lower_bound": 5.0}, "gate_lower_bound=5.0.*below 0"),
        ({"head_dim": None}, "linear_attn_config: field head_dim is missing"),
    ],
)
def test_refused_lists_of_layers(changes, message):
    lists = checkpoints.LINEAR["linear_attn_config"] | changes
    with pytest.raises(UserError, match=message):
        ModelConfig.from_dict(checkpoints.LINEAR | {"linear_attn_config": lists})


@pytest.mark.parametrize("shape", [(2,), (1, 1, 2, 1), (8,)])
def test_layouts_of_decays(tmp_path, shape):
    """One a head, with axes around, or padded with zeros: the same parameter."""
    tensors, rates = checkpoints.draw(checkpoints.LINEAR), {}
    for name in tensors:
        if name.endswith("A_log"):
            rates[name] = tensors[name].reshape(-1)
            padded = np.zeros(shape, np.float32)
            padded.reshape(-1)[:2] = rates[name]
            tensors[name] = padded
    directory = checkpoints.write(tmp_path, checkpoints.LINEAR, tensors)
    params = load_params(directory, ModelConfig.from_directory(directory))
    np.testing.assert_array_equal(params["linear"]["A_log"], [rates["layers.0.self_attn.A_log"]])


def test_decays_past_the_heads_must_be_padding(tmp_path):
    tensors = checkpoints.draw(checkpoints.K3)
    tensors["layers.1.self_attn.A_log"][5] = 0.1
    directory = checkpoints.write(tmp_path, checkpoints.K3, tensors)
    with pytest.raises(UserError, match="layers.1.self_attn.A_log.*8 numbers for 2 heads"):
        text_tensors(directory, ModelConfig.from_directory(directory))


def test_dense_layers_by_the_name_that_transformers_gives_them(tmp_path):
    tensors = checkpoints.draw(checkpoints.LINEAR)
    renamed = {
        n.replace("layers.0.mlp.", "layers.0.block_sparse_moe."): x for n, x in tensors.items()
    }
    assert renamed.keys() != tensors.keys()
    directory = checkpoints.write(tmp_path, checkpoints.LINEAR, renamed)
    params = load_params(directory, ModelConfig.from_directory(directory))
    gate = tensors["layers.0.mlp.gate_proj.weight"]
    np.testing.assert_array_equal(params["linear"]["mlp"]["gate"][0], gate.T)


def test_missing_and_left_over_tensors(tmp_path):
    tensors = checkpoints.draw(checkpoints.K3)
    del tensors["layers.2.self_attn.g_proj.weight"]
    tensors["layers.2.self_attn.g_a_proj.weight"] = np.ones((3, 3), np.float32)
    directory = checkpoints.write(tmp_path, checkpoints.K3, tensors)
    with pytest.raises(UserError) as refused:
        text_tensors(directory, ModelConfig.from_directory(directory))
    prefix = "language_model.model.layers.2.self_attn"
    assert f" - {prefix}.g_proj.weight" in str(refused.value)
    assert f" + {prefix}.g_a_proj.weight" in str(refused.value)


def test_transformers_is_not_asked_for_k3(tmp_path):
    from kernjax.engines.transformers import TransformersProducer

    checkpoints.write(tmp_path, checkpoints.K3, checkpoints.draw(checkpoints.K3))
    with pytest.raises(UserError, match="Kimi K3.*no class.*engine=jax"):
        TransformersProducer(tmp_path, parse_policy("f32"))

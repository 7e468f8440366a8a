"""ModelConfig: the published figures, both wrappers, and an error for everything else."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from tiny_checkpoints import TINY, published_config

from kernjax.base.errors import UserError
from kernjax.model.config import FULL, LINEAR, ModelConfig


def without(*names: str) -> dict[str, Any]:
    return {key: value for key, value in TINY.items() if key not in names}


def test_published_27b() -> None:
    folder = published_config()
    if folder is None:
        pytest.skip("Qwen3.8-27B's config.json is not beside this checkout")
    config = ModelConfig.from_directory(folder)
    assert config == ModelConfig(
        model_type="qwen3_5_text",
        vocab_size=248320,
        hidden_size=5120,
        num_layers=64,
        layer_types=(LINEAR, LINEAR, LINEAR, FULL) * 16,
        intermediate_size=17408,
        hidden_act="silu",
        num_heads=24,
        num_kv_heads=4,
        head_dim=256,
        rotary_dim=64,
        rope_theta=1e7,
        attn_output_gate=True,
        linear_key_heads=16,
        linear_value_heads=48,
        linear_key_dim=128,
        linear_value_dim=128,
        conv_kernel=4,
        rms_norm_eps=1e-6,
        max_position_embeddings=262144,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    assert (config.key_size, config.value_size, config.conv_channels) == (2048, 6144, 10240)
    assert len(config.linear_layers) == 48 and config.full_layers == tuple(range(3, 64, 4))


def test_is_a_static_argument() -> None:
    config = ModelConfig.from_dict(TINY)
    assert hash(config) == hash(ModelConfig.from_dict(json.loads(json.dumps(TINY))))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.hidden_size = 1  # type: ignore[misc]


def test_wrapper_equals_text_only() -> None:
    inner = without("dtype", "tie_word_embeddings", "architectures")
    wrapper = {
        "model_type": "qwen3_5",
        "text_config": inner,
        "vision_config": {"depth": 2},
        "dtype": "float32",
        "tie_word_embeddings": False,
    }
    assert ModelConfig.from_dict(wrapper) == ModelConfig.from_dict(TINY)


def test_layer_types_from_interval() -> None:
    config = ModelConfig.from_dict(without("layer_types") | {"full_attention_interval": 3})
    assert config.layer_types == (LINEAR, LINEAR, FULL)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 10000, "partial_rotary_factor": 0.5},
        {"rope_parameters": {"rope_theta": 1e4}, "partial_rotary_factor": 0.5},
        {
            "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
        },
        {"rope_theta": 1e4, "partial_rotary_factor": 0.5, "rope_scaling": {"type": "default"}},
    ],
    ids=["flat", "split", "both", "rope_scaling"],
)
def test_rope_fields_nested_or_flat(rope: dict[str, Any]) -> None:
    assert ModelConfig.from_dict(without("rope_parameters") | rope) == ModelConfig.from_dict(TINY)


def test_torch_dtype_is_the_older_spelling() -> None:
    assert ModelConfig.from_dict(without("dtype") | {"torch_dtype": "float16"}).dtype == "float16"


NEEDED = [
    "vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "linear_num_key_heads",
    "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
    "linear_conv_kernel_dim", "max_position_embeddings", "tie_word_embeddings", "dtype",
]  # fmt: skip


@pytest.mark.parametrize("name", NEEDED)
def test_missing_field_is_named(name: str) -> None:
    with pytest.raises(UserError, match=rf"some/config.json: field {name} is missing"):
        ModelConfig.from_dict(without(name), artefact="some/config.json")


@pytest.mark.parametrize("name", ["rope_theta", "partial_rotary_factor"])
def test_missing_rope_field_is_named(name: str) -> None:
    rope = {key: value for key, value in TINY["rope_parameters"].items() if key != name}
    with pytest.raises(UserError, match=f"field {name} is missing"):
        ModelConfig.from_dict(TINY | {"rope_parameters": rope})


def test_layer_types_missing_and_not_derivable() -> None:
    with pytest.raises(UserError, match="layer_types is missing.*full_attention_interval"):
        ModelConfig.from_dict(without("layer_types", "full_attention_interval"))


def rope(**fields: Any) -> dict[str, Any]:
    return {"rope_parameters": TINY["rope_parameters"] | fields}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "model_type='llama'.*Known: qwen3_5, qwen3_5_text"),
        ({"model_type": None}, "model_type=None.*Known: qwen3_5, qwen3_5_text"),
        ({"model_type": "qwen3_5"}, "no text_config"),
        ({"model_type": "qwen3_5", "text_config": {"model_type": "qwen3"}}, "model_type='qwen3'"),
        ({"attention_bias": True}, "attention_bias=True is not implemented"),
        ({"attn_output_gate": False}, "attn_output_gate=False is not implemented"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type='sigmoid'.*'swish' or 'silu'"),
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype='bfloat16' is not implemented"),
        ({"mlp_only_layers": [1]}, r"mlp_only_layers=\[1\] is not implemented"),
        ({"num_experts": 8}, "num_experts=8 is not implemented"),
        ({"sliding_window": 512}, "sliding_window=512 is not implemented"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'.*'silu'"),
        ({"dtype": "float8_e4m3fn"}, "dtype='float8_e4m3fn'.*bfloat16, float16, float32"),
        ({"dtype": "float32", "torch_dtype": "bfloat16"}, "dtype='float32' but.*'bfloat16'"),
        (rope(rope_type="yarn"), "rope_type='yarn'.*'default'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling has.*'linear'"),
        ({"rope_theta": 5.0}, "rope_theta=10000.0 in rope_parameters but 5.0 flat"),
        (rope(partial_rotary_factor=1.5), "partial_rotary_factor=1.5.*at most 1"),
        (rope(partial_rotary_factor=0.4), "rotary dimension 3 .*even"),
        (rope(partial_rotary_factor=0.1), "rotary dimension 0 .*even"),
        ({"rope_parameters": "default"}, "rope_parameters='default'.*an object"),
        ({"layer_types": [LINEAR, FULL]}, "layer_types has 2 entries but num_hidden_layers=3"),
        ({"layer_types": [LINEAR, "mamba", FULL]}, "layer_types holds 'mamba'"),
        ({"layer_types": LINEAR}, "layer_types='linear_attention'.*a list"),
        ({"num_attention_heads": 3}, "num_attention_heads=3, num_key_value_heads=2.*multiple"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads=3.*multiple of key heads"),
        ({"vocab_size": 0}, "vocab_size=0.*positive whole number"),
        ({"hidden_size": 20.0}, "hidden_size=20.0.*positive whole number"),
        ({"num_hidden_layers": True}, "num_hidden_layers=True.*positive whole number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan.*positive number"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps='1e-6'.*positive number"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings='no'.*true or false"),
    ],
)
def test_refusals(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ModelConfig.from_dict(TINY | change)


def test_wrapper_that_contradicts_its_text_config() -> None:
    wrapper = {"model_type": "qwen3_5", "text_config": TINY, "tie_word_embeddings": True}
    with pytest.raises(UserError, match="tie_word_embeddings=False but top-level.*=True"):
        ModelConfig.from_dict(wrapper)


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "has no config.json"), ("{", "could not be read as JSON"), ("[]", "holds a JSON list")],
)
def test_bad_config_files(tmp_path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match=message):
        ModelConfig.from_directory(tmp_path)


def test_absent_directory(tmp_path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        ModelConfig.from_directory(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is not a directory"):
        ModelConfig.from_directory(tmp_path / "file")

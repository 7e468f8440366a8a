"""Checkpoints with mixtures of experts: configs, both ways experts lie in files, FP8, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quantised_checkpoints import FP8, write_quantised
from safetensors.numpy import load_file, save_file
from tiny_checkpoints import TINY

from kernjax.base.errors import UserError
from kernjax.model.config import ModelConfig
from kernjax.model.params import abstract_params, leaves, random_params
from kernjax.weights import load, load_params, save_hf, text_tensors
from kernjax.weights.names import expected_shapes

EXPERTS = {
    "moe_intermediate_size": 6,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 14,
}
NEXT = TINY | EXPERTS | {
    "decoder_sparse_step": 1,
    "mlp_only_layers": [2],
    "model_type": "qwen3_next",
    "norm_topk_prob": True,
}  # fmt: skip
MOE = TINY | EXPERTS | {"model_type": "qwen3_5_moe_text"}
MOE.pop("intermediate_size")

FILE = "model.safetensors"


def flat(tree: dict[str, Any]) -> dict[str, np.ndarray]:
    return {"/".join(path): np.asarray(leaf) for path, leaf in leaves(tree)}


def assert_same(left: dict[str, Any], right: dict[str, Any]) -> None:
    a, b = flat(left), flat(right)
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and np.array_equal(a[name], b[name]), name


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[Path, ModelConfig, dict[str, Any]]:
    """A Qwen3-Next directory, experts one by one, and the float32 parameters it was saved from."""
    directory, config = tmp_path_factory.mktemp("next"), ModelConfig.from_dict(NEXT)
    params = random_params(config, seed=0)
    save_hf(params, NEXT, directory)
    return directory, config, params


def test_layers_with_and_without_experts() -> None:
    config = ModelConfig.from_dict(NEXT)
    assert config.moe_layers == (0, 1) and config.moe.normalise and config.moe.shared_gate
    tree = abstract_params(config)
    assert tree["linear"].keys() - tree["linear_moe"].keys() == {"mlp"}
    assert tree["linear_moe"]["moe"]["experts"]["gate"].shape == (1, 5, 20, 6)
    assert tree["full_moe"]["moe"]["experts"]["down"].shape == (1, 5, 6, 20)
    assert tree["linear"]["mlp"]["gate"].shape == (1, 20, 24)
    every_second = ModelConfig.from_dict(NEXT | {"decoder_sparse_step": 2, "mlp_only_layers": None})
    assert every_second.moe_layers == (1,)
    assert ModelConfig.from_dict(NEXT | {"num_experts": 0}).moe is None
    everywhere = ModelConfig.from_dict(MOE)
    assert everywhere.moe_layers == (0, 1, 2) and everywhere.intermediate_size == 0
    wrapper = {"model_type": "qwen3_5_moe", "text_config": MOE}
    assert ModelConfig.from_dict(wrapper) == everywhere


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        (NEXT, {"num_experts_per_tok": 6}, "num_experts_per_tok=6, but num_experts=5"),
        (NEXT, {"num_experts": None}, "field num_experts is missing"),
        (NEXT, {"moe_intermediate_size": None}, "field moe_intermediate_size is missing"),
        (NEXT, {"decoder_sparse_step": None}, "field decoder_sparse_step is missing"),
        (NEXT, {"norm_topk_prob": None}, "field norm_topk_prob is missing"),
        (NEXT, {"mlp_only_layers": "1"}, "mlp_only_layers='1'.*a list of layer numbers"),
        (NEXT, {"intermediate_size": None}, "field intermediate_size is missing"),
        (NEXT, {"scoring_func": "sigmoid"}, "scoring_func='sigmoid' is not implemented.*softmax"),
        (MOE, {"norm_topk_prob": False}, "norm_topk_prob=False is not implemented"),
        (MOE, {"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\] is not implemented"),
        (MOE, {"model_type": "qwen3_5_moe"}, "no text_config"),
    ],
)
def test_refusals(base: dict[str, Any], change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ModelConfig.from_dict(base | change)


def test_names_and_shapes_are_those_of_transformers() -> None:
    """By hand, of one layer each."""
    found = expected_shapes(ModelConfig.from_dict(NEXT))
    experts = "layers.0.mlp.experts.4."
    assert {name: shape for name, shape in found.items() if name.startswith(experts)} == {
        experts + "gate_proj.weight": (6, 20),
        experts + "up_proj.weight": (6, 20),
        experts + "down_proj.weight": (20, 6),
    }
    assert found["layers.0.mlp.gate.weight"] == (5, 20)
    assert found["layers.0.mlp.shared_expert.down_proj.weight"] == (20, 14)
    assert found["layers.0.mlp.shared_expert_gate.weight"] == (1, 20)
    # Two key heads: query and key of 4, two value heads of 6, twice.
    assert found["layers.0.linear_attn.in_proj_qkvz.weight"] == (2 * (4 + 4 + 12 + 12), 20)
    assert found["layers.0.linear_attn.in_proj_ba.weight"] == (8, 20)
    assert found["layers.2.mlp.up_proj.weight"] == (24, 20)
    found = expected_shapes(ModelConfig.from_dict(MOE))
    assert found["layers.2.mlp.experts.gate_up_proj"] == (5, 12, 20)
    assert found["layers.2.mlp.experts.down_proj"] == (5, 20, 6)
    assert found["layers.2.linear_attn.in_proj_qkv.weight"] == (40, 20)


def stack_experts(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The other way they lie in files: gate above up."""
    single = [name for name in tensors if ".experts." in name]
    stacked = {name: value for name, value in tensors.items() if name not in single}
    for layer in sorted({name.partition(".experts.")[0] for name in single}):
        gate, up, down = (
            np.stack([tensors[f"{layer}.experts.{e}.{part}_proj.weight"] for e in range(5)])
            for part in ("gate", "up", "down")
        )
        stacked[f"{layer}.experts.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        stacked[f"{layer}.experts.down_proj"] = down
    return stacked


@pytest.mark.parametrize("host_stack", [1 << 20, 2300], ids=["host", "in place"])
def test_both_ways_load_to_the_same_bits(saved, tmp_path: Path, monkeypatch, host_stack) -> None:
    directory, config, params = saved
    monkeypatch.setattr(load, "_HOST_STACK_BYTES", host_stack)
    monkeypatch.setattr(load, "_ON_HOST", ("cpu",) if host_stack > 2300 else ())
    assert_same(load_params(directory, config), params)
    save_file(stack_experts(load_file(directory / FILE)), tmp_path / FILE)
    (tmp_path / "config.json").write_text(json.dumps(NEXT))
    assert_same(load_params(tmp_path, config), params)


def test_stacked_as_saved(tmp_path: Path) -> None:
    config = ModelConfig.from_dict(MOE)
    params = random_params(config, seed=1)
    save_hf(params, MOE, tmp_path)
    assert "model.layers.1.mlp.experts.gate_up_proj" in load_file(tmp_path / FILE)
    assert_same(load_params(tmp_path, config), params)


def test_missing_and_left_over_experts(saved, tmp_path: Path) -> None:
    directory, config, _ = saved
    tensors = load_file(directory / FILE)
    gone = "model.layers.1.mlp.experts.3.up_proj.weight"
    more = "model.layers.0.mlp.experts.5.up_proj.weight"
    tensors[more] = tensors.pop(gone)
    save_file(tensors, tmp_path / FILE)
    (tmp_path / "config.json").write_text(json.dumps(NEXT))
    with pytest.raises(UserError) as error:
        text_tensors(tmp_path, config)
    assert f" - {gone}" in str(error.value) and f" + {more}" in str(error.value)


def test_fp8_experts_are_dequantised(tmp_path: Path) -> None:
    """One by one, each with scales of its own blocks; router and gates stay as they are."""
    values = write_quantised(tmp_path, FP8, config=NEXT)
    loaded = flat(load_params(tmp_path, ModelConfig.from_dict(NEXT), dtype="float32"))
    for stack, layer in (("linear_moe", 0), ("full_moe", 1)):
        for part in ("gate", "up", "down"):
            name = f"model.layers.{layer}.mlp.experts.{{}}.{part}_proj.weight"
            want = np.stack([values[name.format(expert)].T for expert in range(5)])
            assert np.array_equal(loaded[f"{stack}/moe/experts/{part}"][0], want)
        router = values[f"model.layers.{layer}.mlp.gate.weight"]
        assert np.array_equal(loaded[f"{stack}/moe/router"][0], router.T)

"""Directories of transformers and ours, read by each other (needs the `transformers` extra)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tiny_checkpoints import TINY

from kernjax.model.config import ModelConfig
from kernjax.model.params import leaves, random_params
from kernjax.weights import load_params, save_hf

torch = pytest.importorskip("torch", reason="the transformers extra is not installed")
transformers = pytest.importorskip("transformers", minversion="5.24")

pytestmark = pytest.mark.parity

# transformers' class builds a depthwise conv and rotary tables from these; no more is needed.
VISION = {
    "depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "out_hidden_size": 20,
    "num_position_embeddings": 4, "patch_size": 2,
}  # fmt: skip


@pytest.mark.parametrize("tie", [False, True])
def test_transformers_loads_what_is_saved_here(tmp_path: Path, tie: bool) -> None:
    raw = TINY | {"tie_word_embeddings": tie}
    params = random_params(ModelConfig.from_dict(raw), seed=0)
    save_hf(params, raw, tmp_path)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype="auto", output_loading_info=True
    )
    assert type(model).__name__ == "Qwen3_5ForCausalLM"
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    state = {name: value.detach().numpy() for name, value in model.state_dict().items()}
    assert np.array_equal(
        state["model.layers.2.linear_attn.out_proj.weight"],
        np.asarray(params["linear"]["out"])[1].T,
    )
    head = params["embed"] if tie else params["lm_head"].T
    assert np.array_equal(state["lm_head.weight"], np.asarray(head))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_text_only_save_of_transformers_loads_here(tmp_path: Path, dtype: str) -> None:
    torch.manual_seed(0)
    config = transformers.Qwen3_5TextConfig(
        **{k: v for k, v in TINY.items() if k not in ("architectures", "dtype")}
    )
    model = transformers.Qwen3_5ForCausalLM(config).to(getattr(torch, dtype))
    model.save_pretrained(tmp_path / "hf")
    parsed = ModelConfig.from_directory(tmp_path / "hf")
    assert parsed == ModelConfig.from_dict(TINY | {"dtype": dtype})
    params = load_params(tmp_path / "hf", parsed)
    assert_inverse(params, model, tmp_path, dtype)


def test_wrapper_save_of_transformers_loads_here(tmp_path: Path) -> None:
    torch.manual_seed(0)
    text = {k: v for k, v in TINY.items() if k not in ("architectures", "dtype")}
    config = transformers.Qwen3_5Config(text_config=text, vision_config=VISION)
    model = transformers.Qwen3_5ForConditionalGeneration(config)
    model.save_pretrained(tmp_path / "hf")
    names = {name for name, _ in model.named_parameters()}
    assert any(name.startswith("model.visual.") for name in names)
    parsed = ModelConfig.from_directory(tmp_path / "hf")
    params = load_params(tmp_path / "hf", parsed)
    assert parsed == ModelConfig.from_dict(TINY)
    head = model.lm_head.weight.detach().numpy()
    assert np.array_equal(np.asarray(params["lm_head"]), head.T)
    qkv = model.model.language_model.layers[2].linear_attn.in_proj_qkv.weight.detach().numpy()
    assert np.array_equal(np.asarray(params["linear"]["qkv"])[1], qkv.T)


def assert_inverse(params, model, tmp_path: Path, dtype: str) -> None:
    """Saving `params` and loading them into transformers gives every tensor of `model` again."""
    save_hf(params, TINY | {"dtype": dtype}, tmp_path / "again", dtype=dtype)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype="auto")
    left, right = model.state_dict(), again.state_dict()
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name
    assert all(np.isfinite(np.asarray(leaf, np.float32)).all() for _, leaf in leaves(params))

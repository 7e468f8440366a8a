"""Small random checkpoints in the published layouts of Kimi Linear and Kimi K3.

Names and shapes are spelled out here, apart from kernjax's own table. No two sizes are equal where
swapping them could pass.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from quantised_checkpoints import MXFP4, mxfp4_tensors
from safetensors.numpy import save_file

# 6 layers: dense, then mixtures; attention at the last two, as in K3. Three blocks of residuals.
K3_TEXT: dict[str, Any] = {
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "attn_res_block_size": 2,
    "first_k_dense_replace": 1,
    "hidden_act": "situ",
    "hidden_size": 24,
    "intermediate_size": 44,
    "kv_lora_rank": 10,
    "latent_moe_use_norm": True,
    "linear_attn_config": {
        "full_attn_layers": [3, 5, 6],
        "gate_lower_bound": -5.0,
        "head_dim": 10,
        "kda_layers": [1, 2, 4],
        "num_heads": 2,
        "short_conv_kernel_size": 4,
        "use_full_rank_gate": True,
    },
    "max_position_embeddings": 4096,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "model_type": "kimi_linear",
    "moe_intermediate_size": 36,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 4,
    "num_expert_group": 1,
    "num_experts": 6,
    "num_experts_per_token": 2,
    "num_hidden_layers": 6,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 2,
    "q_lora_rank": 14,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "rms_norm_eps": 1e-5,
    "routed_expert_hidden_size": 16,
    "routed_scaling_factor": 1.5,
    "topk_group": 1,
    "v_head_dim": 7,
    "vocab_size": 50,
}
K3: dict[str, Any] = {
    "architectures": ["KimiK3ForConditionalGeneration"],
    "dtype": "bfloat16",
    "model_type": "kimi_k3",
    "text_config": K3_TEXT,
    "tie_word_embeddings": False,
    "vision_config": {"model_type": "moonvit"},
}
_ONLY_K3 = ("activation_situ", "attn_res", "latent_moe", "mla_use_output", "routed_expert_hidden")
LINEAR: dict[str, Any] = {
    **{name: value for name, value in K3_TEXT.items() if not name.startswith(_ONLY_K3)},
    "architectures": ["KimiLinearForCausalLM"],
    "dtype": "float32",
    "hidden_act": "silu",
    "linear_attn_config": {
        "full_attn_layers": [3, 5],
        "head_dim": 10,
        "kda_layers": [1, 2, 4, 6],
        "num_heads": 2,
        "short_conv_kernel_size": 4,
    },
    "num_shared_experts": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "q_lora_rank": None,
    "tie_word_embeddings": False,
}


def text_of(config: dict[str, Any]) -> dict[str, Any]:
    return config.get("text_config", config)


def shapes(text: dict[str, Any], a_log: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Name, below `model.`, -> HF shape; `a_log` is the shape of A_log in the file."""
    d, vocab = text["hidden_size"], text["vocab_size"]
    found: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (vocab, d),
        "norm.weight": (d,),
        "lm_head.weight": (vocab, d),
    }
    blocks = text.get("attn_res_block_size") is not None
    if blocks:
        found |= {"output_attn_res_norm.weight": (d,), "output_attn_res_proj.weight": (1, d)}
    for layer in range(text["num_hidden_layers"]):
        inside = {"input_layernorm.weight": (d,), "post_attention_layernorm.weight": (d,)}
        for name in ("self_attention_res", "mlp_res") if blocks else ():
            inside |= {f"{name}_norm.weight": (d,), f"{name}_proj.weight": (1, d)}
        full = layer + 1 in text["linear_attn_config"]["full_attn_layers"]
        mixer = _latent(text) if full else _delta(text, a_log)
        inside |= {f"self_attn.{name}": shape for name, shape in mixer.items()}
        inside |= _experts(text) if layer >= text["first_k_dense_replace"] else _dense(text)
        found |= {f"layers.{layer}.{name}": shape for name, shape in inside.items()}
    return found


def _delta(text: dict[str, Any], a_log: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    d, linear = text["hidden_size"], text["linear_attn_config"]
    heads, dim = linear["num_heads"], linear["head_dim"]
    width = heads * dim
    found = {f"{name}_proj.weight": (width, d) for name in "qkv"}
    found |= {f"{name}_conv1d.weight": (width, 1, 4) for name in "qkv"}
    found |= {"f_a_proj.weight": (dim, d), "f_b_proj.weight": (width, dim)}
    if linear.get("use_full_rank_gate"):
        found["g_proj.weight"] = (width, d)
    else:
        found |= {"g_a_proj.weight": (dim, d), "g_b_proj.weight": (width, dim)}
    found |= {"b_proj.weight": (heads, d), "A_log": a_log, "dt_bias": (width,)}
    return found | {"o_norm.weight": (dim,), "o_proj.weight": (d, width)}


def _latent(text: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    d, heads, rank = text["hidden_size"], text["num_attention_heads"], text["kv_lora_rank"]
    nope, rope, value = (text[f"{n}_head_dim"] for n in ("qk_nope", "qk_rope", "v"))
    low = text["q_lora_rank"]
    if low is None:
        found = {"q_proj.weight": (heads * (nope + rope), d)}
    else:
        found = {"q_a_proj.weight": (low, d), "q_a_layernorm.weight": (low,)}
        found["q_b_proj.weight"] = (heads * (nope + rope), low)
    found |= {"kv_a_proj_with_mqa.weight": (rank + rope, d), "kv_a_layernorm.weight": (rank,)}
    found["kv_b_proj.weight"] = (heads * (nope + value), rank)
    if text.get("mla_use_output_gate"):
        found["g_proj.weight"] = (heads * value, d)
    return found | {"o_proj.weight": (d, heads * value)}


def _gated(prefix: str, width: int, size: int) -> dict[str, tuple[int, ...]]:
    found = {f"{prefix}.{name}_proj.weight": (size, width) for name in ("gate", "up")}
    return found | {f"{prefix}.down_proj.weight": (width, size)}


def _dense(text: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return _gated("mlp", text["hidden_size"], text["intermediate_size"])


def _experts(text: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    d, size, number = text["hidden_size"], text["moe_intermediate_size"], text["num_experts"]
    latent = text.get("routed_expert_hidden_size")
    found = {"gate.weight": (number, d), "gate.e_score_correction_bias": (number,)}
    found |= _gated("shared_experts", d, size * text["num_shared_experts"])
    if latent is not None:
        found["routed_expert_down_proj.weight"] = (latent, d)
        found["routed_expert_up_proj.weight"] = (d, latent)
        found["routed_expert_norm.weight"] = (latent,)
    for expert in range(number):
        width = d if latent is None else latent
        for name, shape in (("w1", (size, width)), ("w3", (size, width)), ("w2", (width, size))):
            found[f"experts.{expert}.{name}.weight"] = shape
    return {f"block_sparse_moe.{name}": shape for name, shape in found.items()}


def draw(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """The text model's tensors, float32; matrices of K3 on bfloat16's grid, as published."""
    k3 = "text_config" in config
    heads = text_of(config)["linear_attn_config"]["num_heads"]
    a_log = (8,) if k3 else (1, 1, heads, 1)
    found = {}
    for name, shape in shapes(text_of(config), a_log).items():
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        values = _values(name, shape, rng)
        if name.endswith("A_log"):
            values.reshape(-1)[heads:] = 0
        elif k3 and len(shape) == 2:
            values = values.astype(ml_dtypes.bfloat16).astype(np.float32)
        found[name] = values
    return found


def _values(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    normal = rng.standard_normal(shape)
    if name.endswith("A_log"):
        values = np.log(rng.uniform(0.3, 2, shape))
    elif name.endswith(("dt_bias", "correction_bias")):
        values = normal
    elif name.endswith("norm.weight"):
        values = 1 + 0.2 * normal
    elif "conv1d" in name:
        values = 0.5 * normal
    elif name.startswith("embed"):
        values = normal
    elif name.endswith(("o_proj.weight", "down_proj.weight", "w2.weight", "up_proj.weight")):
        values = 0.4 * normal * shape[-1] ** -0.5
    elif name.endswith("res_proj.weight"):
        values = 1.5 * normal * shape[-1] ** -0.5  # streams get unlike shares
    else:
        values = normal * shape[-1] ** -0.5
    return values.astype(np.float32)


def write_k3(directory: Path, seed: int = 0, config: dict[str, Any] = K3) -> dict[str, np.ndarray]:
    """A K3 checkpoint as published, experts in MXFP4; the values of every tensor, float32."""
    values, config = draw(config, seed), config | {"quantization_config": MXFP4}
    rng, stored = np.random.default_rng([seed, 1]), dict(values)
    for name in values:
        if ".experts." in name:
            del stored[name]
            packed, scales, values[name] = mxfp4_tensors(rng, values[name].shape, (122, 124))
            stored |= {f"{name}_packed": packed, f"{name}_scale": scales}
        elif values[name].ndim == 2:
            stored[name] = values[name].astype(ml_dtypes.bfloat16)
    write(directory, config, stored)
    return values


def write(directory: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    """The directory, written under the published prefixes, every tensor in its own dtype."""
    k3 = "text_config" in config
    body, head = ("language_model.model.", "language_model.") if k3 else ("model.", "")
    named = {(head if n == "lm_head.weight" else body) + n: x for n, x in tensors.items()}
    if k3:
        named["vision_tower.patch_embed.proj.weight"] = np.ones((2, 3), np.float32)
        named["mm_projector.proj.0.weight"] = np.ones((2, 3), np.float32)
    directory.mkdir(parents=True, exist_ok=True)
    named = {name: np.ascontiguousarray(x) for name, x in named.items()}
    save_file(named, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    return directory

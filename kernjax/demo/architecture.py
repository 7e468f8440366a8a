"""The demo's architecture as the HF `config.json` it is published with."""

from __future__ import annotations

from typing import Any

from kernjax.model.config import FULL, LINEAR

# The angles of every rotary frequency make a full turn within the longest trained context
# (rotary_dim 16, 4096 tokens), so that no position up to 32k shows the model an unseen angle.
ROPE_THETA = 1e3


def hf_config(
    vocab_size: int = 384, *, groups: int = 3, hidden: int = 128, mlp: int = 384, head_dim: int = 64
) -> dict[str, Any]:
    """config.json of `groups` x (3 gated delta net layers + 1 gated attention layer)."""
    layers = ([LINEAR] * 3 + [FULL]) * groups
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "dtype": "bfloat16",
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": len(layers),
        "layer_types": layers,
        "hidden_act": "silu",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": head_dim,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": head_dim,
        "linear_value_head_dim": head_dim,
        "linear_conv_kernel_dim": 4,
        "output_gate_type": "swish",
        "mamba_ssm_dtype": "float32",
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": ROPE_THETA,
            "partial_rotary_factor": 0.25,
        },
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": None,
        "use_cache": True,
    }

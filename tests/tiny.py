"""A tiny hybrid checkpoint and corpus, made from seeds: what scoring tests run on."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kernjax.model.config import ModelConfig
from kernjax.model.params import random_params
from kernjax.texts import Corpus, Segment
from kernjax.weights import save_hf

CONFIG = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "intermediate_size": 48,
    "hidden_act": "silu",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "attention_bias": False,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.5,
    },
    "dtype": "float32",
}


def write_checkpoint(directory: Path, seed: int = 0, **changes) -> Path:
    """An HF directory with random float32 weights."""
    config = {**CONFIG, **changes}
    save_hf(random_params(ModelConfig.from_dict(config), seed), config, directory)
    return directory


def make_corpus(
    shapes: dict[int, int], score_len: int = 8, kinds: tuple[str, ...] = ("prose", "code")
) -> Corpus:
    """Random tokens: `shapes` maps context_len to the number of segments of each kind."""
    rng = np.random.default_rng(0)
    segments = [
        Segment(
            f"{kind}-{context_len}-{number}",
            kind,
            context_len,
            score_len,
            rng.integers(0, CONFIG["vocab_size"], context_len + score_len + 1).astype(np.int32),
        )
        for context_len, count in shapes.items()
        for kind in kinds
        for number in range(count)
    ]
    return Corpus.build("tiny", segments)

"""Small HF configs and safetensors files for the tests of configs and weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

# 3 layers, both kinds, unequal sizes everywhere, so that a swapped axis cannot pass.
TINY: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "attention_bias": False,
    "dtype": "float32",
    "full_attention_interval": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "hidden_size": 20,
    "intermediate_size": 24,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 6,
    "max_position_embeddings": 128,
    "model_type": "qwen3_5_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
    },
    "tie_word_embeddings": False,
    "vocab_size": 40,
}


def published_config() -> Path | None:
    """The folder of Qwen3.8-27B's config.json and tensors.tsv beside the checkout, if it is there.

    Not part of the repository; the tests that want it skip by name elsewhere.
    """
    folder = Path(__file__).resolve().parents[2] / "shared" / "models" / "qwen3.8-27b"
    return folder if (folder / "tensors.tsv").is_file() else None


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    """(header, data) of a safetensors file."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def write_raw(path: Path, header: Any, data: bytes) -> None:
    """A safetensors file with exactly this header, sound or not."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def write_shards(directory: Path, shards: dict[str, dict[str, np.ndarray]]) -> dict[str, str]:
    """Shards and their index; the index's weight_map."""
    from safetensors.numpy import save_file

    for file, tensors in shards.items():
        save_file(tensors, directory / file)
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    write_index(directory, weight_map)
    return weight_map


def write_index(directory: Path, weight_map: dict[str, str]) -> None:
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))

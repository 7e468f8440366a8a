"""Quantised HF directories made from random codes, with the values they mean computed apart.

The expected values are spelled out in float64: tables of the formats' definitions, `np.kron` for
the blocks. They are rounded to float32 once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tiny_checkpoints import TINY, header_of

from kernjax.model.config import ModelConfig
from kernjax.model.params import random_params
from kernjax.weights import save_hf

# Small enough that a tiny matrix has several blocks, unequal, and no divisor of its sizes.
FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [16, 9],
    "modules_to_not_convert": ["lm_head"],
}
MXFP4 = {
    "quant_method": "compressed-tensors",
    "config_groups": {
        "group_0": {
            "format": "mxfp4-pack-quantized",
            "input_activations": None,
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "float",
                "group_size": 32,
                "strategy": "group",
                "symmetric": True,
                "scale_dtype": "torch.uint8",
            },
        }
    },
    "ignore": ["lm_head"],
}
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


_DTYPES = {
    "F32": np.float32,
    "BF16": ml_dtypes.bfloat16,
    "U8": np.uint8,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
}


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """Every tensor of a file; safetensors' own reader for NumPy knows no float8."""
    header, data = header_of(path)
    header.pop("__metadata__", None)
    return {
        name: np.frombuffer(data[slice(*entry["data_offsets"])], _DTYPES[entry["dtype"]])
        .reshape(entry["shape"])
        .copy()
        for name, entry in header.items()
    }


def fp8_tensors(
    rng: np.random.Generator, shape: tuple[int, int], block: tuple[int, int], scale_dtype: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(codes, scales, values float32) of a random matrix; every finite code may occur."""
    finite = [code for code in range(256) if code & 0x7F != 0x7F]
    codes = rng.choice(np.array(finite, np.uint8), shape).view(ml_dtypes.float8_e4m3fn)
    grid = tuple(-(-size // each) for size, each in zip(shape, block, strict=True))
    scales = (rng.uniform(0.2, 3, grid) * 2.0 ** rng.integers(-9, 3, grid)).astype(scale_dtype)
    wide = np.kron(scales.astype(np.float64), np.ones(block))[: shape[0], : shape[1]]
    return codes, scales, (codes.astype(np.float64) * wide).astype(np.float32)


def mxfp4_tensors(
    rng: np.random.Generator, shape: tuple[int, int], exponents: tuple[int, int] = (110, 135)
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(packed, scales, values float32) of a random matrix with an even number of columns."""
    rows, columns = shape
    packed = rng.integers(0, 256, (rows, columns // 2)).astype(np.uint8)
    scales = rng.integers(*exponents, (rows, -(-columns // 32)), endpoint=True).astype(np.uint8)
    values = np.empty(shape)
    for row in range(rows):
        for column in range(columns):
            byte = int(packed[row, column // 2])
            code = byte >> 4 if column % 2 else byte & 15
            sign = -1.0 if code & 8 else 1.0
            values[row, column] = (
                sign * E2M1[code & 7] * 2.0 ** (int(scales[row, column // 32]) - 127)
            )
    return packed, scales, values.astype(np.float32)


def is_quantised(name: str) -> bool:
    """As published: the large projections, not in_proj_a and _b, embeddings, lm_head, norms."""
    return name.endswith("_proj.weight") or any(
        part in name for part in ("in_proj_qkv", "in_proj_z.")
    )


def write_quantised(
    directory: Path,
    quantisation: dict[str, Any],
    seed: int = 0,
    config: Mapping[str, Any] = TINY,
) -> dict[str, np.ndarray]:
    """A quantised model of `config` in `directory`; HF name -> values of every weight, float32."""
    rng = np.random.default_rng(seed)
    save_hf(random_params(ModelConfig.from_dict(config), seed, "bfloat16"), config, directory)
    plain = read_tensors(directory / "model.safetensors")
    tensors, values = {}, {}
    for name, tensor in plain.items():
        if not is_quantised(name):
            tensors[name], values[name] = tensor, tensor.astype(np.float32)
        elif quantisation["quant_method"] == "fp8":
            block = tuple(quantisation["weight_block_size"])
            codes, scales, values[name] = fp8_tensors(rng, tensor.shape, block, ml_dtypes.bfloat16)
            tensors |= {name: codes, f"{name}_scale_inv": scales}
        else:
            packed, scales, values[name] = mxfp4_tensors(rng, tensor.shape)
            tensors |= {f"{name}_packed": packed, f"{name}_scale": scales}
    save_file(tensors, directory / "model.safetensors")
    text = json.dumps({**config, "quantization_config": quantisation})
    (directory / "config.json").write_text(text)
    return values


def write_dequantised(directory: Path, values: dict[str, np.ndarray]) -> None:
    """The same model with every weight as float32."""
    directory.mkdir()
    save_file(values, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(TINY))

"""Parameters as an HF directory: the inverse of `load_params`, read by transformers too."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike
from safetensors.numpy import save_file

from kernjax.base.errors import UserError
from kernjax.model.config import WRAPPERS, ModelConfig
from kernjax.model.params import leaves, weight_dtype
from kernjax.weights.names import PREFIXES, table
from kernjax.weights.safetensors_files import SINGLE, capped


def save_hf(
    params: Mapping[str, Any],
    config: Mapping[str, Any],
    directory: str | Path,
    dtype: str | DTypeLike | None = None,
) -> None:
    """Writes `config` (an HF config.json of a text model) and `params` to `directory`.

    `dtype` None writes every tensor in the parameter's own dtype, and `load_params` gives the same
    bits back; otherwise all tensors, norms included, are rounded to it (as published checkpoints
    are). One `model.safetensors`, names as its transformers class has them. The whole model is held
    on the host once. Files appear whole, the weights first: an interrupted save is not loadable.
    """
    parsed = ModelConfig.from_dict(config)
    if (inside := WRAPPERS.get(config["model_type"])) is not None:
        raise UserError(
            f"A checkpoint of model_type {config['model_type']!r} cannot be written.",
            f"Expected {inside!r}: the wrapper has a vision tower, which these parameters lack.",
        )
    if config.get("quantization_config"):
        raise UserError(
            "A config with a quantization_config cannot be written with these parameters.",
            "Expected none: they are dequantised.",
            "Remove it from the config.",
        )
    by_path = dict(leaves(params))
    _check_tree(by_path, parsed)
    prefix = next(prefix for prefix in PREFIXES if prefix.body == "model.")
    tensors: dict[str, np.ndarray] = {}
    for leaf in table(parsed):
        values = np.asarray(by_path[leaf.path])
        if dtype is not None:
            values = values.astype(weight_dtype(dtype))
        values = values.reshape(len(leaf.parts), *leaf.part_shape)
        for one, part in zip(values, leaf.parts, strict=True):
            name = prefix.full(part.name)
            if name not in tensors:
                tensors[name] = np.zeros(part.hf_shape, values.dtype)
            elif tensors[name].dtype != values.dtype:
                raise ValueError(f"parameters that share {name} differ in dtype")
            part.layout.write(tensors[name], one)

    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    weights = directory / f".{SINGLE}.partial"
    # "format": transformers refuses files without it.
    save_file(tensors, weights, metadata={"format": "pt"})
    text = directory / ".config.json.partial"
    text.write_text(json.dumps(dict(config), indent=2, sort_keys=True) + "\n")
    # safetensors makes its files readable by their owner alone, whatever the umask says.
    weights.chmod(text.stat().st_mode)
    os.replace(weights, directory / SINGLE)
    os.replace(text, directory / "config.json")


def _check_tree(by_path: Mapping[tuple[str, ...], Any], config: ModelConfig) -> None:
    expected = {leaf.path: leaf.spec.shape for leaf in table(config)}
    found = {path: tuple(value.shape) for path, value in by_path.items()}
    if found != expected:
        different = sorted(
            "/".join(path)
            for path in expected.keys() | found.keys()
            if expected.get(path) != found.get(path)
        )
        raise ValueError(f"params do not match config at {capped(different, 8)}")

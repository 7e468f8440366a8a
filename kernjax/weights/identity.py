"""The identity of a checkpoint's weights: which numbers, however they are packaged."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kernjax.base.hashing import sha256_json
from kernjax.model.config import ModelConfig
from kernjax.weights.match import text_tensors
from kernjax.weights.safetensors_files import TensorEntry

_BLOCK = 1 << 24


def weights_sha256(directory: str | Path, config: ModelConfig | None = None) -> str:
    """Hex SHA-256 over canonical name, dtype, shape and bytes of every text tensor.

    The same for one file or many shards, with or without the vision tower and the MTP head, under
    any accepted prefix, and whether or not a tied lm_head is repeated. Of quantised weights: codes
    and scales, so a checkpoint and its dequantised copy are two. Reads the whole text model,
    several tensors at a time (hashing releases the interpreter lock). `config` defaults to the
    directory's own.
    """
    config = ModelConfig.from_directory(directory) if config is None else config
    tensors = {
        name + suffix: tensor
        for name, source in text_tensors(directory, config).items()
        for suffix, tensor in source.tensors().items()
    }
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        digests = pool.map(_sha256, tensors.values())
        rows = [
            [name, tensor.dtype, list(tensor.shape), digest]
            for (name, tensor), digest in zip(tensors.items(), digests, strict=True)
        ]
    return sha256_json(sorted(rows))


def _sha256(tensor: TensorEntry) -> str:
    digest = hashlib.sha256()
    data = tensor.bytes()
    for at in range(0, len(data), _BLOCK):
        digest.update(data[at : at + _BLOCK])
    return digest.hexdigest()

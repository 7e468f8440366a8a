"""The identity of a checkpoint's weights: which numbers, however they are packaged."""

from __future__ import annotations

from pathlib import Path

from kernjax.base.hashing import sha256_json
from kernjax.model.config import ModelConfig
from kernjax.weights.converted import converted_sha256, is_converted
from kernjax.weights.digests import Digests, sha256_of_all
from kernjax.weights.match import text_tensors


def weights_sha256(
    directory: str | Path, config: ModelConfig | None = None, digests: Digests = sha256_of_all
) -> str:
    """Hex SHA-256 over canonical name, dtype, shape and bytes of every text tensor.

    The same for one file or many shards, with or without the vision tower and the MTP head, under
    any accepted prefix, and whether or not a tied lm_head is repeated; a converted checkpoint has
    that of what it was made of. Of quantised weights: codes and scales, so a checkpoint and its
    dequantised copy are two. Reads the whole text model; `digests` may share that among hosts.
    `config` defaults to the directory's own.
    """
    if is_converted(directory):
        return converted_sha256(directory, digests)
    config = ModelConfig.from_directory(directory) if config is None else config
    tensors = {
        name + suffix: tensor
        for name, source in text_tensors(directory, config).items()
        for suffix, tensor in source.tensors().items()
    }
    rows = [
        [name, tensor.dtype, list(tensor.shape), digest]
        for (name, tensor), digest in zip(
            tensors.items(), digests(list(tensors.values())), strict=True
        )
    ]
    return sha256_json(sorted(rows))

"""Holds a checkpoint's tensors against what the config demands, in both directions.

Everything that can be wrong with names, shapes and dtypes is reported at once and before a byte of
data is read: ` - ` missing, ` + ` extra, ` ~ ` of another shape or dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kernjax.base.errors import UserError
from kernjax.model.config import ModelConfig, read_config_json
from kernjax.weights.names import LM_HEAD, expected_shapes, is_skipped, resolve
from kernjax.weights.safetensors_files import (
    READABLE,
    Checkpoint,
    TensorEntry,
    capped,
    open_checkpoint,
)

_LISTED = 8  # lines of each kind in a difference
_BLOCK = 1 << 24  # bytes compared at a time


def text_tensors(directory: str | Path, config: ModelConfig) -> dict[str, TensorEntry]:
    """Canonical name -> tensor, for exactly the tensors that `config` demands.

    Vision and MTP tensors are left out. UserError for quantised checkpoints, and with the two-sided
    difference of names where anything is missing, left over, misshapen or of an unreadable dtype.
    """
    directory = Path(directory)
    checkpoint = open_checkpoint(directory)
    _refuse_quantised(read_config_json(directory), checkpoint)
    expected = expected_shapes(config)
    found = {name: t for name, t in checkpoint.tensors.items() if not is_skipped(name)}
    prefix = resolve(expected, found)
    by_name = {prefix.canonical(name): t for name, t in found.items()}

    missing = [prefix.full(name) for name in expected if name not in by_name]
    extra = [name for name in found if prefix.canonical(name) not in expected]
    if config.tie_word_embeddings and extra == [prefix.full(LM_HEAD)]:
        _check_same(by_name[LM_HEAD], by_name.get("embed_tokens.weight"))
        extra = []
    wrong = [
        f"{by_name[name].name}: {by_name[name].dtype} {list(by_name[name].shape)}, "
        f"expected {list(shape)} in {'/'.join(READABLE)}"
        for name, shape in expected.items()
        if name in by_name and (by_name[name].shape != shape or by_name[name].dtype not in READABLE)
    ]
    if missing or extra or wrong:
        raise UserError(
            f"The tensors of {directory} do not match its config.json: {len(missing)} missing, "
            f"{len(extra)} extra, {len(wrong)} misshapen."
            + "".join(
                f"\n{mark} {line}"
                for mark, lines in ((" -", missing), (" +", extra), (" ~", wrong))
                for line in _cut(lines)
            )
            + "\n",
            f"Expected the {len(expected)} text tensors of a {config.model_type} model.",
            "Check that config.json and the weights are of one checkpoint, and complete.",
        )
    return {name: by_name[name] for name in expected}


def _cut(lines: list[str]) -> list[str]:
    more = len(lines) - _LISTED
    return lines[:_LISTED] + ([f"... and {more} more"] if more > 0 else [])


def _refuse_quantised(config: Mapping[str, Any], checkpoint: Checkpoint) -> None:
    """Scales that are not applied would give silently wrong weights."""
    text = config.get("text_config")
    declared = config.get("quantization_config")
    if declared is None and isinstance(text, Mapping):
        declared = text.get("quantization_config")
    scales = sorted(
        name
        for name, tensor in checkpoint.tensors.items()
        if name.endswith((".weight_scale_inv", ".weight_scale", ".weight_packed"))
        or (tensor.dtype.startswith(("F8", "F6", "F4")) and not is_skipped(name))
    )
    if declared is None and not scales:
        return
    method = declared.get("quant_method") if isinstance(declared, Mapping) else declared
    what = f"quantization_config ({method})" if declared is not None else capped(scales, 3)
    raise UserError(
        f"{checkpoint.directory} is quantised: it has {what}.",
        "Expected BF16, F16 or F32 weights: quantised checkpoints are not read yet.",
        "Use the unquantised release of the model.",
    )


def _check_same(head: TensorEntry, embed: TensorEntry | None) -> None:
    """A tied checkpoint may repeat the embedding as lm_head, but not hold another one there."""
    if embed is None:
        return  # reported as missing
    same = head.dtype == embed.dtype and head.shape == embed.shape
    left, right = head.bytes(), embed.bytes()
    if not same or not all(
        np.array_equal(left[at : at + _BLOCK], right[at : at + _BLOCK])
        for at in range(0, len(left), _BLOCK)
    ):
        raise UserError(
            f"config.json has tie_word_embeddings=true, but {head.name} in {head.file} is not "
            f"the same as {embed.name}.",
            "Expected no lm_head, or a copy of the embedding.",
            "Set tie_word_embeddings to false if the model was trained untied.",
        )

"""Holds a checkpoint's tensors against what the config demands, in both directions.

Everything that can be wrong with names, shapes and dtypes is reported at once and before a byte of
data is read: ` - ` missing, ` + ` extra, ` ~ ` of another shape or dtype.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from kernjax.base.errors import UserError
from kernjax.model.config import ModelConfig
from kernjax.model.config_fields import read_config_json
from kernjax.weights.names import (
    LM_HEAD,
    expected_shapes,
    experts_in,
    is_skipped,
    resolve,
    usual_name,
)
from kernjax.weights.quantisation import Scheme, read_scheme
from kernjax.weights.safetensors_files import (
    READABLE,
    Checkpoint,
    TensorEntry,
    capped,
    open_checkpoint,
)
from kernjax.weights.sources import Plain, Quantised, Source

_LISTED = 8  # lines of each kind in a difference
_BLOCK = 1 << 24  # bytes compared at a time


# Sidecars of a quantised `X.weight`, of any scheme: without being read, they are never ignored.
_SIDECARS = ("_scale_inv", "_scale", "_packed")
_WEIGHTS = (".weight", ".experts.gate_up_proj", ".experts.down_proj")


def text_tensors(directory: str | Path, config: ModelConfig) -> dict[str, Source]:
    """Canonical name -> where its values are, for exactly the tensors that `config` demands.

    Vision and MTP tensors are left out. UserError for quantisation that is not implemented, and
    with the two-sided difference of names where anything is missing, left over, misshapen or of an
    unreadable dtype, scales included.
    """
    directory = Path(directory)
    checkpoint = open_checkpoint(directory)
    scheme = read_scheme(read_config_json(directory), f"{directory}/config.json")
    found = {name: t for name, t in checkpoint.tensors.items() if not is_skipped(name)}
    expected = expected_shapes(config, experts_in(found, config))
    if scheme is None:
        _refuse_undeclared(checkpoint, found)
    prefix = resolve(expected, {_weight_of(name)[0] for name in found})
    canonical = {}  # found name -> canonical name, sidecars' too; None: under another prefix
    for name in found:
        weight, suffix = _weight_of(name)
        weight = prefix.canonical(weight)
        canonical[name] = None if weight is None else usual_name(weight) + suffix
    by_name = {canonical[name]: t for name, t in found.items() if canonical[name] is not None}
    if config.delta is not None:
        by_name |= {
            name: _per_head(tensor, config.linear_key_heads)
            for name, tensor in by_name.items()
            if name.endswith(".A_log")
        }

    matching = _Matching(by_name)
    sources = {name: matching.source(name, shape, scheme) for name, shape in expected.items()}
    missing = [prefix.full(weight) + suffix for weight, suffix in map(_weight_of, matching.missing)]
    extra = [name for name in found if canonical[name] not in matching.used]
    if config.tie_word_embeddings and extra == [prefix.full(LM_HEAD)]:
        _check_same(by_name[LM_HEAD], by_name.get("embed_tokens.weight"))
        extra = []
    if missing or extra or matching.wrong:
        raise UserError(
            f"The tensors of {directory} do not match its config.json: {len(missing)} missing, "
            f"{len(extra)} extra, {len(matching.wrong)} misshapen."
            + "".join(
                f"\n{mark} {line}"
                for mark, lines in ((" -", missing), (" +", extra), (" ~", matching.wrong))
                for line in _cut(lines)
            )
            + "\n",
            f"Expected the {len(expected)} text tensors of a {config.model_type} model"
            + (", quantised ones with their scales." if scheme else "."),
            "Check that config.json and the weights are of one checkpoint, and complete.",
        )
    if scheme is not None and not any(isinstance(s, Quantised) for s in sources.values()):
        raise UserError(
            f"{directory}/config.json declares a quantization_config, but no tensor is quantised.",
            f"Expected tensors X.weight{scheme.codes} in {scheme.code_dtype} with"
            f" X.weight{scheme.scales}.",
            "Take the weights and the config.json of one release.",
        )
    return sources


class _Matching:
    """Finds the tensors of one weight after another, and notes what does not fit."""

    def __init__(self, tensors: Mapping[str, TensorEntry]) -> None:
        self._tensors = tensors
        self.used: set[str] = set()
        self.missing: list[str] = []
        self.wrong: list[str] = []

    def source(self, name: str, shape: tuple[int, ...], scheme: Scheme | None) -> Source | None:
        """The source of weight `name`; None, and a note, where it does not fit."""
        if scheme is None or not self._is_quantised(name, scheme):
            tensor = self._take(name, shape, tuple(READABLE))
            return None if tensor is None else Plain(tensor)
        stacked = len(shape) == 3 and ".experts." in name
        code_shape = scheme.code_shape(shape) if len(shape) == 2 or stacked else None
        if code_shape is None:
            self.used |= {name + scheme.codes, name + scheme.scales}
            self.wrong.append(f"{name} {list(shape)} cannot be quantised in this format")
            return None
        codes = self._take(name + scheme.codes, code_shape, (scheme.code_dtype,))
        scales = self._take(name + scheme.scales, scheme.scale_shape(shape), scheme.scale_dtypes)
        if codes is None or scales is None:
            return None
        return Quantised(scheme, shape, codes, scales)

    def _is_quantised(self, name: str, scheme: Scheme) -> bool:
        codes = self._tensors.get(name + scheme.codes)
        if scheme.codes == "":
            return codes is not None and codes.dtype == scheme.code_dtype
        # Scales without codes: the codes are what is missing, unless the weight itself is there.
        return codes is not None or (
            name not in self._tensors and name + scheme.scales in self._tensors
        )

    def _take(
        self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]
    ) -> TensorEntry | None:
        tensor = self._tensors.get(name)
        if tensor is None:
            self.missing.append(name)
            return None
        self.used.add(name)
        if tensor.shape != shape or tensor.dtype not in dtypes:
            self.wrong.append(
                f"{tensor.name}: {tensor.dtype} {list(tensor.shape)}, "
                f"expected {list(shape)} in {'/'.join(dtypes)}"
            )
            return None
        return tensor


def _weight_of(name: str) -> tuple[str, str]:
    """`X.weight_scale` -> (`X.weight`, `_scale`), a sidecar's weight and suffix; or (name, "").

    Experts in one stack are no `.weight`: `experts.down_proj`, `experts.down_proj_scale_inv`.
    """
    for suffix in _SIDECARS:
        if name.endswith(tuple(weight + suffix for weight in _WEIGHTS)):
            return name.removesuffix(suffix), suffix
    return name, ""


def _per_head(tensor: TensorEntry, heads: int) -> TensorEntry:
    """A_log as [1, 1, heads, 1]: published as a vector too, and padded with zeros at the end."""
    count = math.prod(tensor.shape)
    if tensor.dtype not in READABLE or max(tensor.shape, default=0) != count or count < heads:
        return tensor  # another shape, which is reported as such
    if np.any(tensor.array().reshape(-1)[heads:]):
        raise UserError(
            f"{tensor.name} in {tensor.file} has {count} numbers for {heads} heads, and those past"
            " the heads are not zero.",
            "Expected one a head, and zeros after them.",
            "Check num_heads in linear_attn_config.",
        )
    end = tensor.begin + heads * READABLE[tensor.dtype].itemsize
    return dataclasses.replace(tensor, shape=(1, 1, heads, 1), end=end)


def _cut(lines: list[str]) -> list[str]:
    more = len(lines) - _LISTED
    return lines[:_LISTED] + ([f"... and {more} more"] if more > 0 else [])


def _refuse_undeclared(checkpoint: Checkpoint, found: Mapping[str, TensorEntry]) -> None:
    """Scales that are not applied would give silently wrong weights."""
    quantised = sorted(
        name
        for name, tensor in found.items()
        if _weight_of(name)[1] or tensor.dtype.startswith(("F8", "F6", "F4"))
    )
    if quantised:
        raise UserError(
            f"{checkpoint.directory} is quantised: it has {capped(quantised, 3)}, but config.json"
            " has no quantization_config.",
            "Expected one that says how: without it the numbers' meaning would be a guess.",
            "Download config.json again, with the weights of the same release.",
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

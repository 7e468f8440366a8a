"""Quantised formats of published checkpoints: what lies in the file, and the numbers it means.

- Block-scaled FP8 (quant_method `fp8`; Qwen, DeepSeek): `X.weight` is float8_e4m3fn [R, C] and
  `X.weight_scale_inv` one number per block of 128 x 128. w = e4m3 * scale_inv: it is multiplied,
  whatever the name says (transformers: `Fp8Dequantize`).
- MXFP4 (compressed-tensors `mxfp4-pack-quantized`; Kimi K3's experts): `X.weight_packed` u8
  [R, C/2] holds two E2M1 codes a byte, the even column in the low nibble, and `X.weight_scale` u8
  [R, C/32] one E8M0 exponent per 32 columns. w = e2m1 * 2^(s - 127), NaN for s = 255 (OCP
  Microscaling Formats 1.0, section 5.4).

A last block that is not whole has a scale too. Values are exact in float32 where the scales have at
most 20 significant bits (bfloat16 scales and E8M0's do), and are rounded once to what is asked for.
Engines that compute in FP8 quantise the activations as well: that is the business of a policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import ml_dtypes
import numpy as np

from kernjax.base.errors import UserError
from kernjax.weights.safetensors_files import READABLE, TensorEntry

_FP8 = "fp8"
_COMPRESSED = "compressed-tensors"
_MXFP4 = "mxfp4-pack-quantized"

_EVERY_BYTE = np.arange(256, dtype=np.uint8)
_E4M3_VALUES = _EVERY_BYTE.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
_E8M0_VALUES = _EVERY_BYTE.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
_E2M1_VALUES = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
# Both values of a packed byte, side by side in one number: [256], looked up several times quicker
# than rows of two.
_E2M1_PAIRS = np.stack(
    [_E2M1_VALUES[_EVERY_BYTE & 15], _E2M1_VALUES[_EVERY_BYTE >> 4]], axis=1
).view(np.complex64)[:, 0]


class Scheme(Protocol):
    """How a matrix `X.weight` of `shape` [R, C] is stored: as codes and scales.

    Experts in one stack have another leading axis, and blocks that begin anew with each.
    """

    codes: str  # what follows `X.weight` in the name of the codes, and of the scales
    scales: str
    code_dtype: str  # as a header spells them
    scale_dtypes: tuple[str, ...]
    packed_dtype: np.dtype  # of the codes as an array: `kernjax.model.packed`
    per_byte: int  # codes in an element of that, the lowest column's first
    value_dtype: np.dtype  # holds every value, up to the scales' own precision
    rows_at_once: int  # rows decoded at a time, starting at a multiple of it

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns that share a scale."""
        ...

    def code_shape(self, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """None: a matrix of this shape cannot be stored."""
        ...

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]: ...

    def decode(
        self, codes: np.ndarray, scales: TensorEntry, rows: slice, columns: slice
    ) -> np.ndarray:
        """The values [rows, columns], float32; at most `rows_at_once` rows of one run of them.

        codes uint8 [rows, ...], the bytes that hold them; `scales` of the whole matrix.
        """
        ...


@dataclass(frozen=True)
class BlockScaledFP8:
    """float8_e4m3fn with a scale per block of `block` rows and columns."""

    block: tuple[int, int] = (128, 128)

    codes: ClassVar[str] = ""
    scales: ClassVar[str] = "_scale_inv"
    code_dtype: ClassVar[str] = "F8_E4M3"
    scale_dtypes: ClassVar[tuple[str, ...]] = tuple(READABLE)
    packed_dtype: ClassVar[np.dtype] = np.dtype(ml_dtypes.float8_e4m3fn)
    per_byte: ClassVar[int] = 1
    value_dtype: ClassVar[np.dtype] = np.dtype(np.float32)

    @property
    def rows_at_once(self) -> int:
        return self.block[0]

    def code_shape(self, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        return shape

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        *lead, rows, columns = shape
        return (*lead, _blocks(rows, self.block[0]), _blocks(columns, self.block[1]))

    def decode(
        self, codes: np.ndarray, scales: TensorEntry, rows: slice, columns: slice
    ) -> np.ndarray:
        values = np.take(_E4M3_VALUES, codes)
        row = scales.array()[rows.start // self.block[0]].astype(np.float32)
        return np.multiply(values, _spread(row, columns, self.block[1]), out=values)


@dataclass(frozen=True)
class MXFP4:
    """Packed E2M1 with an E8M0 scale per `group` columns of a row."""

    group: int = 32

    codes: ClassVar[str] = "_packed"
    scales: ClassVar[str] = "_scale"
    code_dtype: ClassVar[str] = "U8"
    scale_dtypes: ClassVar[tuple[str, ...]] = ("U8", "F8_E8M0")
    packed_dtype: ClassVar[np.dtype] = np.dtype(np.uint8)
    per_byte: ClassVar[int] = 2
    # Two significant bits and float32's range of exponents.
    value_dtype: ClassVar[np.dtype] = READABLE["BF16"]
    rows_at_once: ClassVar[int] = 256

    @property
    def block(self) -> tuple[int, int]:
        return 1, self.group

    def code_shape(self, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        return None if shape[-1] % 2 else (*shape[:-1], shape[-1] // 2)

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[:-1], _blocks(shape[-1], self.group))

    def decode(
        self, codes: np.ndarray, scales: TensorEntry, rows: slice, columns: slice
    ) -> np.ndarray:
        values = np.take(_E2M1_PAIRS, codes).view(np.float32)
        values = values[:, columns.start % 2 :][:, : columns.stop - columns.start]
        exponents = _spread(bytes_of(scales)[rows], columns, self.group)
        # The largest scale times 6 is beyond float32 and becomes infinite: as the format says.
        with np.errstate(over="ignore"):
            return values * _E8M0_VALUES[exponents]


def read_scheme(config: Mapping[str, Any], artefact: str) -> Scheme | None:
    """What a config.json declares in `quantization_config`, at its top or in `text_config`.

    None: nothing. UserError for a scheme that is not implemented, naming its field.
    """
    text = config.get("text_config")
    places = [config, text] if isinstance(text, Mapping) else [config]
    found = [place["quantization_config"] for place in places if place.get("quantization_config")]
    if not found:
        return None
    if len(found) == 2 and found[0] != found[1]:
        raise UserError(
            f"{artefact} has two quantization_config that differ, at its top and in text_config.",
            "Expected one.",
        )
    declared = _Declared(found[0], artefact)
    method = declared.choose("quant_method", _FP8, _COMPRESSED)
    return _fp8(declared) if method == _FP8 else _mxfp4(declared)


def _fp8(declared: _Declared) -> BlockScaledFP8:
    declared.choose("fmt", "e4m3", None)
    # With a static scheme the file holds activation scales, which a policy would have to apply.
    declared.choose("activation_scheme", "dynamic", None)
    block = declared.value.get("weight_block_size")
    if not (
        isinstance(block, list)
        and len(block) == 2
        and all(type(size) is int and size > 0 for size in block)
    ):
        raise declared.error("weight_block_size", block, "two sizes, as [128, 128]")
    return BlockScaledFP8((block[0], block[1]))


def _mxfp4(declared: _Declared) -> MXFP4:
    groups = declared.value.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise declared.error("config_groups", groups, "an object of groups")
    for name, group in groups.items():
        inside = _Declared(group, f"{declared.artefact}: config_groups.{name}")
        (declared if inside.value.get("format") is None else inside).choose("format", _MXFP4)
        inside.choose("input_activations", None)
        weights = _Declared(inside.value.get("weights"), f"{inside.artefact}.weights")
        weights.choose("num_bits", 4)
        weights.choose("type", "float")
        weights.choose("group_size", 32)
        weights.choose("symmetric", True, None)
        weights.choose("actorder", None, False)
    return MXFP4()


class _Declared:
    """A part of a quantization_config; refusals name the field, its value and what is read."""

    def __init__(self, value: Any, artefact: str) -> None:
        if not isinstance(value, Mapping):
            raise UserError(f"{artefact}: quantisation is {value!r}.", "Expected an object.")
        self.value, self.artefact = value, artefact

    def choose(self, field: str, *allowed: Any) -> Any:
        """The field's value, which must be one of `allowed` (None: absent)."""
        value = self.value.get(field)
        if not any(type(value) is type(other) and value == other for other in allowed):
            raise self.error(field, value, " or ".join(map(repr, allowed)))
        return value

    def error(self, field: str, value: Any, expected: str) -> UserError:
        return UserError(
            f"{self.artefact} is quantised with {field}={value!r}, which is not implemented.",
            f"Implemented: {expected}. Formats: block-scaled FP8 (quant_method fp8) and"
            f" compressed-tensors {_MXFP4}.",
            "Use another release of the model.",
        )


def _blocks(length: int, size: int) -> int:
    """How many blocks of `size` cover `length`, the last perhaps in part."""
    return -(-length // size)


def bytes_of(tensor: TensorEntry) -> np.ndarray:
    """A tensor of one byte an element, mapped, as uint8."""
    return tensor.bytes().reshape(tensor.shape)


def _spread(scales: np.ndarray, columns: slice, size: int) -> np.ndarray:
    """scales [..., C / size] repeated along the last axis, cut to `columns`."""
    first, last = columns.start // size, _blocks(columns.stop, size)
    wide = np.repeat(scales[..., first:last], size, axis=-1)
    return wide[..., columns.start - first * size : columns.stop - first * size]

"""FP8 blocks and MXFP4: the bits of every value, and what is refused before anything is read."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from quantised_checkpoints import (
    FP8,
    MXFP4,
    fp8_tensors,
    is_quantised,
    mxfp4_tensors,
    read_tensors,
    write_dequantised,
    write_quantised,
)
from safetensors.numpy import save_file
from test_weights import assert_same_bits, flat
from tiny_checkpoints import TINY

from kernjax.base import command
from kernjax.base.errors import UserError
from kernjax.model.config import ModelConfig
from kernjax.weights import load_model, load_params, open_checkpoint, save_hf, weights_sha256
from kernjax.weights.layouts import AsIs, HeadPart, Transposed
from kernjax.weights.quantisation import MXFP4 as Mxfp4Scheme
from kernjax.weights.quantisation import BlockScaledFP8
from kernjax.weights.sources import Quantised

CONFIG = ModelConfig.from_dict(TINY)
NAME = "model.safetensors"
UP = "model.layers.0.mlp.up_proj.weight"
BOTH = pytest.mark.parametrize("quantisation", [FP8, MXFP4], ids=["fp8", "mxfp4"])


def source_of(directory: Path, scheme, shape, tensors) -> Quantised:
    codes, scales = tensors
    save_file({"codes": codes, "scales": scales}, directory / NAME)
    entries = open_checkpoint(directory).tensors
    return Quantised(scheme, shape, entries["codes"], entries["scales"])


def read(source: Quantised, layout, index, dtype=np.float32) -> np.ndarray:
    values = np.empty([part.stop - part.start for part in index], dtype)
    for inside, fill in source.bands(layout, index):
        fill(values[inside])
    return values


def everything(shape: tuple[int, int]) -> tuple[slice, slice]:
    return slice(0, shape[0]), slice(0, shape[1])


@pytest.mark.parametrize("scale_dtype", [ml_dtypes.bfloat16, np.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize("shape", [(256, 128), (300, 200), (129, 1), (7, 130)], ids=str)
def test_fp8_blocks_of_128(tmp_path: Path, shape, scale_dtype) -> None:
    codes, scales, values = fp8_tensors(np.random.default_rng(0), shape, (128, 128), scale_dtype)
    source = source_of(tmp_path, BlockScaledFP8(), shape, (codes, scales))
    found = read(source, AsIs(), everything(shape))
    assert found.dtype == np.float32 and found.tobytes() == values.tobytes()
    assert source.nbytes == codes.nbytes + scales.nbytes


def test_every_fp8_code(tmp_path: Path) -> None:
    """Against the definition of E4M3: sign, 4 exponent bits of bias 7, 3 mantissa bits, one NaN."""

    def meaning(code: int) -> float:
        sign, exponent, mantissa = -1.0 if code & 128 else 1.0, code >> 3 & 15, code & 7
        if (exponent, mantissa) == (15, 7):
            return np.nan
        if exponent == 0:
            return sign * mantissa / 8 * 2.0**-6
        return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)

    codes = np.arange(256, dtype=np.uint8).reshape(2, 128).view(ml_dtypes.float8_e4m3fn)
    source = source_of(
        tmp_path, BlockScaledFP8(), (2, 128), (codes, np.full((1, 1), 0.75, np.float32))
    )
    found = read(source, AsIs(), everything((2, 128)))
    expected = np.float32([0.75 * meaning(code) for code in range(256)]).reshape(2, 128)
    assert np.array_equal(found, expected, equal_nan=True)
    numbers = ~np.isnan(expected)
    assert np.array_equal(np.signbit(found[numbers]), np.signbit(expected[numbers]))  # -0 is one


@pytest.mark.parametrize("shape", [(3, 64), (300, 40), (2, 2), (5, 34)], ids=str)
def test_mxfp4_groups_of_32(tmp_path: Path, shape) -> None:
    packed, scales, values = mxfp4_tensors(np.random.default_rng(1), shape)
    source = source_of(tmp_path, Mxfp4Scheme(), shape, (packed, scales))
    for dtype in (np.float32, ml_dtypes.bfloat16):
        found = read(source, AsIs(), everything(shape), dtype)
        assert found.dtype == dtype
        assert found.astype(np.float32).tobytes() == values.tobytes()


def test_mxfp4_extremes(tmp_path: Path) -> None:
    """Scales 2^-127 (subnormal in float32) and 2^127; 255 is the format's NaN."""
    packed = np.full((4, 16), 0x71, np.uint8)  # 0.5 in even columns, 6 in odd ones
    scales = np.uint8([[0], [1], [254], [255]])
    source = source_of(tmp_path, Mxfp4Scheme(), (4, 32), (packed, scales))
    found = read(source, AsIs(), everything((4, 32)))
    assert found[0, 0] == 2.0**-128 and found[0, 1] == 6 * 2.0**-127
    assert found[1, 0] == 2.0**-127 and found[2, 0] == 2.0**126
    assert np.isposinf(found[2, 1]) and np.isnan(found[3]).all()


@pytest.mark.parametrize("layout", [AsIs(), Transposed(), HeadPart(0, 6), HeadPart(1, 6)], ids=str)
@pytest.mark.parametrize("scheme", [BlockScaledFP8((16, 9)), Mxfp4Scheme()], ids=["fp8", "mxfp4"])
def test_any_rectangle_is_that_part_of_the_whole(tmp_path: Path, layout, scheme) -> None:
    """Cut inside blocks, groups and bytes."""
    rng, shape = np.random.default_rng(2), (48, 70)
    if isinstance(scheme, BlockScaledFP8):
        codes, scales, values = fp8_tensors(rng, shape, (16, 9), ml_dtypes.bfloat16)
    else:
        codes, scales, values = mxfp4_tensors(rng, shape)
    source = source_of(tmp_path, scheme, shape, (codes, scales))
    parameter = values if isinstance(layout, AsIs) else values.T
    if isinstance(layout, HeadPart):
        rows = [row for row in range(48) if row // 6 % 2 == layout.part]
        parameter = values[rows].T
    size = parameter.shape
    for first in [(0, size[0]), (1, 2), (15, 24), (5, 5)]:
        for second in [(0, size[1]), (3, 4), (7, 24)]:
            index = (slice(*first), slice(*second))
            found = read(source, layout, index)
            assert np.array_equal(found, parameter[index])


def test_only_what_is_asked_for_is_decoded(tmp_path: Path) -> None:
    """The rows of a slice: the scheme is never given others."""
    decoded = []

    class Watched(BlockScaledFP8):
        def decode(self, codes, scales, rows, columns):
            decoded.append((rows.start, rows.stop, columns.start, columns.stop))
            return super().decode(codes, scales, rows, columns)

    codes, scales, _ = fp8_tensors(np.random.default_rng(3), (64, 40), (16, 9), np.float32)
    source = source_of(tmp_path, Watched((16, 9)), (64, 40), (codes, scales))
    read(source, Transposed(), (slice(5, 9), slice(20, 40)))
    assert sorted(decoded) == [(20, 32, 5, 9), (32, 40, 5, 9)]


@BOTH
def test_a_quantised_checkpoint_loads_as_its_dequantised_copy(tmp_path: Path, quantisation) -> None:
    values = write_quantised(tmp_path, quantisation)
    assert sum(map(is_quantised, values)) == 3 * 3 + 2 * 3 + 4
    write_dequantised(tmp_path / "plain", values)
    for dtype in ("float32", "bfloat16"):
        assert_same_bits(
            load_params(tmp_path, CONFIG, dtype=dtype),
            load_params(tmp_path / "plain", CONFIG, dtype=dtype),
        )
    own, exact = flat(load_params(tmp_path, CONFIG)), flat(load_params(tmp_path / "plain", CONFIG))
    assert own["linear/mlp/up"].dtype == (np.float32 if quantisation is FP8 else ml_dtypes.bfloat16)
    for name, leaf in own.items():
        assert np.array_equal(leaf.astype(np.float32), exact[name]), name


@BOTH
def test_identity_is_of_codes_and_scales(tmp_path: Path, quantisation) -> None:
    values = write_quantised(tmp_path, quantisation)
    write_dequantised(tmp_path / "plain", values)
    before = weights_sha256(tmp_path)
    assert before != weights_sha256(tmp_path / "plain")
    tensors = read_tensors(tmp_path / NAME)
    scale = next(name for name in tensors if "_scale" in name)
    for name in (scale, scale.replace("_scale_inv", "").replace("_scale", "_packed")):
        changed = dict(tensors)
        changed[name] = changed[name].copy()
        changed[name].view(np.uint8).flat[0] ^= 1
        save_file(changed, tmp_path / NAME)
        assert weights_sha256(tmp_path) != before
    save_file(tensors, tmp_path / NAME)
    assert weights_sha256(tmp_path) == before


def test_wrapper_with_vision_and_draft_head(tmp_path: Path) -> None:
    """The published form: config and prefix of the wrapper, quantised tensors that are skipped."""
    values = write_quantised(tmp_path, FP8)
    write_dequantised(tmp_path / "plain", values)
    tensors = {
        name.replace("model.", "model.language_model."): tensor
        for name, tensor in read_tensors(tmp_path / NAME).items()
    }
    tensors["mtp.fc.weight"] = np.zeros((4, 4), ml_dtypes.float8_e4m3fn)
    tensors["mtp.fc.weight_scale_inv"] = np.ones((1, 1), np.float32)
    save_file(tensors, tmp_path / NAME)
    wrapper = {"model_type": "qwen3_5", "text_config": TINY, "quantization_config": FP8}
    (tmp_path / "config.json").write_text(json.dumps(wrapper))
    loaded = load_model(tmp_path, dtype="float32")
    expected = load_model(tmp_path / "plain", dtype="float32")
    assert np.array_equal(loaded.linear.mixer.qkv[...], expected.linear.mixer.qkv[...])


def refused(directory: Path, message: str) -> str:
    with pytest.raises(UserError, match=message) as caught:
        load_params(directory, CONFIG)
    return str(caught.value)


def edit(directory: Path, **changes: np.ndarray | None) -> None:
    """Rewrites the file: suffixes of UP to tensors, None to leave one out."""
    tensors = read_tensors(directory / NAME)
    for suffix, tensor in changes.items():
        tensors.pop(UP + suffix.removeprefix("own"), None)
        if tensor is not None:
            tensors[UP + suffix.removeprefix("own")] = tensor
    save_file(tensors, directory / NAME)


def test_fp8_tensors_that_do_not_fit(tmp_path: Path) -> None:
    write_quantised(tmp_path, FP8)
    original = (tmp_path / NAME).read_bytes()
    # UP is [24, 20]: blocks of 16 x 9 make a grid of 2 x 3.
    edit(tmp_path, _scale_inv=None)
    assert f"\n - {UP}_scale_inv" in refused(tmp_path, "1 missing, 0 extra, 0 misshapen")
    (tmp_path / NAME).write_bytes(original)
    edit(tmp_path, _scale_inv=np.ones((1, 2), np.float32))
    text = refused(tmp_path, "0 missing, 0 extra, 1 misshapen")
    assert f"\n ~ {UP}_scale_inv: F32 [1, 2], expected [2, 3] in F32/F16/BF16" in text
    (tmp_path / NAME).write_bytes(original)
    edit(tmp_path, own=np.zeros((24, 20), np.float32))
    assert f"\n + {UP}_scale_inv" in refused(tmp_path, "0 missing, 1 extra, 0 misshapen")
    edit(tmp_path, own=np.zeros((24, 20), ml_dtypes.float8_e5m2))
    assert f"{UP}: F8_E5M2 [24, 20], expected" in refused(tmp_path, "0 missing, 1 extra, 1 missha")
    edit(tmp_path, own=np.zeros((24, 19), ml_dtypes.float8_e4m3fn))
    assert f"{UP}: F8_E4M3 [24, 19], expected [24, 20]" in refused(tmp_path, "1 misshapen")
    (tmp_path / NAME).write_bytes(original)
    edit(tmp_path, _input_scale=np.ones(1, np.float32))
    assert f"\n + {UP}_input_scale" in refused(tmp_path, "0 missing, 1 extra, 0 misshapen")


def test_mxfp4_tensors_that_do_not_fit(tmp_path: Path) -> None:
    write_quantised(tmp_path, MXFP4)
    original = (tmp_path / NAME).read_bytes()
    edit(tmp_path, _scale=None)
    assert f"\n - {UP}_scale" in refused(tmp_path, "1 missing, 0 extra, 0 misshapen")
    (tmp_path / NAME).write_bytes(original)
    edit(tmp_path, _packed=None)
    assert f"\n - {UP}_packed" in refused(tmp_path, "1 missing, 0 extra, 0 misshapen")
    edit(tmp_path, _scale=None)
    assert f"\n - {UP}\n" in refused(tmp_path, "1 missing, 0 extra, 0 misshapen")
    (tmp_path / NAME).write_bytes(original)
    edit(tmp_path, own=np.zeros((24, 20), np.float32))
    assert f"\n + {UP}\n" in refused(tmp_path, "0 missing, 1 extra, 0 misshapen")
    (tmp_path / NAME).write_bytes(original)
    edit(tmp_path, _scale=np.zeros((24, 2), np.uint8), _packed=np.zeros((24, 20), np.uint8))
    text = refused(tmp_path, "0 missing, 0 extra, 2 misshapen")
    assert f"{UP}_packed: U8 [24, 20], expected [24, 10] in U8" in text
    assert f"{UP}_scale: U8 [24, 2], expected [24, 1] in U8/F8_E8M0" in text
    (tmp_path / NAME).write_bytes(original)
    edit(tmp_path, _global_scale=np.ones(1, np.float32))
    assert f"\n + {UP}_global_scale" in refused(tmp_path, "0 missing, 1 extra, 0 misshapen")


def test_a_vector_and_an_odd_matrix_cannot_be_quantised(tmp_path: Path) -> None:
    write_quantised(tmp_path, FP8)
    tensors = read_tensors(tmp_path / NAME)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(ml_dtypes.float8_e4m3fn)
    save_file(tensors, tmp_path / NAME)
    refused(tmp_path, r"norm.weight \[20\] cannot be quantised in this format")
    assert Mxfp4Scheme().code_shape((4, 31)) is None


def test_declared_but_not_there_and_there_but_not_declared(tmp_path: Path) -> None:
    values = write_quantised(tmp_path, FP8)
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    refused(tmp_path, "is quantised: it has .*, but config.json has no quantization_config")
    save_file(values, tmp_path / NAME)
    (tmp_path / "config.json").write_text(json.dumps(TINY | {"quantization_config": FP8}))
    refused(tmp_path, "declares a quantization_config, but no tensor is quantised")
    save_file(values | {f"{UP}_scale_inv": np.ones((2, 3), np.float32)}, tmp_path / NAME)
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    refused(tmp_path, f"it has {re.escape(UP)}_scale_inv, but")


def changed(base: dict, path: str, value) -> dict:
    result = copy.deepcopy(base)
    *parents, last = path.split("/")
    node = result
    for key in parents:
        node = node[key]
    node[last] = value
    return result


GROUP = "config_groups/group_0"


@pytest.mark.parametrize(
    ("quantisation", "message"),
    [
        (changed(FP8, "quant_method", "awq"), "quant_method='awq'.*'fp8' or 'compressed-tensors'"),
        ({"bits": 4}, "quant_method=None"),
        ("fp8", "quantisation is 'fp8'"),
        (changed(FP8, "fmt", "e5m2"), "fmt='e5m2'"),
        (changed(FP8, "activation_scheme", "static"), "activation_scheme='static'"),
        (changed(FP8, "weight_block_size", None), "weight_block_size=None.*two sizes"),
        (changed(FP8, "weight_block_size", [128]), r"weight_block_size=\[128\]"),
        (changed(FP8, "weight_block_size", [0, 128]), r"weight_block_size=\[0, 128\]"),
        (changed(MXFP4, "config_groups", {}), r"config_groups=\{\}"),
        (changed(MXFP4, f"{GROUP}/format", "nvfp4-pack-quantized"), "group_0 .*format='nvfp4-pack"),
        (changed(MXFP4, f"{GROUP}/format", None), "config.json .*format=None"),
        (changed(MXFP4, f"{GROUP}/weights/num_bits", 8), "weights .*num_bits=8"),
        (changed(MXFP4, f"{GROUP}/weights/type", "int"), "type='int'"),
        (changed(MXFP4, f"{GROUP}/weights/group_size", 16), "group_size=16.*Implemented: 32"),
        (changed(MXFP4, f"{GROUP}/weights/symmetric", False), "symmetric=False"),
        (changed(MXFP4, f"{GROUP}/weights/actorder", "group"), "actorder='group'"),
        (changed(MXFP4, f"{GROUP}/input_activations", {"num_bits": 8}), "input_activations="),
        (changed(MXFP4, f"{GROUP}/weights", None), "weights: quantisation is None"),
    ],
)
def test_schemes_that_are_not_implemented(tmp_path: Path, quantisation, message: str) -> None:
    write_quantised(tmp_path, FP8)
    (tmp_path / "config.json").write_text(json.dumps(TINY | {"quantization_config": quantisation}))
    refused(tmp_path, message)


def test_two_declarations_must_agree(tmp_path: Path) -> None:
    write_quantised(tmp_path, FP8)
    text = TINY | {"quantization_config": FP8}
    wrapper = {"model_type": "qwen3_5", "text_config": text, "quantization_config": FP8}
    (tmp_path / "config.json").write_text(json.dumps(wrapper))
    load_params(tmp_path, CONFIG)
    wrapper["quantization_config"] = MXFP4
    (tmp_path / "config.json").write_text(json.dumps(wrapper))
    refused(tmp_path, "two quantization_config that differ")


def test_a_format_at_the_top_holds_for_groups_without_one(tmp_path: Path) -> None:
    top = changed(MXFP4, f"{GROUP}/format", None) | {"format": "mxfp4-pack-quantized"}
    write_quantised(tmp_path, top)
    load_params(tmp_path, CONFIG)


def test_a_command_ends_with_code_3_and_computes_nothing(tmp_path: Path, capsys) -> None:
    from kernjax import record

    write_quantised(tmp_path, FP8)
    edit(tmp_path, _scale_inv=None)
    argv = [f"--model={tmp_path}", "--corpus=demo", f"--out={tmp_path / 'out'}"]
    assert command.execute(record.main, record.FLAGS, argv) == 3
    assert f"- {UP}_scale_inv" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_saving_refuses_a_quantised_config(tmp_path: Path) -> None:
    config = TINY | {"quantization_config": FP8}
    with pytest.raises(UserError, match="quantization_config cannot be written"):
        save_hf({}, config, tmp_path / "out")

"""Quantised weights kept in memory: the same bits as dequantised at load, on one device or four."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import jax
import kimi_checkpoints as checkpoints
import ml_dtypes
import numpy as np
import pytest
from quantised_checkpoints import FP8, read_tensors, write_quantised
from safetensors.numpy import save_file
from test_weights_moe import MOE, NEXT
from tiny_checkpoints import TINY

from kernjax.base.errors import UserError
from kernjax.model.config import ModelConfig
from kernjax.model.packed import Packed, packed_shapes, unpacked
from kernjax.model.params import leaves
from kernjax.precision import parse_policy
from kernjax.scoring.producer import rounded
from kernjax.weights import load_params

FILE = "model.safetensors"
# Blocks that a mesh cuts, and that the two halves of gate_up_proj (6 rows each) do not respect.
BLOCKS = FP8 | {"weight_block_size": [4, 10]}


def values_of(params: dict[str, Any]) -> dict[str, np.ndarray]:
    """Every parameter's values, by path; one program for all."""
    paths = [path for path, _ in leaves(params)]
    arrays = jax.jit(lambda held: [unpacked(leaf) for leaf in held])(
        [leaf for _, leaf in leaves(params)]
    )
    return {"/".join(path): np.asarray(x) for path, x in zip(paths, arrays, strict=True)}


def assert_same_bits(directory: Path, packed: set[str], dtype: str = "float32") -> dict[str, Any]:
    """Loads both ways; `packed` are the parameters that stay quantised, by their last names."""
    config = ModelConfig.from_directory(directory)
    kept = load_params(directory, config, dtype=dtype, packed=True)
    ours, theirs = values_of(kept), values_of(load_params(directory, config, dtype=dtype))
    for name, values in theirs.items():
        assert ours[name].dtype == values.dtype and ours[name].shape == values.shape, name
        assert ours[name].tobytes() == values.tobytes(), name
    found = {"/".join(path) for path, leaf in leaves(kept) if isinstance(leaf, Packed)}
    assert {name.rpartition("/")[2] for name in found} == packed
    return kept


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dense(tmp_path: Path, dtype: str) -> None:
    write_quantised(tmp_path, FP8)
    matrices = {"qkv", "z", "out", "q", "gate", "k", "v", "o", "up", "down"}
    kept = assert_same_bits(tmp_path, matrices, dtype)
    up = kept["linear"]["mlp"]["up"]
    assert up.codes.dtype == ml_dtypes.float8_e4m3fn and up.codes.shape == (2, 20, 24)
    # Published: blocks of 16 x 9 of [24, 20]. Ours: nine and twenty have no common divisor.
    assert up.scales.dtype == ml_dtypes.bfloat16 and up.scales.shape == (2, 20, 24)


def test_experts_one_by_one_and_in_a_stack(tmp_path: Path) -> None:
    """K3's experts in MXFP4; Qwen's in FP8, either way they lie in files."""
    (tmp_path / "k3").mkdir()
    checkpoints.write_k3(tmp_path / "k3", seed=5)
    kept = assert_same_bits(tmp_path / "k3", {"gate", "up", "down"}, "bfloat16")
    experts = kept["linear_moe"]["moe"]["experts"]
    assert experts["gate"].codes.shape == (2, 6, 8, 36) and experts["gate"].shape == (2, 6, 16, 36)
    assert experts["gate"].scales.dtype == experts["gate"].codes.dtype == np.uint8
    write_quantised(tmp_path / "next", BLOCKS, config=NEXT)
    assert_same_bits(
        tmp_path / "next", {"qkv", "z", "out", "q", "gate", "k", "v", "o", "up", "down"}
    )


def write_stacked(directory: Path) -> dict[str, np.ndarray]:
    """Experts [E, 2F, D] and [E, D, F] in FP8 with blocks per expert; their values by name."""
    write_quantised(directory, BLOCKS, config=MOE)
    tensors, rng, values = read_tensors(directory / FILE), np.random.default_rng(7), {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "experts.down_proj"))]:
        shape = tensors[name].shape
        codes = rng.integers(0, 127, shape).astype(np.uint8) + 128 * rng.integers(0, 2, shape)
        codes = codes.astype(np.uint8).view(ml_dtypes.float8_e4m3fn)
        grid = (shape[0], -(-shape[1] // 4), -(-shape[2] // 10))
        scales = rng.uniform(0.2, 3, grid).astype(ml_dtypes.bfloat16)
        wide = np.stack([np.kron(s.astype(np.float64), np.ones((4, 10))) for s in scales])
        wide = wide[:, : shape[1], : shape[2]]
        values[name] = (codes.astype(np.float64) * wide).astype(np.float32)
        tensors |= {name: codes, f"{name}_scale_inv": scales}
    save_file(tensors, directory / FILE)
    return values


def test_stacked_experts_in_fp8(tmp_path: Path) -> None:
    values = write_stacked(tmp_path)
    kept = assert_same_bits(tmp_path, {"qkv", "z", "out", "q", "gate", "k", "v", "o", "up", "down"})
    ours = values_of(kept)
    both = values["model.layers.1.mlp.experts.gate_up_proj"]  # the only attention layer
    np.testing.assert_array_equal(ours["full_moe/moe/experts/gate"][0], both[:, :6].swapaxes(1, 2))
    np.testing.assert_array_equal(ours["full_moe/moe/experts/up"][0], both[:, 6:].swapaxes(1, 2))
    down = values["model.layers.1.mlp.experts.down_proj"].swapaxes(1, 2)
    np.testing.assert_array_equal(ours["full_moe/moe/experts/down"][0], down)


def test_stacked_experts_without_their_scales(tmp_path: Path) -> None:
    write_stacked(tmp_path)
    tensors = read_tensors(tmp_path / FILE)
    gone = "model.layers.0.mlp.experts.down_proj_scale_inv"
    del tensors[gone]
    save_file(tensors, tmp_path / FILE)
    with pytest.raises(UserError, match="1 missing, 0 extra, 0 misshapen") as error:
        load_params(tmp_path, ModelConfig.from_dict(MOE))
    assert f" - {gone}" in str(error.value)


def test_every_code_and_scale() -> None:
    """Against the definitions of E2M1 and E8M0, NaN included, and of E4M3 through its own dtype."""
    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    codes = np.arange(256, dtype=np.uint8)[None, :]  # a byte is two rows of its column
    for scale in (2, 64, 127, 254, 255):  # below, halves are subnormal, which devices may flush
        scales = np.full((1, 256), scale, np.uint8)
        found = np.asarray(Packed(codes, scales, np.dtype(np.float32))[...])
        for row, half in ((0, codes[0] & 15), (1, codes[0] >> 4)):
            signs = np.where(half & 8, -1.0, 1.0)
            exact = signs * np.take(magnitudes, half & 7) * 2.0 ** (scale - 127)
            with np.errstate(over="ignore"):  # 6 * 2^127 is infinite in float32
                exact = exact.astype(np.float32)
            if scale == 255:
                assert np.isnan(found).all()
            else:
                assert found[row].tobytes() == exact.tobytes(), scale
    codes = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)[:, None]
    found = np.asarray(Packed(codes, np.full((1, 1), 0.75, np.float32), np.dtype(np.float32))[...])
    np.testing.assert_array_equal(found, codes.astype(np.float32) * np.float32(0.75))


def test_values_on_a_grid_without_a_dtype(tmp_path: Path) -> None:
    """weights=m5: rounded as the values of a checkpoint loaded dequantised are."""
    write_quantised(tmp_path, FP8)
    config, grid = ModelConfig.from_dict(TINY), parse_policy("f32,weights=m5").weights
    one, other = (
        values_of(rounded(load_params(tmp_path, config, dtype="float32", packed=p), config, grid))
        for p in (True, False)
    )
    assert all(one[name].tobytes() == other[name].tobytes() for name in other)


def test_groups_are_what_blocks_and_devices_share() -> None:
    assert packed_shapes((3, 256, 7), 1, 128, 256) == ((3, 256, 7), (3, 2, 7))
    assert packed_shapes((3, 256, 7), 1, 128, 64) == ((3, 256, 7), (3, 4, 7))
    assert packed_shapes((3, 64, 7), 2, 32, 64) == ((3, 32, 7), (3, 2, 7))
    assert packed_shapes((3, 64, 7), 2, 32, 16) == ((3, 32, 7), (3, 4, 7))
    assert packed_shapes((3, 6, 7), 2, 32, 3) is None


def test_nothing_to_keep(tmp_path: Path) -> None:
    tensors = checkpoints.draw(checkpoints.K3)
    directory = checkpoints.write(tmp_path, checkpoints.K3, tensors)
    config = ModelConfig.from_directory(directory)
    with pytest.raises(UserError, match="dequantise=layer keeps .* is not quantised"):
        load_params(directory, config, packed=True)


FOUR_DEVICES = """
    import json, sys
    import jax, jax.numpy as jnp, numpy as np
    jax.config.update("jax_num_cpu_devices", 4)
    from flax import nnx
    from kernjax.model import Decoder, ModelConfig, forward, init_cache, logits, plan_execution
    from kernjax.model.packed import Packed
    from kernjax.model.params import leaves
    from kernjax.precision import parse_policy
    from kernjax.weights import load_params, parse_mesh
    from kernjax.weights.sharding import mesh_plans

    policy, told = parse_policy("f32"), {}
    tokens = np.random.default_rng(0).integers(0, 40, (1, 9)).astype(np.int32)
    for directory in sys.argv[1:]:
        config = ModelConfig.from_directory(directory)
        # One device is tried on K3's layout alone: programs take long to compile.
        for text in ("tensor=1", "fsdp=2,tensor=2")[directory.endswith("next") :]:
            count = int(np.prod([int(item.partition("=")[2]) for item in text.split(",")]))
            mesh = parse_mesh(text, jax.devices()[:count])
            run = plan_execution(policy, config.num_layers, **mesh_plans(config, mesh))
            found = []
            for packed in (False, True):
                params = load_params(directory, config, dtype="float32", mesh=mesh, packed=packed)
                sizes = [
                    sum(s.data.nbytes for s in leaf.addressable_shards[:1])
                    for leaf in jax.tree.leaves(params)
                ]
                graph, state = nnx.split(Decoder(config, params))

                @jax.jit
                def call(state, tokens):
                    model = nnx.merge(graph, state)
                    hidden, _, _ = forward(model, tokens, init_cache(config, run, 1, 9), run)
                    return logits(model, hidden, run)

                found.append((np.asarray(call(state, tokens)), sum(sizes)))
            (plain, whole), (kept, less) = found
            told[f"{directory} {text}"] = [
                plain.tobytes() == kept.tobytes(),
                bool(np.isfinite(plain).all()),
                float(np.std(plain)),
                less / whole,
            ]
    print(json.dumps(told))
"""


def test_the_same_logits_on_one_device_and_on_four(tmp_path: Path) -> None:
    two = checkpoints.K3_TEXT | {
        "num_hidden_layers": 2,
        "linear_attn_config": checkpoints.K3_TEXT["linear_attn_config"]
        | {"full_attn_layers": [2], "kda_layers": [1]},
    }
    (tmp_path / "k3").mkdir()
    checkpoints.write_k3(tmp_path / "k3", 5, checkpoints.K3 | {"text_config": two})
    small = NEXT | {"num_hidden_layers": 2, "layer_types": NEXT["layer_types"][:2]}
    small |= {"mlp_only_layers": [0], "num_experts": 4}
    write_quantised(tmp_path / "next", BLOCKS, config=small)
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FOUR_DEVICES), tmp_path / "k3", tmp_path / "next"],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout)
    assert len(told) == 3
    for name, (same, finite, spread, share) in told.items():
        assert same and finite and spread > 0.1 and share < 0.9, (name, told)

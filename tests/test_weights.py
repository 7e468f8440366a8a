"""Loading and saving: names, layouts, dtypes, prefixes, ties, identities."""

from __future__ import annotations

import itertools
import json
import math
import tracemalloc
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_checkpoints import TINY, published_config, write_shards

from kernjax.base.errors import UserError
from kernjax.model.config import ModelConfig
from kernjax.model.params import abstract_params, leaves, random_params
from kernjax.weights import load, load_params, save_hf, sources, weights_sha256
from kernjax.weights.layouts import (
    AsIs,
    Depthwise,
    ExpertRows,
    HeadPart,
    Interleaved,
    PerHead,
    Row,
    Transposed,
)
from kernjax.weights.names import expected_shapes, is_skipped, resolve
from kernjax.weights.safetensors_files import TensorEntry, read_header

FLOAT32_ALWAYS = {
    "final_norm", "linear/input_norm", "linear/post_norm", "linear/A_log", "linear/dt_bias",
    "linear/norm", "full/input_norm", "full/post_norm", "full/q_norm", "full/k_norm",
}  # fmt: skip


def flat(tree: dict[str, Any]) -> dict[str, np.ndarray]:
    return {"/".join(path): np.asarray(leaf) for path, leaf in leaves(tree)}


def assert_same_bits(left: dict[str, Any], right: dict[str, Any]) -> None:
    a, b = flat(left), flat(right)
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and a[name].shape == b[name].shape, name
        assert a[name].tobytes() == b[name].tobytes(), name


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, ModelConfig, dict[str, Any]]:
    """A directory, its config, and the float32 parameters it was saved from."""
    config = ModelConfig.from_dict(TINY)
    params = random_params(config, seed=0)
    save_hf(params, TINY, tmp_path)
    return tmp_path, config, params


def repack(directory: Path, rename, extra: dict[str, np.ndarray] | None = None) -> None:
    """Rewrites model.safetensors with other names, and more tensors."""
    tensors = load_file(directory / "model.safetensors")
    tensors = {rename(name): value for name, value in tensors.items()} | (extra or {})
    save_file(tensors, directory / "model.safetensors")


def test_27b_tensor_table_is_covered_exactly() -> None:
    folder = published_config()
    if folder is None:
        pytest.skip("Qwen3.8-27B's tensors.tsv is not beside this checkout")
    rows = [line.split("\t") for line in (folder / "tensors.tsv").read_text().splitlines()[1:]]
    published = {row[0]: tuple(map(int, row[2].split("x"))) for row in rows}
    text = {name: shape for name, shape in published.items() if not is_skipped(name)}
    assert (len(published), len(text)) == (1199, 851)

    config = ModelConfig.from_directory(folder)
    expected = expected_shapes(config)
    prefix = resolve(expected, text)
    assert {prefix.full(name): shape for name, shape in expected.items()} == text
    assert sum(spec.size for _, spec in leaves(abstract_params(config))) == 26_895_998_464


def test_round_trip_is_bitwise(saved) -> None:
    directory, config, params = saved
    assert_same_bits(load_params(directory, config), params)


@pytest.mark.parametrize("tie", [False, True])
def test_bfloat16_round_trip_keeps_float32_norms(tmp_path: Path, tie: bool) -> None:
    raw = TINY | {"tie_word_embeddings": tie}
    config = ModelConfig.from_dict(raw)
    params = random_params(config, seed=1, dtype="bfloat16")
    save_hf(params, raw, tmp_path)
    loaded = load_params(tmp_path, config)
    assert_same_bits(loaded, params)
    assert ("lm_head" in loaded) == (not tie)
    in_float32 = {name for name, leaf in flat(loaded).items() if leaf.dtype == np.float32}
    assert in_float32 == FLOAT32_ALWAYS
    dtypes = {t.dtype.name for t in load_file(tmp_path / "model.safetensors").values()}
    assert dtypes == {"float32", "bfloat16"}


def test_saving_in_one_dtype_rounds_everything(saved, tmp_path: Path) -> None:
    _, config, params = saved
    save_hf(params, TINY, tmp_path / "bf16", dtype="bfloat16")
    stored = load_file(tmp_path / "bf16" / "model.safetensors")
    assert {t.dtype.name for t in stored.values()} == {"bfloat16"}
    rounded = {name: leaf.astype(ml_dtypes.bfloat16) for name, leaf in flat(params).items()}
    for name, leaf in flat(load_params(tmp_path / "bf16", config)).items():
        assert np.array_equal(leaf.astype(np.float32), rounded[name].astype(np.float32)), name


def test_values_lie_where_hf_has_them(saved) -> None:
    """Against the published layout spelled out by hand, one tensor of each kind."""
    directory, _, params = saved
    hf = load_file(directory / "model.safetensors")
    p = flat(params)
    hidden, heads, dim = 20, 4, 8
    layer = "model.layers.{}.".format
    # Layers 0 and 2 are the delta net's, layer 1 is the attention's.
    assert np.array_equal(hf["model.embed_tokens.weight"], p["embed"])
    assert np.array_equal(hf["lm_head.weight"], p["lm_head"].T)
    assert np.array_equal(hf["model.norm.weight"], p["final_norm"])
    assert np.array_equal(hf[layer(2) + "linear_attn.in_proj_qkv.weight"], p["linear/qkv"][1].T)
    assert np.array_equal(hf[layer(0) + "linear_attn.A_log"], p["linear/A_log"][0])
    assert np.array_equal(hf[layer(2) + "linear_attn.conv1d.weight"][:, 0, :], p["linear/conv"][1])
    assert np.array_equal(hf[layer(1) + "mlp.down_proj.weight"], p["full/mlp/down"][0].T)
    q_proj = hf[layer(1) + "self_attn.q_proj.weight"]
    for head in range(heads):
        rows = slice(head * dim, (head + 1) * dim)
        query = q_proj[2 * head * dim : (2 * head + 1) * dim]
        gate = q_proj[(2 * head + 1) * dim : (2 * head + 2) * dim]
        assert query.shape == (dim, hidden)
        assert np.array_equal(query, p["full/q"][0][:, rows].T)
        assert np.array_equal(gate, p["full/gate"][0][:, rows].T)


def test_mixed_dtypes_are_read_by_their_own_header(saved) -> None:
    """Qwen3.5 releases: F32 A_log and norm among BF16; the file is not of one dtype."""
    directory, config, params = saved
    tensors = load_file(directory / "model.safetensors")
    keep = ("A_log", "linear_attn.norm.weight")
    mixed = {n: t if n.endswith(keep) else t.astype(ml_dtypes.bfloat16) for n, t in tensors.items()}
    save_file(mixed, directory / "model.safetensors")
    loaded, exact = flat(load_params(directory, config)), flat(params)
    for name in ("linear/A_log", "linear/norm"):
        assert loaded[name].tobytes() == exact[name].tobytes()
    assert loaded["linear/qkv"].dtype == ml_dtypes.bfloat16
    assert loaded["linear/dt_bias"].dtype == np.float32
    rounded = exact["linear/dt_bias"].astype(ml_dtypes.bfloat16).astype(np.float32)
    assert np.array_equal(loaded["linear/dt_bias"], rounded)


def test_layers_of_different_dtypes_are_stacked_in_the_widest(saved) -> None:
    directory, config, params = saved
    tensors = load_file(directory / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].astype(np.float16)
    other = "model.layers.2.mlp.up_proj.weight"
    tensors[other] = tensors[other].astype(ml_dtypes.bfloat16)
    save_file(tensors, directory / "model.safetensors")
    up = np.asarray(load_params(directory, config)["linear"]["mlp"]["up"])
    exact = np.asarray(params["linear"]["mlp"]["up"])
    assert up.dtype == np.float32
    assert np.array_equal(up[0], exact[0].astype(np.float16).astype(np.float32))
    assert np.array_equal(up[1], exact[1].astype(ml_dtypes.bfloat16).astype(np.float32))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", jnp.float32])
def test_loading_in_a_given_dtype(saved, dtype) -> None:
    directory, config, params = saved
    loaded, exact = flat(load_params(directory, config, dtype=dtype)), flat(params)
    for name, leaf in loaded.items():
        wanted = np.float32 if name in FLOAT32_ALWAYS else jnp.dtype(dtype)
        assert leaf.dtype == wanted
        assert leaf.tobytes() == exact[name].astype(wanted).tobytes(), name


def test_unknown_weight_dtype(saved) -> None:
    directory, config, _ = saved
    with pytest.raises(UserError, match="'int8'.*bfloat16, float16, float32"):
        load_params(directory, config, dtype="int8")


def test_large_stacks_fill_in_place_to_the_same_bits(saved, monkeypatch) -> None:
    directory, config, params = saved
    monkeypatch.setattr(load, "_ON_HOST", ())
    monkeypatch.setattr(load, "_HOST_STACK_BYTES", 1500)
    sizes = [leaf.nbytes for name, leaf in flat(params).items() if "/" in name]
    assert min(sizes) < 1500 < max(sizes)
    assert_same_bits(load_params(directory, config), params)


def test_large_tensors_are_read_in_bands_of_rows(saved, monkeypatch) -> None:
    directory, config, params = saved
    monkeypatch.setattr(sources, "_BAND_BYTES", 500)
    bands = []
    load_band = TensorEntry.load

    def watched(self, out):
        bands.append(self)
        load_band(self, out)

    monkeypatch.setattr(TensorEntry, "load", watched)
    assert_same_bits(load_params(directory, config), params)
    assert max(band.nbytes for band in bands) <= 500
    read = {entry.name: entry for entry in read_header(directory / "model.safetensors")}
    for name, entry in read.items():  # every byte once, also of what serves two parameters
        spans = sorted((band.begin, band.end) for band in bands if band.name == name)
        assert spans[0][0] == entry.begin and spans[-1][1] == entry.end, name
        assert [end for _, end in spans[:-1]] == [begin for begin, _ in spans[1:]], name


def test_a_band_that_fails_is_an_error(saved, monkeypatch) -> None:
    directory, config, _ = saved
    monkeypatch.setattr(sources, "_BAND_BYTES", 500)

    def fails(self, out):
        raise OSError(5, "Input/output error", str(self.file))

    monkeypatch.setattr(TensorEntry, "load", fails)
    with pytest.raises(OSError, match="Input/output"):
        load_params(directory, config)


def test_bfloat16_becomes_float32_exactly() -> None:
    every = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16).reshape(256, 256)
    for values in (every, every.T, every[3:9, 5:8]):
        wide = np.empty(values.shape, np.float32)
        sources._put(values, wide)
        assert np.array_equal(wide.view(np.uint32), values.view(np.uint16).astype(np.uint32) << 16)
    sources._put(every, wide := np.empty((256, 256), np.float32))
    numbers = ~np.isnan(wide)
    assert np.array_equal(wide[numbers], every[numbers].astype(np.float32))


def test_loaded_arrays_do_not_alias_the_file(saved) -> None:
    directory, config, params = saved
    loaded = load_params(directory, config)
    path = directory / "model.safetensors"
    with open(path, "r+b") as file:
        file.write(b"\xff" * path.stat().st_size)
    assert_same_bits(loaded, params)


def test_on_a_cpu_jax_takes_the_memory_that_was_filled(saved, monkeypatch) -> None:
    directory, config, _ = saved
    made, aligned = set(), load._aligned

    def watched(shape, dtype):
        memory = aligned(shape, dtype)
        made.add(memory.ctypes.data)
        return memory

    monkeypatch.setattr(load, "_aligned", watched)
    for _, leaf in leaves(load_params(directory, config)):
        assert leaf.unsafe_buffer_pointer() in made


@pytest.mark.parametrize(("on_its_way", "slices"), [(0, 2), (1 << 30, 3)], ids=["waits", "goes on"])
def test_elsewhere_the_host_holds_few_slices(tmp_path, monkeypatch, on_its_way, slices) -> None:
    """What is being filled, what is on its way, and what jax lets go of at the next call."""
    config = TINY | {"hidden_size": 128, "intermediate_size": 2048, "vocab_size": 2000}
    params = random_params(ModelConfig.from_dict(config), seed=0)
    save_hf(params, config, tmp_path)
    band = 1 << 14
    monkeypatch.setattr(sources, "_BAND_BYTES", band)
    changed = {"_ON_HOST": (), "_HOST_STACK_BYTES": band, "_STEPS_AHEAD": 4}
    for name, value in (changed | {"_ON_ITS_WAY_BYTES": on_its_way}).items():
        monkeypatch.setattr(load, name, value)

    def misaligned(shape, dtype):  # a CPU makes a copy of it, as other devices do
        return np.empty(math.prod(shape) + 1, dtype)[1:].reshape(shape)

    monkeypatch.setattr(load, "_aligned", misaligned)
    load_params(tmp_path, ModelConfig.from_dict(config))  # compiles, and threads get their scratch
    tracemalloc.start()
    try:
        loaded = load_params(tmp_path, ModelConfig.from_dict(config))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert_same_bits(loaded, params)
    largest, total = 128 * 2048 * 4, sum(leaf.nbytes for _, leaf in leaves(params))
    assert largest < peak < (slices + 0.5) * largest < total / 3


@pytest.mark.parametrize("body", ["model.language_model.", "language_model.model."])
def test_prefixes_and_skipped_tensors(saved, body: str) -> None:
    directory, config, params = saved
    head = "language_model." if body == "language_model.model." else ""

    def rename(name: str) -> str:
        return head + name if name == "lm_head.weight" else body + name.removeprefix("model.")

    plain = weights_sha256(directory)
    vision = {
        "model.visual.blocks.0.attn.qkv.weight": np.ones((3, 2), np.float16),
        "mtp.norm.weight": np.ones(5, np.int64),
    }
    repack(directory, rename, vision)
    assert_same_bits(load_params(directory, config), params)
    assert weights_sha256(directory) == plain


def test_wrapper_config_and_shards(saved, tmp_path: Path) -> None:
    """The published form: wrapper config, wrapper prefix, a layer that straddles two shards."""
    directory, config, params = saved
    tensors = load_file(directory / "model.safetensors")
    sha256 = weights_sha256(directory)
    renamed = {name.replace("model.", "model.language_model."): t for name, t in tensors.items()}
    names = sorted(renamed)
    sharded = tmp_path / "sharded"
    sharded.mkdir()
    write_shards(
        sharded,
        {
            "model-00001-of-00002.safetensors": {n: renamed[n] for n in names[::2]},
            "model-00002-of-00002.safetensors": {n: renamed[n] for n in names[1::2]},
        },
    )
    wrapper = {"model_type": "qwen3_5", "text_config": TINY, "vision_config": {}}
    (sharded / "config.json").write_text(json.dumps(wrapper))
    assert ModelConfig.from_directory(sharded) == config
    assert_same_bits(load_params(sharded, config), params)
    assert weights_sha256(sharded) == sha256


def test_sha256_is_of_the_values(saved) -> None:
    directory, config, params = saved
    before = weights_sha256(directory)
    changed = jax.tree.map(lambda leaf: leaf, params)
    changed["full"]["k"] = changed["full"]["k"].at[0, 0, 0].add(1.0)
    save_hf(changed, TINY, directory)
    assert weights_sha256(directory) != before
    save_hf(params, TINY, directory)
    assert weights_sha256(directory) == before


def test_tied_head_may_be_repeated_but_not_differ(tmp_path: Path) -> None:
    raw = TINY | {"tie_word_embeddings": True}
    config = ModelConfig.from_dict(raw)
    params = random_params(config, seed=2)
    save_hf(params, raw, tmp_path)
    sha256 = weights_sha256(tmp_path)
    head = np.array(params["embed"])
    repack(tmp_path, str, {"lm_head.weight": head})
    assert_same_bits(load_params(tmp_path, config), params)
    assert weights_sha256(tmp_path) == sha256
    head[3, 1] += 1
    repack(tmp_path, str, {"lm_head.weight": head})
    with pytest.raises(UserError, match="tie_word_embeddings=true, but lm_head.weight"):
        load_params(tmp_path, config)


@pytest.mark.parametrize("kinds", [["full_attention"] * 2, ["linear_attention"] * 2])
def test_one_kind_of_layer(tmp_path: Path, kinds: list[str]) -> None:
    raw = TINY | {"layer_types": kinds, "num_hidden_layers": 2}
    config = ModelConfig.from_dict(raw)
    params = random_params(config, seed=3)
    assert ("full" in params) != ("linear" in params)
    save_hf(params, raw, tmp_path)
    assert_same_bits(load_params(tmp_path, config), params)


def test_random_params_depend_on_seed_and_path_only() -> None:
    config = ModelConfig.from_dict(TINY)
    first = random_params(config, seed=0)
    assert_same_bits(first, random_params(config, seed=0))
    assert not np.array_equal(first["embed"], random_params(config, seed=1)["embed"])
    assert not np.array_equal(first["full"]["k"], first["full"]["v"])
    for path, spec in leaves(abstract_params(config)):
        leaf = flat(first)["/".join(path)]
        assert leaf.shape == spec.shape and np.isfinite(leaf).all()
        assert len(spec.axes) == len(spec.units) == len(spec.shape)


def test_saving_refuses_another_tree_and_the_wrapper(saved, tmp_path: Path) -> None:
    _, _, params = saved
    with pytest.raises(UserError, match="'qwen3_5' cannot be written"):
        save_hf(params, {"model_type": "qwen3_5", "text_config": TINY}, tmp_path / "out")
    with pytest.raises(ValueError, match="do not match config at final_norm"):
        save_hf(params | {"final_norm": np.zeros(3)}, TINY, tmp_path / "out")
    with pytest.raises(ValueError, match="do not match config at lm_head"):
        save_hf(params, TINY | {"tie_word_embeddings": True}, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_progress_is_not_on_standard_output(saved, capsys) -> None:
    directory, config, _ = saved
    load_params(directory, config, progress=True)
    assert capsys.readouterr().out == ""


def test_progress_counts_what_is_read(saved, monkeypatch) -> None:
    """Every byte of the text tensors once, in steps of a tensor's slice."""
    directory, config, _ = saved
    steps, totals = [], []

    class Counted(load.Work):
        def __init__(self, title, unit, total, shown):
            super().__init__(title, unit, total, shown)
            totals.append((unit, total, shown))

        def advance(self, amount=1):
            steps.append(amount)
            super().advance(amount)

    monkeypatch.setattr(load, "Work", Counted)
    load_params(directory, config)
    tensors = load_file(directory / "model.safetensors").values()
    expected = sum(tensor.nbytes for tensor in tensors)
    assert totals == [("B", pytest.approx(expected), False)]
    assert sum(steps) == pytest.approx(expected) and min(steps) > 0
    assert max(steps) == 40 * 20 * 4  # the embedding, whole


@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        (AsIs(), (6, 5)),
        (Row(), (6,)),
        (PerHead(), (6,)),
        (Transposed(), (6, 5)),
        (Depthwise(), (6, 4)),
        (HeadPart(0, 3), (5, 12)),
        (HeadPart(1, 3), (5, 12)),
        (Interleaved(3, 7, ((0, 2), (2, 2), (4, 2))), (5, 18)),
        (Interleaved(4, 7, ((6, 1),)), (6, 4)),
        (ExpertRows(0, 8), (6, 5, 4)),
        (ExpertRows(4, 8), (6, 5, 4)),
    ],
    ids=str,
)
def test_layouts_read_any_rectangle_of_what_they_wrote(layout, shape) -> None:
    value = np.arange(math.prod(shape), dtype=np.float32).reshape(shape) + 1
    hf = np.zeros(layout.hf_shape(shape), np.float32)
    layout.write(hf, value)
    assert np.count_nonzero(hf) == value.size
    slices = [[slice(0, size), slice(1, 3), slice(size - 2, size - 1)] for size in shape]
    for index in itertools.product(*slices):
        for step in (1, 3, 100):
            assert np.array_equal(by_bands(layout, hf, index, step), value[index])


def by_bands(layout, hf: np.ndarray, index, step: int) -> np.ndarray:
    """parameter[index], of bands that each cover what no other one does."""
    shape = [part.stop - part.start for part in index]
    result, covered = np.empty(shape, hf.dtype), np.zeros(shape, int)
    for inside, region in layout.bands(index, step):
        result[inside] = layout.turn(hf[region])
        covered[inside] += 1
    assert np.all(covered == 1)
    return result


def test_interleaved_rows_lie_where_qwen3_next_has_them() -> None:
    """Two key heads, each with its query, key, two value heads and their gates: by hand."""
    first, second = "q0 q0 k0 k0 v0 v1 z0 z1", "q1 q1 k1 k1 v2 v3 z2 z3"
    hf = np.array(f"{first} {second}".split())[:, None]

    def rows(*spans: tuple[int, int]) -> str:
        layout = Interleaved(2, 8, spans)
        index = (slice(0, 1), slice(0, 2 * sum(width for _, width in spans)))
        return " ".join(by_bands(layout, hf, index, 3)[0])

    assert rows((0, 2), (2, 2), (4, 2)) == "q0 q0 q1 q1 k0 k0 k1 k1 v0 v1 v2 v3"
    assert rows((6, 2)) == "z0 z1 z2 z3"


def test_a_saved_model_is_as_readable_as_any_new_file(saved) -> None:
    modes = {path.name: path.stat().st_mode for path in saved[0].iterdir()}
    assert modes["model.safetensors"] == modes["config.json"]

"""Bad model directories: each is refused before anything is read, with its own message."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_checkpoints import TINY, header_of, write_index, write_raw, write_shards

from kernjax.base.errors import UserError
from kernjax.model.config import ModelConfig
from kernjax.model.params import random_params
from kernjax.weights import load_model, load_params, open_checkpoint, save_hf

NAME = "model.safetensors"
CONFIG = ModelConfig.from_dict(TINY)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    save_hf(random_params(CONFIG, seed=0), TINY, tmp_path)
    return tmp_path


def refused(directory: Path, message: str) -> UserError:
    with pytest.raises(UserError, match=message) as caught:
        load_params(directory, CONFIG)
    return caught.value


def test_sound_directory_is_not_refused(directory: Path) -> None:
    assert load_model(directory).config == CONFIG
    assert len(open_checkpoint(directory).tensors) == 2 * 14 + 11 + 3


def test_absent_and_empty(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "does not exist")
    refused(tmp_path, "has no weights: neither model.safetensors nor model.safetensors.index.json")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    refused(tmp_path, r"but pytorch_model.bin\)")


def test_single_file_and_index_together(directory: Path) -> None:
    write_index(directory, {"a": NAME})
    refused(directory, "holds both")


@pytest.mark.parametrize("keep", [0, 5, 8, 100])
def test_cut_inside_the_header(directory: Path, keep: int) -> None:
    path = directory / NAME
    path.write_bytes(path.read_bytes()[:keep])
    refused(directory, f"{keep} bytes cannot hold its header")


def test_cut_inside_the_data(directory: Path) -> None:
    path = directory / NAME
    raw = path.read_bytes()
    path.write_bytes(raw[:-1])
    refused(directory, rf"is cut: it has {len(raw) - 1} bytes.*Expected {len(raw)} bytes")


def test_bytes_after_the_end(directory: Path) -> None:
    path = directory / NAME
    path.write_bytes(path.read_bytes() + b"more")
    refused(directory, "4 bytes follow its last tensor")


def test_a_pointer_instead_of_the_file(directory: Path) -> None:
    (directory / NAME).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    refused(directory, "cannot hold its header")


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{not json", "not sound JSON"),
        (b"\xff\xfe", "not sound JSON"),
        (b"[]", "not a JSON object"),
        (b'{"a": 1, "a": 2}', "'a' occurs twice"),
        ({"a": 3}, "tensor a has dtype=None"),
        ({"a": {"dtype": "F31", "shape": [1], "data_offsets": [0, 4]}}, "dtype='F31'"),
        ({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, r"shape=\[-1\]"),
        ({"a": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}}, r"shape=\[1.0\]"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}, r"data_offsets=\[4, 0\]"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}, r"data_offsets=\[0\]"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, "4 bytes.*Expected 8 for"),
        (
            {
                "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
                "b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
            },
            "tensor b overlaps tensor a",
        ),
        (
            {
                "a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
                "b": {"dtype": "U8", "shape": [4], "data_offsets": [8, 12]},
            },
            "4 bytes between tensor a and tensor b belong to no tensor",
        ),
        ({"a": {"dtype": "U8", "shape": [99], "data_offsets": [0, 99]}}, "tensor a ends at"),
    ],
)
def test_unsound_headers(directory: Path, header, message: str) -> None:
    write_raw(directory / NAME, header, b"\0" * 12)
    refused(directory, message)


def test_difference_names_both_sides(directory: Path) -> None:
    tensors = load_file(directory / NAME)
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    tensors["model.layers.3.mlp.up_proj.weight"] = np.zeros((24, 20), np.float32)
    tensors["model.layers.0.linear_attn.conv1d.weight"] = np.zeros((40, 4), np.float32)
    tensors["model.layers.0.linear_attn.dt_bias"] = np.zeros(4, np.int32)
    save_file(tensors, directory / NAME)
    lines = str(refused(directory, "1 missing, 1 extra, 2 misshapen")).splitlines()
    assert " - model.layers.1.self_attn.k_proj.weight" in lines
    assert " + model.layers.3.mlp.up_proj.weight" in lines
    wrong = "model.layers.0.linear_attn.conv1d.weight: F32 [40, 4], expected [40, 1, 4]"
    assert any(line.startswith(f" ~ {wrong}") for line in lines)
    assert any("dt_bias: I32 [4], expected [4] in F32/F16/BF16" in line for line in lines)


def test_difference_is_capped(directory: Path) -> None:
    save_file({f"h.{i}": np.zeros(1, np.float32) for i in range(100)}, directory / NAME)
    error = str(refused(directory, "42 missing, 100 extra, 0 misshapen"))
    assert "... and 34 more" in error and "... and 92 more" in error
    assert len(error.splitlines()) < 25


def test_weights_of_another_size(directory: Path) -> None:
    other = ModelConfig.from_dict(TINY | {"hidden_size": 24})
    with pytest.raises(UserError, match="0 missing, 0 extra, 32 misshapen"):
        load_params(directory, other)


def test_untied_head_missing_and_tied_head_extra(directory: Path) -> None:
    tensors = load_file(directory / NAME)
    head = tensors.pop("lm_head.weight")
    save_file(tensors, directory / NAME)
    refused(directory, "1 missing, 0 extra, 0 misshapen.\n - lm_head.weight")
    tensors["lm_head.weight"] = head
    tensors["model.lm_head.weight"] = head
    save_file(tensors, directory / NAME)
    refused(directory, r"0 missing, 1 extra, 0 misshapen.\n \+ model.lm_head.weight")


@pytest.fixture
def shards(directory: Path) -> tuple[Path, dict[str, str], dict[str, dict[str, np.ndarray]]]:
    """The directory in two shards: (directory, weight_map, tensors of each)."""
    tensors = load_file(directory / NAME)
    (directory / NAME).unlink()
    names = sorted(tensors)
    content = {
        "one.safetensors": {name: tensors[name] for name in names[:10]},
        "two.safetensors": {name: tensors[name] for name in names[10:]},
    }
    return directory, write_shards(directory, content), content


def test_shards_load(shards) -> None:
    directory, _, _ = shards
    assert load_params(directory, CONFIG)["embed"].shape == (40, 20)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": {"a": 1}}'])
def test_bad_index(shards, content: str) -> None:
    directory, _, _ = shards
    (directory / "model.safetensors.index.json").write_text(content)
    refused(directory, "could not be read as JSON|has no weight_map")


@pytest.mark.parametrize(
    "file", ["../two.safetensors", "/tmp/two.safetensors", "a/../../b", "C:\\b", "..\\b", ""]
)
def test_index_that_leaves_the_directory(shards, file: str) -> None:
    directory, weight_map, _ = shards
    write_index(directory, weight_map | {"lm_head.weight": file})
    refused(directory, "places tensor lm_head.weight in .*outside the model directory")


def test_symbolic_links_are_followed(shards) -> None:
    """A hub cache's snapshot is links to blobs elsewhere."""
    directory, _, _ = shards
    blob = directory.parent / f"{directory.name}-blob"
    (directory / "one.safetensors").rename(blob)
    (directory / "one.safetensors").symlink_to(blob)
    assert load_params(directory, CONFIG)["embed"].shape == (40, 20)


def test_missing_shard(shards) -> None:
    directory, _, _ = shards
    (directory / "two.safetensors").unlink()
    refused(directory, "lacks 1 of the 2 shards in its index: two.safetensors")


def test_tensor_listed_but_in_no_shard(shards) -> None:
    directory, _, content = shards
    name = next(iter(content["two.safetensors"]))
    rest = {n: t for n, t in content["two.safetensors"].items() if n != name}
    save_file(rest, directory / "two.safetensors")
    refused(directory, rf"1 listed but in no shard: {name} \(two.safetensors\)")


def test_tensor_in_a_shard_but_not_listed(shards) -> None:
    directory, weight_map, _ = shards
    del weight_map["lm_head.weight"]
    write_index(directory, weight_map)
    refused(directory, "1 in a shard but not listed: lm_head.weight")


def test_tensor_listed_in_another_shard(shards) -> None:
    directory, weight_map, _ = shards
    assert weight_map["lm_head.weight"] == "one.safetensors"
    write_index(directory, weight_map | {"lm_head.weight": "two.safetensors"})
    refused(directory, "1 listed in another shard: lm_head.weight")


def test_tensor_in_two_shards(shards) -> None:
    directory, weight_map, content = shards
    head = {"lm_head.weight": content["one.safetensors"]["lm_head.weight"]}
    save_file(content["two.safetensors"] | head, directory / "two.safetensors")
    refused(directory, "lm_head.weight is in two shards.*one.safetensors and two.safetensors")


def test_cut_shard_is_named(shards) -> None:
    directory, _, _ = shards
    path = directory / "two.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    refused(directory, "two.safetensors is cut")


def test_header_helper_reads_what_the_library_wrote(directory: Path) -> None:
    """The reader here and the `safetensors` library agree on every tensor's bytes."""
    header, data = header_of(directory / NAME)
    by_library = load_file(directory / NAME)
    ours = open_checkpoint(directory).tensors
    assert ours.keys() == by_library.keys() == header.keys() - {"__metadata__"}
    for name, entry in ours.items():
        begin, end = header[name]["data_offsets"]
        assert entry.bytes().tobytes() == data[begin:end] == by_library[name].tobytes()
        assert np.array_equal(entry.array(), by_library[name])

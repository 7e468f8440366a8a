"""convert: the same bits from Orbax as from HF, in any dtype and mesh; nothing half loads."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from instrument import LAYERS, last_line, run
from pod_processes import start_pod
from quantised_checkpoints import MXFP4, write_quantised
from tiny import write_checkpoint
from tiny_checkpoints import TINY

from kernjax import convert, load_recording, record
from kernjax.base.errors import UserError
from kernjax.model.config import ModelConfig
from kernjax.model.params import leaves, random_params
from kernjax.scoring.producer import Checkpoint
from kernjax.weights import convert as writing
from kernjax.weights import load_params, parse_mesh, save_hf, weights_sha256


@pytest.fixture(scope="module")
def hf(tmp_path_factory) -> Path:
    """A bfloat16 checkpoint (norms float32) with a tokenizer and other files."""
    folder = tmp_path_factory.mktemp("hf")
    save_hf(random_params(ModelConfig.from_dict(TINY), seed=1, dtype="bfloat16"), TINY, folder)
    (folder / "tokenizer.json").write_text('{"model": "not read here"}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "model.onnx").write_text("something large")
    return folder


@pytest.fixture(scope="module")
def converted(hf, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("converted") / "out"
    assert run(convert, "--model", str(hf), "--out", str(out)) == 0
    return out


def assert_same(ours: dict, theirs: dict) -> None:
    ours, theirs = dict(leaves(ours)), dict(leaves(theirs))
    assert ours.keys() == theirs.keys()
    for path, leaf in ours.items():
        assert leaf.dtype == theirs[path].dtype, path
        assert np.asarray(leaf).tobytes() == np.asarray(theirs[path]).tobytes(), path


@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16", "float16"])
def test_the_same_bits(hf, converted, dtype):
    config = ModelConfig.from_directory(converted)
    ours = load_params(converted, config, dtype=dtype)
    assert_same(ours, load_params(hf, config, dtype=dtype))
    assert all(isinstance(leaf, jax.Array) for _, leaf in leaves(ours))


def test_into_a_mesh(hf, converted):
    config, mesh = ModelConfig.from_directory(converted), parse_mesh("tensor=1")
    ours = load_params(converted, config, dtype="float32", mesh=mesh)
    theirs = load_params(hf, config, dtype="float32", mesh=mesh)
    assert_same(ours, theirs)
    for (_, one), (_, other) in zip(leaves(ours), leaves(theirs), strict=True):
        assert one.sharding.is_equivalent_to(other.sharding, one.ndim)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_two_processes_write_one_checkpoint(hf, tmp_path):
    """Each holds and writes its half; a mesh of one of them is refused, by both."""
    words = [f"--model={hf}", f"--out={tmp_path / 'out'}"]
    pod = start_pod("kernjax.convert", [*words, "--mesh=tensor=2"], 2)
    assert [process.wait() for process in pod] == [0, 0], [process.text for process in pod]
    assert pod[0].result == pod[1].result
    assert pod[0].result["weights_sha256"] == weights_sha256(hf)
    assert weights_sha256(tmp_path / "out") == weights_sha256(hf)
    config = ModelConfig.from_directory(hf)
    assert_same(load_params(tmp_path / "out", config), load_params(hf, config))
    assert {path.name for path in (tmp_path / "out").glob("*.json")} >= {
        "config.json", "tokenizer.json"
    }  # fmt: skip

    pod = start_pod("kernjax.convert", [f"--model={hf}", f"--out={tmp_path / 'none'}"], 2)
    assert [process.wait() for process in pod] == [3, 3]
    assert "Expected a mesh over the devices of all hosts" in pod[0].text
    assert not (tmp_path / "none").exists()


def test_values_that_bfloat16_rounds(tmp_path):
    """A float32 checkpoint read as bfloat16: rounded to nearest, ties to even, by either reader."""
    config = ModelConfig.from_dict(TINY)
    save_hf(random_params(config, seed=2), TINY, tmp_path / "hf")
    assert run(convert, "--model", str(tmp_path / "hf"), "--out", str(tmp_path / "out")) == 0
    ours = load_params(tmp_path / "out", config, dtype="bfloat16")
    assert_same(ours, load_params(tmp_path / "hf", config, dtype="bfloat16"))


def test_quantised_weights_are_dequantised_exactly(tmp_path):
    write_quantised(tmp_path / "hf", MXFP4)
    config = ModelConfig.from_directory(tmp_path / "hf")
    assert run(convert, "--model", str(tmp_path / "hf"), "--out", str(tmp_path / "out")) == 0
    for dtype in (None, "float32"):
        ours = load_params(tmp_path / "out", config, dtype=dtype)
        assert_same(ours, load_params(tmp_path / "hf", config, dtype=dtype))


def test_one_identity(hf, converted):
    assert Checkpoint(converted).identity["model"] == Checkpoint(hf).identity["model"] | {
        "name": "out"
    }
    assert Checkpoint(converted).identity["tokenizer_sha256"] is not None
    assert (converted / "chat_template.jinja").read_text() == "{{ messages }}"
    assert not (converted / "model.onnx").exists()
    assert not list(converted.glob("*.safetensors"))


def test_a_recording_of_it_is_that_of_the_model(instrument, tmp_path, capsys):
    model, out = tmp_path / "model", tmp_path / "recording"
    assert run(convert, "--model", str(instrument.model), "--out", str(model)) == 0
    words = ["--model", str(model), "--out", str(out)]
    assert instrument.record(record, *words, "--only_check_args") == 0
    assert instrument.record(record, *words) == 0
    assert last_line(capsys)["identity"] == load_recording(instrument.reference).identity


@pytest.mark.parametrize("step", ["_checkpointed", "_end", "unlink"])
def test_interrupted_it_does_not_load_and_begins_anew(hf, tmp_path, monkeypatch, step):
    out, config = tmp_path / "out", ModelConfig.from_directory(hf)

    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if step == "_checkpointed":
            patch.setattr(writing, "stored_files", stop)
        elif step == "_end":
            patch.setattr(writing, "_end", stop)
        else:
            patch.setattr(Path, "unlink", stop)
        assert run(convert, "--model", str(hf), "--out", str(out)) == 3
    for read in (load_params, weights_sha256):
        with pytest.raises(UserError, match="interrupted"):
            read(out, config)
    assert run(convert, "--model", str(hf), "--out", str(out)) == 0
    assert weights_sha256(out) == weights_sha256(hf)


def test_damaged_files_are_named(converted, tmp_path):
    out = tmp_path / "damaged"
    shutil.copytree(converted, out)
    largest = max((out / "params").rglob("*"), key=lambda p: p.stat().st_size * p.is_file())
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    with pytest.raises(UserError, match="1 of its files differ.*params/"):
        weights_sha256(out)
    largest.unlink()
    with pytest.raises(UserError, match="1 files are missing"):
        load_params(out, ModelConfig.from_directory(out))


def test_another_config_is_refused(converted, tmp_path):
    out = tmp_path / "other"
    shutil.copytree(converted, out)
    text = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(text | {"vocab_size": 41}))
    with pytest.raises(UserError, match="not those that config.json demands"):
        load_params(out, ModelConfig.from_directory(out))


def test_what_is_there_is_not_touched(hf, converted, tmp_path, capsys):
    before = weights_sha256(converted)
    assert run(convert, "--model", str(hf), "--out", str(converted)) == 3
    assert "--overwrite" in capsys.readouterr().err
    assert weights_sha256(converted) == before
    (tmp_path / "mine.txt").write_text("mine")
    assert run(convert, "--model", str(hf), "--out", str(tmp_path)) == 3
    assert "holds no converted checkpoint" in capsys.readouterr().err
    assert run(convert, "--model", str(hf), "--out", str(hf)) == 3
    assert "own directory" in capsys.readouterr().err
    model = write_checkpoint(tmp_path / "other", **LAYERS)
    shutil.copytree(converted, tmp_path / "replaced")
    words = ["--model", str(model), "--out", str(tmp_path / "replaced"), "--overwrite"]
    assert run(convert, *words) == 0
    assert weights_sha256(tmp_path / "replaced") == weights_sha256(model)

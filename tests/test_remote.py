"""Models in a bucket or on the hub: fetched as they are read, once, and never half believed.

fsspec's memory file system stands for a bucket, a local HTTP server for the hub.
"""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import fsspec
import numpy as np
import pytest
from instrument import last_line, run
from tiny import make_corpus
from tiny_checkpoints import TINY

from kernjax import record
from kernjax.base import remote
from kernjax.base.errors import UserError
from kernjax.base.resources import model_directory
from kernjax.model.config import ModelConfig
from kernjax.model.params import leaves, random_params
from kernjax.texts import write_corpus
from kernjax.weights import load_params, open_checkpoint, save_hf, weights_sha256

BLOCK = 512
URL = "memory://bucket/tiny"
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def hf(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hf") / "tiny"
    save_hf(random_params(ModelConfig.from_dict(TINY), seed=1, dtype="bfloat16"), TINY, folder)
    (folder / "tokenizer.json").write_text('{"model": "not read here"}')
    (folder / "picture.png").write_bytes(b"not fetched")
    return folder


class Bucket:
    """The memory file system, and what was asked of its weight files: (name, begin, end)."""

    def __init__(self, monkeypatch) -> None:
        self.files = fsspec.filesystem("memory")
        self.asked: list[tuple[str, int, int]] = []
        self.failures: list[Exception] = []
        read = self.files.cat_file

        def cat_file(path, start=None, end=None):
            if path.endswith(".safetensors"):
                self.asked.append((path.rpartition("/")[2], start, end))
                if self.failures:
                    raise self.failures.pop(0)
            return read(path, start=start, end=end)

        monkeypatch.setattr(self.files, "cat_file", cat_file)

    def fill(self, folder: Path) -> None:
        for path in folder.iterdir():
            self.files.pipe_file(f"/bucket/tiny/{path.name}", path.read_bytes())


@pytest.fixture
def bucket(hf, tmp_path, monkeypatch):
    monkeypatch.setenv("KERNJAX_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "BLOCK", BLOCK)
    monkeypatch.setattr(remote, "_PAUSES_S", (0.0, 0.0))
    monkeypatch.setitem(remote._EXTRAS, "memory", "none")
    bucket = Bucket(monkeypatch)
    bucket.fill(hf)
    yield bucket
    bucket.files.rm("/bucket", recursive=True)


def test_the_same_bits_and_only_what_is_read(hf, bucket):
    staged = model_directory(URL)
    assert staged.name == "tiny" and not (staged / "picture.png").exists()
    assert (staged / "tokenizer.json").read_bytes() == (hf / "tokenizer.json").read_bytes()
    assert bucket.asked == []
    tensors = open_checkpoint(staged).tensors
    start = min(entry.begin for entry in tensors.values())
    assert max(end for _, _, end in bucket.asked) < start + BLOCK, "more than the header"

    bucket.asked.clear()
    entry = max(tensors.values(), key=lambda entry: entry.nbytes)
    half = entry.rows(0, entry.shape[0] // 2)
    here = open_checkpoint(hf).tensors[entry.name].rows(0, entry.shape[0] // 2)
    np.testing.assert_array_equal(half.array(), here.array())
    for _, begin, end in bucket.asked:
        assert begin > half.begin - BLOCK and end < half.end + BLOCK

    config = ModelConfig.from_directory(staged)
    ours, theirs = (dict(leaves(load_params(folder, config))) for folder in (staged, hf))
    for path, leaf in theirs.items():
        assert np.asarray(ours[path]).tobytes() == np.asarray(leaf).tobytes(), path
    assert weights_sha256(staged) == weights_sha256(hf)
    # Every byte came once; another process, or this one again, asks for nothing.
    covered = sorted((begin, end) for _, begin, end in bucket.asked)
    assert all(end <= begin for (_, end), (begin, _) in zip(covered, covered[1:], strict=False))
    bucket.asked.clear()
    remote._staged.clear()
    assert model_directory(URL) == staged
    load_params(staged, config)
    assert bucket.asked == []


def test_a_failure_is_tried_again_and_then_named(bucket):
    config = ModelConfig.from_directory(model_directory(URL))
    bucket.failures = [OSError("connection reset"), TimeoutError("slow")]
    staged = model_directory(URL)
    bucket.asked.clear()
    open_checkpoint(staged)
    assert bucket.asked[0] == bucket.asked[1] == bucket.asked[2]
    bucket.failures = [OSError("connection reset")] * 999  # whichever thread asks
    with pytest.raises(UserError, match="Could not read memory://bucket/tiny/model.*reset"):
        load_params(staged, config)
    bucket.failures = [PermissionError("not yours")]
    with pytest.raises(UserError, match="PermissionError: not yours.*credentials"):
        load_params(staged, config)
    load_params(staged, config)


def test_what_is_not_marked_is_not_believed(bucket):
    """Killed between the bytes and their mark, or before both: fetched again."""
    staged = model_directory(URL)
    config = ModelConfig.from_directory(staged)
    load_params(staged, config)
    (weights,) = staged.glob("*.safetensors")
    marks = staged.parent / "fetched" / weights.name
    held = bytearray(marks.read_bytes())
    whole = weights.read_bytes()
    held[2] = held[5] = 0
    marks.write_bytes(held)
    weights.write_bytes(whole[: 2 * BLOCK] + bytes(BLOCK) + whole[3 * BLOCK :])
    bucket.asked.clear()
    remote.fetch(weights)
    assert [(begin, end) for _, begin, end in sorted(bucket.asked)] == [
        (2 * BLOCK, 3 * BLOCK), (5 * BLOCK, 6 * BLOCK)
    ]  # fmt: skip
    assert weights.read_bytes() == whole


def test_files_that_changed_make_another_directory(hf, bucket):
    first = model_directory(URL)
    bucket.files.pipe_file("/bucket/tiny/tokenizer.json", b"{}")
    second = model_directory(URL)
    assert second != first and (second / "tokenizer.json").read_bytes() == b"{}"
    assert (first / "tokenizer.json").read_bytes() != b"{}"


def test_an_index_that_leaves_the_directory(bucket):
    index = {"weight_map": {"embed": "../../secret/model.safetensors"}}
    bucket.files.rm("/bucket/tiny/model.safetensors")
    bucket.files.pipe_file(f"/bucket/tiny/{INDEX}", json.dumps(index).encode())
    with pytest.raises(UserError, match="outside the model directory"):
        open_checkpoint(model_directory(URL))
    assert bucket.asked == []


def test_addresses_that_cannot_be_read(bucket):
    with pytest.raises(UserError, match="not read from ftp://.*gs:// or hf://"):
        model_directory("ftp://host/model")
    with pytest.raises(UserError, match="Could not list memory://bucket/nothing"):
        model_directory("memory://bucket/nothing")
    bucket.files.pipe_file("/bucket/tiny/kernjax.json", b"{}")
    with pytest.raises(UserError, match="converted checkpoint.*Mount it"):
        model_directory(URL)


def test_without_what_reads_it_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(UserError, match=r"extra `gs`.*pip install 'kernjax\[gs\]'"):
        model_directory("gs://bucket/model")


def test_a_command_takes_an_address(bucket, tmp_path, capsys):
    corpus = write_corpus(make_corpus({24: 1}, score_len=4), tmp_path / "corpus")
    words = [f"--corpus={corpus}", f"--out={tmp_path / 'out'}", "--only_check_args"]
    assert run(record, f"--model={URL}", *words) == 0
    assert last_line(capsys)["checked"]
    assert run(record, "--model=memory://bucket/nothing", *words) == 3


class Hub(http.server.BaseHTTPRequestHandler):
    """What huggingface_hub asks of a model's repository `org/tiny`, its files from `folder`."""

    folder: Path
    ranges: list[str]
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer([])  # paths-info: of the directory itself

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/org/tiny/tree/"):
            files = sorted(self.folder.iterdir())
            self.answer(
                [
                    {
                        "type": "file",
                        "path": f.name,
                        "size": f.stat().st_size,
                        "oid": f"oid-{f.name}",
                    }
                    for f in files
                ]
            )
        elif path.startswith("/api/models/org/tiny"):
            self.answer({"id": "org/tiny", "sha": "0" * 40, "siblings": [], "tags": []})
        elif path.startswith("/org/tiny/resolve/"):
            data = (self.folder / path.rpartition("/")[2]).read_bytes()
            asked = self.headers.get("Range")
            if asked:
                self.ranges.append(asked)
                first, last = asked.removeprefix("bytes=").split("-")
                data = data[int(first) : int(last) + 1]
            self.send(206 if asked else 200, data, "application/octet-stream")
        else:
            self.send(404, b"{}", "application/json")

    def answer(self, value: object) -> None:
        self.send(200, json.dumps(value).encode(), "application/json")

    def send(self, status: int, data: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("X-Repo-Commit", "0" * 40)
        self.send_header("ETag", '"x"')
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


FROM_HUB = """
import sys
from kernjax.base.resources import model_directory
from kernjax.weights import weights_sha256
staged = model_directory("hf://org/tiny")
print(staged.name, weights_sha256(staged))
"""


def test_the_hub(hf, tmp_path):
    """By huggingface_hub's own client, in a process of its own: its address is read at import."""
    pytest.importorskip("huggingface_hub")
    handler = type("Handler", (Hub,), {"folder": hf, "ranges": []})
    server = http.server.ThreadingHTTPServer(("localhost", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        done = subprocess.run(
            [sys.executable, "-c", FROM_HUB],
            env=os.environ
            | {
                "HF_ENDPOINT": f"http://localhost:{server.server_port}",
                "HF_HOME": str(tmp_path / "hub"),
                "KERNJAX_CACHE_DIR": str(tmp_path / "cache"),
                "PYTHONPATH": str(Path(__file__).resolve().parents[1]),
                "JAX_PLATFORMS": "cpu",
                "NO_PROXY": "localhost",
            },
            capture_output=True,
            text=True,
            timeout=200,
        )
    finally:
        server.shutdown()
        server.server_close()
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["tiny", weights_sha256(hf)]
    assert handler.ranges

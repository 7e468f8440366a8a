"""Made-up but consistent recordings for the tests of kernjax.recording."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from kernjax.recording import RecordingWriter, build_manifest

VOCAB = 300


def make_manifest(**changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "model": {
            "name": "tiny",
            "weights_sha256": "a" * 64,
            "config_sha256": "b" * 64,
            "vocab_size": VOCAB,
        },
        "tokenizer_sha256": "c" * 64,
        "corpus": {"name": "demo", "sha256": "d" * 64},
        "policy": {"name": "f32", "text": "f32", "fields": {}},
        "versions": {"jax": "0.10.2"},
        "device": "cpu",
        "mesh": {"data": 1},
        "batch_size": 4,
        "prefill_window": 2048,
        "commit": "0123abc",
    }
    return build_manifest(**{**fields, **changes})


def make_segments(count: int = 4, rows: int = 7) -> list[dict[str, Any]]:
    """Ragged: segment i has `rows + i % 3` rows, the first two of them in the prefill."""
    return [
        {
            "id": f"{'code' if i % 2 else 'prose'}-{i}",
            "kind": "code" if i % 2 else "prose",
            "context_len": 64 * (1 + i % 2),
            "score_len": rows + 3,
            "documents": (0, 10),
            "rows": rows + i % 3,
        }
        for i in range(count)
    ]


def make_rows(segment: dict[str, Any], seed: int = 0, k: int = 20) -> dict[str, np.ndarray]:
    """Rows of a producer scored at its own top ids: logits of a Zipf-like vocabulary."""
    digest = hashlib.sha256(f"{segment['id']} {seed}".encode()).digest()
    rng = np.random.default_rng(int.from_bytes(digest[:8], "big"))
    n, context = segment["rows"], segment["context_len"]
    logits = rng.normal(0, 3, (n, VOCAB)).astype(np.float64)
    order = np.argsort(-logits, axis=1)[:, : k + 1]
    logprobs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    top, rest = order[:, :k], np.exp(logprobs)
    target = rng.integers(0, VOCAB, n)
    every = np.arange(n)
    np.put_along_axis(rest, top, 0.0, axis=1)
    top_logprobs = np.take_along_axis(logprobs, top, 1)
    phase = (every >= 2).astype(np.uint8)
    return {
        "pos": (context - 2 + every).astype(np.int32),
        "phase": phase,
        "top_ids": top.astype(np.int32),
        "top_logprobs": top_logprobs.astype(np.float32),
        "tail_logprob": np.log(rest.sum(1)).astype(np.float32),
        "target_ids": target.astype(np.int32),
        "target_logprobs": logprobs[every, target].astype(np.float32),
        "top1_ids": top[:, 0].astype(np.int32),
        "margins": (top_logprobs[:, 0] - top_logprobs[:, 1]).astype(np.float32),
    }


def record(
    path: Path | str, count: int = 4, rows: int = 7, seed: int = 0, **changes: Any
) -> list[dict[str, np.ndarray]]:
    """Writes a whole recording; returns the rows of its segments."""
    segments = make_segments(count, rows)
    manifest = make_manifest(**changes)
    writer = RecordingWriter.create(path, manifest, segments)
    written = [make_rows(segment, seed, manifest["top_k"]) for segment in segments]
    for index, arrays in enumerate(written):
        writer.write(index, arrays)
    writer.finish()
    return written


def tree(path: Path) -> dict[str, str]:
    """Relative name -> SHA-256 of every file below a directory."""
    return {
        str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(path.rglob("*"))
        if file.is_file()
    }

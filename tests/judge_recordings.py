"""Synthetic recordings and comparisons with known content, for the tests of judge and reporting."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from kernjax.recording import Recording, build_manifest
from kernjax.recording.manifest import complete_manifest

VOCAB = 64
K = 20


def manifest(**changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "model": {"name": "tiny", "weights_sha256": "a", "config_sha256": "b", "vocab_size": VOCAB},
        "tokenizer_sha256": "c",
        "corpus": {"name": "words", "sha256": "d"},
        "policy": {"name": "f32", "text": "f32", "fields": {}},
        "prefill_window": 32,
    }
    return build_manifest(**{**fields, **changes})


def segments(
    per_cell: int = 2, contexts: tuple[int, ...] = (64, 128), steps: int = 6, rescore: bool = True
) -> list[dict[str, Any]]:
    """Two kinds; a segment scores two rows after the window's edge, the last and `steps` twice."""
    rows = 3 + steps * (2 if rescore else 1)
    return [
        {"id": f"{kind}-{context}-{i}", "kind": kind, "context_len": context, "score_len": steps,
         "documents": [0], "rows": rows}
        for kind in ("code", "prose")
        for context in contexts
        for i in range(per_cell)
    ]  # fmt: skip


def logits_of(parts: list[dict[str, Any]], seed: int = 0) -> np.ndarray:
    """[rows, VOCAB] float64 logits; a rescored row is its decode row once more."""
    rng = np.random.default_rng(seed)
    blocks = []
    for part in parts:
        steps = part["score_len"]
        block = rng.normal(0, 2, (3 + steps, VOCAB))
        twice = part["rows"] > 3 + steps
        blocks.append(np.concatenate([block, block[3:]]) if twice else block)
    return np.concatenate(blocks)


def recording(
    parts: list[dict[str, Any]],
    logits: np.ndarray,
    reference: Recording | None = None,
    path: str = "reference",
    **changes: Any,
) -> Recording:
    """The recording of these logits: at their own top ids, or at those of `reference`."""
    pos, phase, segment = [], [], []
    for index, part in enumerate(parts):
        context, steps = part["context_len"], part["score_len"]
        decode = np.arange(context, context + steps)
        twice = part["rows"] > 3 + steps
        pos += [32, 33, context - 1, *decode, *(decode if twice else [])]
        phase += [0] * 3 + [1] * steps + [2] * steps * twice
        segment += [index] * part["rows"]
    logprobs = logits - np.log(np.sum(np.exp(logits), axis=1, keepdims=True))
    order = np.argsort(-logits, axis=1, kind="stable")
    ids = order[:, :K] if reference is None else reference.top_ids
    rest = np.exp(logprobs)
    np.put_along_axis(rest, ids, 0.0, axis=1)
    target = np.arange(len(logits)) % VOCAB
    top = np.take_along_axis(logits, order[:, :2], 1)
    identity = None if reference is None else reference.identity
    full = complete_manifest(manifest(reference=identity, **changes), parts)
    return Recording(
        path=path,
        identity=f"identity of {path}",
        manifest=full,
        segment=np.array(segment, np.int32),
        pos=np.array(pos, np.int32),
        phase=np.array(phase, np.uint8),
        top_ids=ids.astype(np.int32),
        top_logprobs=np.take_along_axis(logprobs, ids, 1).astype(np.float32),
        tail_logprob=np.log(rest.sum(1)).astype(np.float32),
        target_ids=target.astype(np.int32),
        target_logprobs=logprobs[np.arange(len(target)), target].astype(np.float32),
        top1_ids=order[:, 0].astype(np.int32),
        margins=(top[:, 0] - top[:, 1]).astype(np.float32),
    )


def pair(noise: float = 0.01, seed: int = 1, **changes: Any) -> tuple[Recording, Recording]:
    """A reference and a candidate whose logits differ by Gaussian noise."""
    parts = segments()
    logits = logits_of(parts)
    reference = recording(parts, logits)
    rng = np.random.default_rng(seed)
    noisy = logits + rng.normal(0, noise, logits.shape)
    return reference, recording(parts, noisy, reference, "candidate", **changes)


def changed(source: Recording, **arrays: np.ndarray) -> Recording:
    """A copy with other arrays."""
    return dataclasses.replace(source, **arrays)

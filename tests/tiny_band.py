"""A band for the tiny checkpoint, from one recorded run: its differences with other signs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from kernjax.judge import Band, calibrate
from kernjax.recording import Recording, load_recording


def write_band(reference: str | Path, run: str | Path, out: Path, count: int = 5) -> Band:
    """Saves a band whose normals err as much as `run` does, row by row, each in its own way.

    To second order KL does not see the sign of a logit error: reversed at random rows it gives a
    producer of the same size that shares no errors with the others.
    """
    truth, actual = load_recording(reference), load_recording(run)
    rng = np.random.default_rng(3)
    # By row and id, or two of them would be one in many rows, which calibrate refuses.
    cells = len(truth), truth.top_ids.shape[1] + 1
    factors = [
        rng.choice([-1.0, 1.0], cells) * (1 + 0.02 * rng.standard_normal()) for _ in range(count)
    ]
    band = calibrate(truth, [variant(truth, actual, f, str(i)) for i, f in enumerate(factors)])
    band.save(out)
    return band


def variant(truth: Recording, actual: Recording, sign: np.ndarray, name: str) -> Recording:
    """A recording whose errors are `sign` times those of `actual`: [R], or [R, K + 1] with the
    tail's last."""
    by_name = {"top_logprobs": sign, "tail_logprob": sign, "target_logprobs": sign}
    if sign.ndim == 2:
        tail = sign[:, -1]
        by_name = {"top_logprobs": sign[:, :-1], "tail_logprob": tail, "target_logprobs": tail}
    raw = {
        name: getattr(truth, name)
        + factor.reshape(*factor.shape, *[1] * (getattr(truth, name).ndim - factor.ndim))
        * (getattr(actual, name).astype(np.float64) - getattr(truth, name))
        for name, factor in by_name.items()
    }
    total = np.logaddexp(np.logaddexp.reduce(raw["top_logprobs"], axis=1), raw["tail_logprob"])
    raw["top_logprobs"] -= total[:, None]
    raw["tail_logprob"] -= total
    # The other columns are those of the changed distribution, as in any recording.
    raw["top_logprobs"] = raw["top_logprobs"].astype(np.float32)
    best = np.argmax(raw["top_logprobs"], axis=1)[:, None]
    ordered = np.sort(raw["top_logprobs"], axis=1)
    raw["margins"] = ordered[:, -1] - ordered[:, -2]
    is_target = truth.top_ids == truth.target_ids[:, None]
    listed = np.where(is_target, raw["top_logprobs"], -np.inf).max(axis=1)
    raw["target_logprobs"] = np.where(
        is_target.any(axis=1), listed, np.minimum(raw["target_logprobs"], raw["tail_logprob"])
    )
    manifest = {**actual.manifest, "policy": {"name": "x", "text": f"variant {name}"}}
    return dataclasses.replace(
        actual,
        path=f"variant {name}",
        manifest=manifest,
        top1_ids=np.take_along_axis(truth.top_ids, best, axis=1)[:, 0],
        **{name: values.astype(np.float32) for name, values in raw.items()},
    )

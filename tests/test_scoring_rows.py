"""A scored row against NumPy in float64: top-20, tail, target, top-1 and margin, ties and NaN."""

from __future__ import annotations

import numpy as np
import pytest

from kernjax.scoring.rows import TOP_K, score_rows


def _expected(logits: np.ndarray, target: int, ids: np.ndarray) -> dict[str, np.ndarray]:
    wide = logits.astype(np.float64)
    logprobs = wide - np.log(np.exp(wide).sum())
    order = np.lexsort((np.arange(len(wide)), -wide))  # ties by lower id
    return {
        "top_logprobs": logprobs[ids],
        "tail_logprob": np.log(np.exp(np.delete(logprobs, ids)).sum()),
        "target_logprobs": logprobs[target],
        "top1_ids": order[0],
        "margins": wide[order[0]] - wide[order[1]],
    }


def _logits() -> np.ndarray:
    """[3, 50]: without ties, two equal leaders, all equal."""
    logits = np.random.default_rng(0).standard_normal((3, 50)).astype(np.float32) * 3
    logits[1, [31, 7]] = logits[1].max() + 1
    logits[2] = 0.5
    return logits


@pytest.mark.parametrize("given", [False, True])
def test_rows_are_numpys(given):
    logits, targets = _logits(), np.array([3, 31, 49], np.int32)
    own = np.argsort(-logits, axis=-1, kind="stable")[:, :TOP_K].astype(np.int32)
    ids = np.tile(np.arange(5, 5 + TOP_K, dtype=np.int32), (3, 1)) if given else own
    rows = score_rows(logits, targets, ids if given else None)
    np.testing.assert_array_equal(rows["top_ids"], ids)
    for row in range(3):
        for name, value in _expected(logits[row], targets[row], ids[row]).items():
            np.testing.assert_allclose(rows[name][row], value, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("given", [False, True])
def test_nan_is_not_hidden(given):
    logits = _logits()
    logits[0, 20] = np.nan
    ids = np.tile(np.arange(TOP_K, dtype=np.int32), (3, 1))
    rows = score_rows(logits, np.zeros(3, np.int32), ids if given else None)
    for name in ("top_logprobs", "tail_logprob", "target_logprobs", "margins"):
        assert np.isnan(rows[name][0]).any(), name
        assert np.isfinite(rows[name][1:]).all(), name

"""The log-sum-exp that attention returns, and keys in parts merged by it, against NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import attention
from pallas_kernels.attention import AttentionFormats
from pallas_kernels.formats import Format

NAMES = ("reference", "xla", "mosaic_tpu_interpret")
B, T, N, G, H, HV, S = 2, 5, 4, 2, 16, 8, 48
OFFSET, LENGTH = np.array([20, 7], np.int32), np.array([25, 12], np.int32)
SCALE, K_SCALE = 0.3, 2.0


def draw() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q, k, v; the slots that are not in use are NaN."""
    rng = np.random.default_rng(0)
    q, k, v = (
        rng.standard_normal(shape).astype(np.float32)
        for shape in ((B, T, N, H), (B, S, G, H), (B, S, G, HV))
    )
    for row, length in enumerate(LENGTH):
        k[row, length:] = v[row, length:] = np.nan
    return q, k, v


def call(op, q, k, v, offset, length, name, formats=AttentionFormats()):  # noqa: B008 - frozen
    def both(q, k, v, offset, length):
        return op(
            q, k, v, q_offset=offset, kv_length=length, scale=SCALE, k_scale=K_SCALE,
            formats=formats, implementation=name, return_lse=True,
        )  # fmt: skip

    offset, length = (np.asarray(x, np.int32) for x in (offset, length))
    return tuple(map(np.asarray, jax.jit(both)(q, k, v, offset, length)))


def wanted(q, k, v) -> tuple[np.ndarray, np.ndarray]:
    """Outputs [B, T, N, Hv] and lse [B, T, N], float64, one query after another."""
    out, lse = np.zeros((B, T, N, HV)), np.zeros((B, T, N))
    for b, t, n in np.ndindex(B, T, N):
        seen, head = min(OFFSET[b] + t + 1, LENGTH[b]), n // (N // G)
        keys = k[b, :seen, head].astype(np.float64) * K_SCALE
        e = np.exp(SCALE * (keys @ q[b, t, n].astype(np.float64)))
        out[b, t, n] = e @ v[b, :seen, head] / e.sum()
        lse[b, t, n] = np.log(e.sum())
    return out, lse


@pytest.mark.parametrize("name", NAMES)
def test_lse_and_outputs(name):
    q, k, v = draw()
    out, lse = call(attention.prefill, q, k, v, OFFSET, LENGTH, name)
    want, want_lse = wanted(q, k, v)
    np.testing.assert_allclose(lse, want_lse, atol=2e-6)
    np.testing.assert_allclose(out, want, atol=2e-6)
    plain = attention.prefill(
        q, k, v, q_offset=jnp.asarray(OFFSET), kv_length=jnp.asarray(LENGTH), scale=SCALE,
        k_scale=K_SCALE, implementation=name,
    )  # fmt: skip
    np.testing.assert_allclose(out, plain, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("op", [attention.prefill, attention.decode], ids=["prefill", "decode"])
def test_parts_of_the_keys_merge_to_all(op, name):
    """Four parts of twelve slots: whole, cut by the diagonal, and without any key."""
    q, k, v = draw()
    parts = []
    for first in range(0, S, 12):
        part = slice(first, first + 12)
        parts.append(
            call(op, q, k[:, part], v[:, part], OFFSET - first, LENGTH - first, name)
        )  # fmt: skip
    outs, lses = (np.stack(x).astype(np.float64) for x in zip(*parts, strict=True))
    assert np.isneginf(lses[3]).all() and not outs[3].any()
    assert np.isneginf(lses[1][1]).all(), "12 keys of the second row lie in the first part"
    weights = np.exp(lses - lses.max(0))
    merged = (weights[..., None] * outs).sum(0) / weights.sum(0)[..., None]
    np.testing.assert_allclose(merged, wanted(q, k, v)[0], atol=2e-6)


@pytest.mark.parametrize("name", NAMES)
def test_scaled_and_rounded_probabilities(name):
    """P on e4m3's scaled grid: the sum of the rounded P, in units that do not know the scale."""
    q, k, v = draw()
    formats = AttentionFormats(p=Format.parse("e4m3*448"), row_sum="rounded", block_k=S)
    lse = call(attention.prefill, q, k, v, OFFSET, LENGTH, name, formats)[1]
    want = wanted(q, k, v)[1]
    off = np.abs(lse - want)
    assert 1e-5 < off.max() < 2**-4, "rounded by at most half a step of e4m3"

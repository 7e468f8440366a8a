"""What a run leaves behind, the same for both sides, as NumPy arrays, and how two are compared."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Cached:
    """What a model keeps between calls, in kernjax's layout, float32.

    keys, values [full layers, B, S, G, H]; conv [linear layers, B, kernel - 1, C]; state
    [linear layers, B, Hv, K, V].
    """

    keys: np.ndarray
    values: np.ndarray
    conv: np.ndarray
    state: np.ndarray


PARTS = tuple(field.name for field in dataclasses.fields(Cached))


@dataclasses.dataclass(frozen=True)
class Trace:
    """One prefill of C tokens (in windows or whole) and D tokens decoded through the cache.

    logits float32 [B, C + D, vocab]; hidden float32 [layers, B, C, D]: the residual stream after
    every layer of prefill.
    """

    logits: np.ndarray
    hidden: np.ndarray
    after_prefill: Cached
    after_decode: Cached

    @property
    def context_len(self) -> int:
        return self.hidden.shape[2]


@dataclasses.dataclass(frozen=True)
class Difference:
    """Largest absolute differences of two traces; `hidden` by layer, `cached` by part."""

    prefill: float
    decode: float
    hidden: tuple[float, ...]
    cached: dict[str, float]

    @property
    def logits(self) -> float:
        return max(self.prefill, self.decode)

    @property
    def state(self) -> float:
        """Over everything that is kept between calls, after prefill and after decode."""
        return max(self.cached.values())


def difference(a: Trace, b: Trace) -> Difference:
    """ValueError where shapes differ; NaN on either side gives NaN."""
    at = a.context_len
    return Difference(
        prefill=_largest(a.logits[:, :at], b.logits[:, :at]),
        decode=_largest(a.logits[:, at:], b.logits[:, at:]),
        hidden=tuple(_largest(x, y) for x, y in zip(a.hidden, b.hidden, strict=True)),
        cached={
            f"{part} after {when}": _largest(
                getattr(getattr(a, f"after_{when}"), part),
                getattr(getattr(b, f"after_{when}"), part),
            )
            for when in ("prefill", "decode")
            for part in PARTS
        },
    )


def kl(p_logits: np.ndarray, q_logits: np.ndarray) -> np.ndarray:
    """KL(p || q) over the whole vocabulary, float64 [...], of logits [..., vocab]."""
    p, q = _log_softmax(p_logits), _log_softmax(q_logits)
    return np.sum(np.exp(p) * (p - q), axis=-1)


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def _largest(a: np.ndarray, b: np.ndarray) -> float:
    if a.shape != b.shape:
        raise ValueError(f"shapes differ: {a.shape} and {b.shape}")
    return float(np.max(np.abs(a - b))) if a.size else 0.0

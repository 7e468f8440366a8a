"""KL by context depth of P formats alone, on float32: one prefill of long passages a format."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from kernjax.experiments.attention import OP, STOCHASTIC, settings_of
from kernjax.experiments.prefill import prefill
from kernjax.judge import metrics
from kernjax.model import capacity_for
from kernjax.plugins import Kernel
from kernjax.precision import Policy, parse_policy
from kernjax.precision.policy import apply
from kernjax.scoring.producer import Checkpoint, JaxProducer

TAIL = 64
"""Scored positions before the end of every window."""


@dataclasses.dataclass(frozen=True)
class Drift:
    """kl [formats, B, windows, tail] over the whole vocabulary, against float32; nats, float64."""

    formats: tuple[str, ...]
    depths: tuple[int, ...]
    kl: np.ndarray


def measure(
    checkpoint: Checkpoint,
    formats: Sequence[str],
    tokens: np.ndarray,
    window: int,
    announce: Callable[[str, float], None] = lambda name, kl: None,
) -> Drift:
    """KL of float32 with P in each of `formats` (as `attention.op_with` names them) to float32.

    tokens int32 [B, T], prefilled in windows of `window`. `announce` is told each format's mean KL
    at the last window, when it is done.
    """
    truth_policy = parse_policy(f"f32,prefill_window={window}")

    def logprobs(policy: Policy, kernels: dict[str, Kernel]) -> np.ndarray:
        """float64 [B, windows, tail, V]"""
        producer = JaxProducer(checkpoint, policy, kernels)
        _, scores = prefill(producer, tokens, capacity_for(tokens.shape[1]), TAIL)
        whole = np.stack([s for s in scores if s.shape[1] == TAIL], axis=1)
        return metrics.cells(whole.reshape(-1, whole.shape[-1])).reshape(whole.shape)

    truth = logprobs(truth_policy, {})
    found = []
    for name in formats:
        ours = logprobs(*_producer_of(name, truth_policy))
        kl = metrics.kl_divergence(*(x.reshape(-1, x.shape[-1]) for x in (truth, ours)))
        found.append(kl.reshape(truth.shape[:-1]))
        announce(name, float(found[-1][:, -1].mean()))
    depths = tuple(window * (i + 1) for i in range(truth.shape[1]))
    return Drift(tuple(formats), depths, np.stack(found))


def _producer_of(name: str, truth: Policy) -> tuple[Policy, dict[str, Kernel]]:
    if name in STOCHASTIC:
        label = f"kernjax.experiments.stochastic:{STOCHASTIC[name].__name__}"
        return truth, {OP: Kernel(OP, label, STOCHASTIC[name], "")}
    return apply(settings_of(name), truth), {}

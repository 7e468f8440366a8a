"""What rounding P does inside a model: the probability mass it loses, and the output's error.

The model runs as its policy says. At every attention layer and window an ear takes the last
queries and computes attention again, on the layer's own operands, with P in other formats:

- mass lost: 1 - sum(rounded P) / sum(P), read off by attending to values that are all 1;
- the output's error e against the same output o with P in float32, split along o:
  signed bias <e, o> / <o, o>, and noise |e - bias o| / |o|, what is left across it;
- the whole error |e| / |o|.

A row whose mass is lost evenly shrinks: its bias is minus the mass.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernjax.experiments import stochastic
from kernjax.experiments.prefill import prefill
from kernjax.model import capacity_for
from kernjax.plugins import Kernel
from kernjax.precision import Policy, parse_policy
from kernjax.precision.grammar import parse_setting
from kernjax.precision.policy import Setting, apply
from kernjax.scoring.producer import Checkpoint, JaxProducer
from pallas_kernels.attention import AttentionFormats
from pallas_kernels.formats import F32
from pallas_kernels.ops import OPS

OP = "attention.prefill"
Op = Callable[..., jax.Array]

STOCHASTIC = {
    "stochastic": stochastic.attention,
    "stochastic/rounded": stochastic.attention_rounded_sum,
}
"""P formats that are no `Format`; `/rounded`: row sums from the rounded P."""


@dataclasses.dataclass(frozen=True)
class Effect:
    """Measured at the end of every window; arrays [formats, layers, windows, B], float64.

    `layers` are the model's attention layers by number, `depths` the tokens before each end;
    `bias` is signed, `noise` its complement; a value is the mean over queries and heads.
    """

    formats: tuple[str, ...]
    layers: tuple[int, ...]
    depths: tuple[int, ...]
    lost: np.ndarray
    bias: np.ndarray
    noise: np.ndarray
    error: np.ndarray


def op_with(name: str, base: AttentionFormats) -> Op:
    """Attention with P in format `name` and all else as in `base`.

    `fp8*448`, `fp8/rounded` (row sums from the rounded P), or one of `STOCHASTIC`.
    """
    if name in STOCHASTIC:
        return functools.partial(_without_formats, STOCHASTIC[name], base)
    policy = apply(settings_of(name), dataclasses.replace(parse_policy("f32"), attention=base))
    return functools.partial(OPS[OP], formats=policy.attention)


def settings_of(name: str) -> list[Setting]:
    """What a policy sets for P in format `name`, `/rounded` behind it or not."""
    text, slash, row_sum = name.partition("/")
    written = [f"attention.p={text}"] + ([f"attention.row_sum={row_sum}"] if slash else [])
    return [parse_setting(setting) for setting in written]


def _without_formats(kernel: Op, base: AttentionFormats, *args: Any, **kwargs: Any) -> jax.Array:
    return kernel(*args, formats=base, **kwargs)


def measure(
    checkpoint: Checkpoint,
    policy: Policy,
    formats: tuple[str, ...],
    tokens: np.ndarray,
    window: int,
    queries: int = 32,
) -> Effect:
    """The effects of P in `formats` on int32 [B, T] under `policy`, in windows of `window`."""
    base = dataclasses.replace(policy.attention, p=F32, row_sum="unrounded")
    ops = {name: op_with(name, base) for name in formats}
    heard: list[np.ndarray] = []
    ear = Kernel(OP, "kernjax.experiments.attention:ear", _ear(ops, base, queries, heard), "")
    windowed = apply([parse_setting(f"prefill_window={window}")], policy)
    producer = JaxProducer(checkpoint, windowed, {OP: ear})
    prefill(producer, tokens, capacity_for(tokens.shape[1]))
    jax.effects_barrier()
    kinds = producer.config.layer_types
    layers = tuple(i for i, kind in enumerate(kinds) if kind == "full_attention")
    depths = tuple(min(s + window, tokens.shape[1]) for s in range(0, tokens.shape[1], window))
    # Calls come window by window, layer by layer: [windows * layers, measures, formats, B].
    found = np.asarray(heard, np.float64).reshape(len(depths), len(layers), 4, len(formats), -1)
    return Effect(formats, layers, depths, *np.moveaxis(found, (2, 3, 1, 0), (0, 1, 2, 3)))


def _ear(
    ops: Mapping[str, Op], base: AttentionFormats, queries: int, heard: list[np.ndarray]
) -> Op:
    """The healthy op, which measures `ops` on its last queries as they pass."""

    def ear(q: jax.Array, k: jax.Array, v: jax.Array, **keywords: Any) -> jax.Array:
        last = min(queries, q.shape[1])
        few = {name: value for name, value in keywords.items() if name != "formats"}
        few["q_offset"] = few["q_offset"] + (q.shape[1] - last)
        q_last = q[:, q.shape[1] - last :]
        truth = OPS[OP](q_last, k, v, formats=base, **few)
        ones, unscaled = jnp.ones((*v.shape[:3], 1), v.dtype), {**few, "v_scale": 1.0}
        found = [
            _effect(truth, op(q_last, k, v, **few), op(q_last, k, ones, **unscaled))
            for op in ops.values()
        ]
        seen = jnp.stack([jnp.stack(values) for values in zip(*found, strict=True)])
        jax.debug.callback(lambda values: heard.append(np.asarray(values)), seen, ordered=True)
        return OPS[OP](q, k, v, **keywords)

    return ear


def _effect(truth: jax.Array, out: jax.Array, kept: jax.Array) -> tuple[jax.Array, ...]:
    """Mass lost, bias, noise and error, each [B]: means over queries and heads of [B, T, N, H]."""
    error = out - truth
    size = jnp.maximum(jnp.sum(truth * truth, axis=-1), jnp.finfo(jnp.float32).tiny)
    bias = jnp.sum(error * truth, axis=-1) / size
    across = error - bias[..., None] * truth
    noise, whole = (jnp.sqrt(jnp.sum(e * e, axis=-1) / size) for e in (across, error))
    return tuple(jnp.mean(x, axis=(1, 2)) for x in (1 - kept[..., 0], bias, noise, whole))

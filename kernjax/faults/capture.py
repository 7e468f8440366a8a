"""Real inputs of the ops: one short run of the model with an ear at every door."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernjax.faults.inputs import Call
from kernjax.model import ModelConfig
from kernjax.plugins import Kernel
from kernjax.precision import Policy, parse_policy
from kernjax.scoring.batch import RowPlan
from kernjax.scoring.session import Session
from pallas_kernels.formats import round_to
from pallas_kernels.ops import OPS

DEEPEST = 2048
STEPS = 4
LAYERS = {"attention": "full_attention", "delta_rule": "linear_attention"}
"""The kind of layer that runs an op."""

_WINDOWS = 4


def capture(session: Session, policy: Policy) -> dict[str, list[Call]]:
    """Every call of every op in one prefill of four windows and a few decode steps.

    The deepest segments up to 2,048 tokens, one of each kind; all layers. Ops that the model's
    layers do not run have no calls.
    """
    heard: dict[str, list[Call]] = {op: [] for op in OPS}
    types = ModelConfig.from_directory(session.model).layer_types
    kernels = {
        op: Kernel(op, "kernjax.faults.capture:ear", _ear(op, heard), "")
        for op in OPS
        if LAYERS[op.partition(".")[0]] in types
    }
    contexts = [s.context_len for s in session.corpus.segments]
    context = max((c for c in contexts if c <= DEEPEST), default=min(contexts))
    first = {
        s.kind: s.tokens[: context + min(STEPS, s.score_len) + 1]
        for s in reversed(session.corpus.segments)
        if s.context_len == context
    }
    windowed = parse_policy(f"{policy},prefill_window={max(1, context // _WINDOWS)}")
    producer = session.producer(windowed, kernels)
    plan = RowPlan(np.array([context - 1], np.int32))
    producer.score(np.stack(list(first.values())), context, [plan] * len(first))
    jax.effects_barrier()
    return heard


def with_scales(calls: dict[str, list[Call]], policy: Policy) -> dict[str, list[Call]]:
    """The attention calls as a cache with the policy's scales would have made them."""
    kv = policy.kv_cache
    if kv.k_scale == kv.v_scale == 1.0:
        return calls

    def scaled(call: Call) -> Call:
        q, k, v = call.arguments
        k, v = (
            round_to(x.astype(jnp.float32) / s, fmt).astype(x.dtype)
            for x, s, fmt in ((k, kv.k_scale, kv.k), (v, kv.v_scale, kv.v))
        )
        keywords = call.keywords | {"k_scale": kv.k_scale, "v_scale": kv.v_scale}
        return Call((q, k, v), keywords)

    return {
        op: [scaled(call) for call in these] if op.startswith("attention.") else these
        for op, these in calls.items()
    }


def _ear(op: str, heard: dict[str, list[Call]]) -> Any:
    """The healthy op, whose inputs are kept on the host as they pass."""

    def ear(*arguments: jax.Array, **keywords: Any) -> Any:
        arrays = {k: v for k, v in keywords.items() if isinstance(v, jax.Array)}
        fixed = {k: v for k, v in keywords.items() if k not in arrays}
        keep = functools.partial(_keep, heard[op], fixed)
        jax.debug.callback(keep, arguments, arrays, ordered=True)
        return OPS[op](*arguments, **keywords)

    return ear


def _keep(into: list[Call], fixed: dict[str, Any], arguments: Any, arrays: Any) -> None:
    arguments = tuple(np.asarray(x) for x in arguments)
    into.append(Call(arguments, fixed | {k: np.asarray(v) for k, v in arrays.items()}))

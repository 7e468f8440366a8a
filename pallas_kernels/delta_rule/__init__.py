"""Gated delta rule, scalar gate (GDN) or gate per key channel (KDA)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.delta_rule import xla
from pallas_kernels.delta_rule.formats import DeltaRuleFormats as DeltaRuleFormats


def chunked(q, k, v, g, beta, initial_state=None, *, lengths=None, scale=None,
            formats=DeltaRuleFormats(), implementation=None):  # noqa: B008
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if initial_state is None:
        initial_state = jnp.zeros((q.shape[0], v.shape[2], q.shape[-1], v.shape[-1]), jnp.float32)
    return xla.chunked(q, k, v, g, beta, initial_state, lengths, scale, formats)


def recurrent(q, k, v, g, beta, state, *, lengths=None, scale=None,
              formats=DeltaRuleFormats(), implementation=None):  # noqa: B008
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return xla.recurrent(q, k, v, g, beta, state, lengths, scale, formats)

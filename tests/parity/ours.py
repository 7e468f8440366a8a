"""Our side of a trace: `kernjax.model` under a policy."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kernjax.model import (
    Cache,
    Decoder,
    Execution,
    forward,
    init_cache,
    logits,
    plan_execution,
    run_layer,
)  # fmt: skip
from kernjax.model.config import FULL, LINEAR
from kernjax.precision import parse_policy
from kernjax.scoring.producer import Checkpoint
from pallas_kernels.formats import BF16, from_bits, round_to

from .trace import Cached, Trace


class Model:
    """A checkpoint under a policy, with its compiled calls; `kernels` replace ops."""

    def __init__(self, directory: Path, policy: str, kernels: dict | None = None) -> None:
        parsed = parse_policy(policy)
        checkpoint = Checkpoint(directory)
        self.config = checkpoint.config
        self.decoder = Decoder(self.config, checkpoint.params(parsed.weights.dtype))
        self.execution = plan_execution(parsed, self.config.num_layers, kernels)
        graph, self._params = nnx.split(self.decoder)
        self._prefill = jax.jit(functools.partial(_call, graph, self.execution, False))
        self._decode = jax.jit(functools.partial(_call, graph, self.execution, True))

    def run(self, tokens: np.ndarray, context_len: int, window: int | None = None) -> Trace:
        """The trace of tokens int32 [B, C + D + 1]; a short last window is padded with token 0."""
        batch, total = tokens.shape
        window = window or context_len
        capacity = -(-context_len // window) * window + total - 1 - context_len
        cache = init_cache(self.config, self.execution, batch, capacity)
        scored, hidden = [], []
        for start in range(0, context_len, window):
            count = min(window, context_len - start)
            piece = np.zeros((batch, window), np.int32)
            piece[:, :count] = tokens[:, start : start + count]
            out, cache, captured = self._prefill(self._params, piece, cache, jnp.int32(count))
            scored.append(out[:, :count])
            hidden.append(captured[:, :, :count])
        after_prefill = _cached(cache, self.execution)
        for at in range(context_len, total - 1):
            piece = tokens[:, at : at + 1]
            out, cache, _ = self._decode(self._params, piece, cache, jnp.int32(1))
            scored.append(out)
        return Trace(
            logits=np.concatenate(scored, axis=1),
            hidden=np.concatenate(hidden, axis=2),
            after_prefill=after_prefill,
            after_decode=_cached(cache, self.execution),
        )

    def layers_on(self, tokens: np.ndarray, hidden: np.ndarray) -> list[tuple[str, np.ndarray]]:
        """(kind, output float32 [B, C, D]) of every layer, each on the input the other side had.

        tokens int32 [B, C] give the first layer's input, hidden [layers, B, C, D] the outputs of
        the other side, which are the next layers' inputs. So errors do not add up, and one layer's
        rounding is compared alone.
        """
        batch, time = tokens.shape
        stream = self.execution.top.activations
        embedded = np.asarray(round_to(self.decoder.embed[...][tokens], stream))
        graph, params = nnx.split(self.decoder)
        cache = init_cache(self.config, self.execution, batch, time)
        caches = {
            LINEAR: dataclasses.replace(cache, conv=cache.conv[:1], state=cache.state[:1]),
            FULL: dataclasses.replace(cache, keys=cache.keys[:1], values=cache.values[:1]),
        }

        @functools.partial(jax.jit, static_argnames=("stack", "plan"))
        def run(params, index, x, cache, stack, plan):
            execution = Execution(self.execution.top, (plan,))
            return run_layer(nnx.merge(graph, params), stack, index, x, cache, execution)[0]

        outputs = []
        for at, (kind, stack) in enumerate(
            zip(self.config.layer_types, self.config.layer_stacks, strict=True)
        ):
            index = jnp.int32(self.config.stacks[stack].index(at))
            x = jnp.asarray(hidden[at - 1] if at else embedded, stream.storage_dtype)
            y = run(params, index, x, caches[kind], stack, self.execution.layers[at])
            outputs.append((kind, np.asarray(round_to(y, stream))))
        return outputs


def eager_attention(
    q, k, v, *, q_offset, kv_length, scale=None, k_scale=1.0, v_scale=1.0, formats=None
):
    """Attention as the vendor's eager code rounds it in bf16: P after its division by the row sum.

    A kernel that sees one tile of keys at a time cannot do that, so our policies round P before.
    """
    del k_scale, v_scale, formats
    batch, tokens, heads, width = q.shape
    groups = k.shape[2]
    q = q.astype(jnp.float32).reshape(batch, tokens, groups, heads // groups, width)
    k, v = k.astype(jnp.float32), v.astype(jnp.float32)
    highest = jax.lax.Precision.HIGHEST
    scores = round_to(jnp.einsum("btgrh,bsgh->bgrts", q, k, precision=highest), BF16)
    scores = round_to(scores * (width**-0.5 if scale is None else scale), BF16)
    key = jnp.arange(k.shape[1])
    position = q_offset[:, None] + jnp.arange(tokens)
    visible = (key <= position[:, :, None]) & (key < kv_length[:, None, None])
    scores = jnp.where(visible[:, None, None], scores, -jnp.inf)
    p = round_to(jax.nn.softmax(scores, axis=-1), BF16)
    out = jnp.einsum("bgrts,bsgh->btgrh", p, v, precision=highest)
    return out.reshape(batch, tokens, heads, v.shape[-1])


EAGER_OPS = {"attention.prefill": eager_attention, "attention.decode": eager_attention}


def _call(graph, execution, decode, params, tokens, cache, count):
    decoder = nnx.merge(graph, params)
    hidden, cache, captured = forward(
        decoder, tokens, cache, execution, count=count, decode=decode,
        capture=jnp.arange(tokens.shape[1]),
    )  # fmt: skip
    return logits(decoder, hidden, execution), cache, captured.hidden


def _cached(cache: Cache, execution: Execution) -> Cached:
    length = int(cache.length)
    keys = execution.container(lambda policy: policy.kv_cache.k)
    values = execution.container(lambda policy: policy.kv_cache.v)
    conv = execution.container(lambda policy: policy.activations)
    return Cached(
        keys=np.asarray(from_bits(cache.keys, keys), np.float32)[:, :, :length],
        values=np.asarray(from_bits(cache.values, values), np.float32)[:, :, :length],
        conv=np.asarray(from_bits(cache.conv, conv), np.float32),
        state=np.asarray(cache.state, np.float32),
    )

"""Segments sampled by the model itself: prefixes it would really see, on any prompts."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kernjax.base.errors import UserError
from kernjax.model import Decoder, Execution, forward, init_cache, logits, plan_execution
from kernjax.precision import parse_policy
from kernjax.scoring.producer import Checkpoint
from kernjax.texts import Prompt, Segment

_STEPS = 256  # tokens a compiled call; between calls a terminal may interrupt


def sample_segments(
    directory: str | Path,
    prompts: Sequence[Prompt],
    *,
    context_len: int,
    score_len: int,
    temperature: float = 1.0,
    seed: int = 0,
    batch_size: int = 16,
) -> list[Segment]:
    """One segment a prompt: the prompt, continued by sampling to context_len + score_len + 1.

    Float32, at `temperature` (0: greedy), from the full vocabulary, so that the text has the
    model's own statistics. Each prompt has a random stream of its own (seed and position in the
    list): the batch size does not change what is drawn, up to rounding. Returns segments of kind
    `prompt.kind` and id `prompt.id`.
    """
    total = context_len + score_len + 1
    checkpoint = Checkpoint(directory)
    decoder = Decoder(checkpoint.config, checkpoint.params("float32"))
    vocab = decoder.config.vocab_size
    for prompt in prompts:
        if len(prompt.ids) and int(prompt.ids.max()) >= vocab:
            raise UserError(
                f"Prompt {prompt.id} has the id {int(prompt.ids.max())}.",
                f"The model's vocabulary has {vocab}.",
            )
    execution = plan_execution(parse_policy("f32"), decoder.config.num_layers)
    keys = jax.random.split(jax.random.key(seed), len(prompts))
    segments: list[Segment] = []
    for at in range(0, len(prompts), batch_size):
        batch = prompts[at : at + batch_size]
        tokens = _sample(
            decoder, execution, [p.ids for p in batch], keys[at : at + len(batch)], total,
            temperature,
        )  # fmt: skip
        segments += [
            Segment(prompt.id, prompt.kind, context_len, score_len, row)
            for prompt, row in zip(batch, tokens, strict=True)
        ]
    return segments


def _sample(
    decoder: Decoder,
    execution: Execution,
    prompts: Sequence[np.ndarray],
    keys: jax.Array,
    total: int,
    temperature: float,
) -> np.ndarray:
    """int32 [B, total]: every row starts with its prompt and goes on with drawn tokens.

    Prompts are fed token by token, like everything after them: rows of different prompt lengths
    then need no padding.
    """
    graph, params = nnx.split(decoder)
    given = np.zeros((len(prompts), total), np.int32)
    lengths = np.asarray([len(ids) for ids in prompts], np.int32)
    for row, ids in enumerate(prompts):
        given[row, : len(ids)] = ids[:total]
    cache = init_cache(decoder.config, execution, len(prompts), total)
    run = jax.jit(functools.partial(_steps, graph, execution, temperature), donate_argnums=1)
    token, pieces = jnp.asarray(given[:, 0]), [given[:, :1]]
    for start in range(0, total - 1, _STEPS):
        stop = min(start + _STEPS, total - 1)
        cache, token, drawn = run(
            params, cache, token, keys, jnp.asarray(given[:, start + 1 : stop + 1]),
            jnp.asarray(lengths), jnp.arange(start + 1, stop + 1),
        )  # fmt: skip
        pieces.append(np.asarray(drawn))
    return np.concatenate(pieces, axis=1)


def _steps(graph, execution, temperature, params, cache, token, keys, given, lengths, positions):
    """Feeds `token` [B] and on; position p of a row is given while p < its prompt's length."""
    decoder = nnx.merge(graph, params)

    def step(carry, inputs):
        cache, token = carry
        forced, position = inputs
        hidden, cache, _ = forward(decoder, token[:, None], cache, execution, decode=True)
        scores = logits(decoder, hidden[:, 0], execution)
        if temperature == 0:
            drawn = jnp.argmax(scores, axis=-1)
        else:
            at = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, position)
            drawn = jax.vmap(jax.random.categorical)(at, scores / temperature)
        token = jnp.where(position < lengths, forced, drawn.astype(jnp.int32))
        return (cache, token), token

    (cache, token), drawn = jax.lax.scan(step, (cache, token), (given.T, positions))
    return cache, token, drawn.T

"""One scored row: top-20 logprobs, tail, target, top-1 and margin of a distribution."""

from __future__ import annotations

import jax
import jax.numpy as jnp

TOP_K = 20


def score_rows(
    logits: jax.Array,
    targets: jax.Array,
    top_ids: jax.Array | None = None,
    *,
    full: bool = False,
) -> dict[str, jax.Array]:
    """Rows of logits float32 [..., V] with targets int32 [...], all float32 on the device.

    `top_ids` int32 [..., 20] are the reference's ids to score at; None takes the row's own top 20
    (descending, ties by lower id). The tail is the logsumexp over all other ids, not 1 - sum, so
    that it keeps its relative precision when it is tiny. `full` adds `logprobs` [..., V].
    """
    normaliser = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    if top_ids is None:
        leading, top_ids = jax.lax.top_k(logits, TOP_K)
        first, second, first_ids = leading[..., 0], leading[..., 1], top_ids[..., 0]
    else:
        # Without the sort of the whole vocabulary that a top_k is on a CPU.
        first, first_ids = jnp.max(logits, axis=-1), jnp.argmax(logits, axis=-1)
        is_first = jnp.arange(logits.shape[-1]) == first_ids[..., None]
        second = jnp.max(jnp.where(is_first, -jnp.inf, logits), axis=-1)
    top_logits = jnp.take_along_axis(logits, top_ids, axis=-1)
    is_top = jnp.any(jnp.arange(logits.shape[-1]) == top_ids[..., :, None], axis=-2)
    tail = jax.nn.logsumexp(jnp.where(is_top, -jnp.inf, logits), axis=-1)
    target_logits = jnp.take_along_axis(logits, targets[..., None], axis=-1)
    whole = {"logprobs": logits - normaliser} if full else {}
    return {
        **whole,
        "top_ids": top_ids.astype(jnp.int32),
        "top_logprobs": top_logits - normaliser,
        "tail_logprob": tail - normaliser[..., 0],
        "target_ids": targets.astype(jnp.int32),
        "target_logprobs": (target_logits - normaliser)[..., 0],
        "top1_ids": first_ids.astype(jnp.int32),
        "margins": first - second,
    }

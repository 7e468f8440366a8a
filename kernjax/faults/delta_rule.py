"""The delta rule with one fault each: accuracy bugs that inference kernels really had.

Each function stands in for `delta_rule.chunked`, `delta_rule.recurrent`, or both:

    python -m kernjax.check --kernel delta_rule.chunked=kernjax.faults.delta_rule:state_transposed

`**call` are the op's keywords (lengths, scale, formats). `catalogue.py` says where each bug was.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernjax.faults.delta_rule_form import (
    BLOCK,
    CHUNK,
    by_chunks,
    by_tokens,
    matmul,
    only_real,
    planted,
    solved,
)
from pallas_kernels.delta_rule import chunked, recurrent
from pallas_kernels.formats import BF16, F16, Format, round_to

_Array = jax.Array
_Results = tuple[_Array, _Array]


# The state between chunks, windows and requests.


def state_not_carried(q, k, v, g, beta, state=None, **call: Any) -> _Results:
    """Every chunk starts from nothing."""

    def enter(number: _Array, count: int, state: _Array) -> _Array:
        return jnp.where(number == 0, state, 0.0)

    return by_chunks(q, k, v, g, beta, state, **call, enter=enter)


def state_dropped_once(q, k, v, g, beta, state=None, **call: Any) -> _Results:
    """The state is lost in the middle of the prompt, once; the gates forget that it was."""

    def enter(number: _Array, count: int, state: _Array) -> _Array:
        return jnp.where(number == count // 2, 0.0, state)

    return by_chunks(q, k, v, g, beta, state, **call, enter=enter)


def window_starts_empty(q, k, v, g, beta, state=None, **call: Any) -> _Results:
    """A prefill window that does not start at position 0 starts from nothing all the same."""
    return chunked(q, k, v, g, beta, None, **call)


def state_transposed(q, k, v, g, beta, state=None, **call: Any) -> _Results:
    """Chunks hand the state on as [V, K] and read it as [K, V]; with K = V no shape complains."""
    _square(k, v)

    def enter(number: _Array, count: int, state: _Array) -> _Array:
        return jnp.swapaxes(state, -1, -2)

    return by_chunks(q, k, v, g, beta, state, **call, enter=enter)


def final_state_transposed(q, k, v, g, beta, state=None, **call: Any) -> _Results:
    """Prefill leaves the state to decode as [V, K]; its own outputs are right."""
    _square(k, v)
    o, final = chunked(q, k, v, g, beta, state, **call)
    return o, jnp.swapaxes(final, -1, -2)


def last_update_skipped(q, k, v, g, beta, state=None, **call: Any) -> _Results:
    """The last chunk does not write its update; only what follows the call sees it."""

    def leave(number: _Array, count: int, old: _Array, new: _Array) -> _Array:
        return jnp.where(number == count - 1, old, new)

    return by_chunks(q, k, v, g, beta, state, **call, leave=leave)


def pads_update_state(q, k, v, g, beta, state=None, **call: Any) -> _Results:
    """64 padding tokens after the prompt, copies of its last one, update the state."""
    length = v.shape[1]
    lengths = call.pop("lengths", None)

    def padded(x: _Array) -> _Array:
        x = only_real(x, lengths)
        return jnp.concatenate([x, jnp.repeat(x[:, -1:], CHUNK, axis=1)], axis=1)

    o, final = chunked(*map(padded, (q, k, v, g, beta)), state, **call, lengths=None)
    return o[:, :length], final


def stale_slot(q, k, v, g, beta, state=None, **call: Any) -> _Results:
    """A new sequence starts from the state that another one left in its slot."""
    _, left = chunked(q, k, v, g, beta, state, **call)
    is_new = True if state is None else ~jnp.any(state != 0, axis=(1, 2, 3), keepdims=True)
    start = jnp.where(is_new, jnp.roll(left, 1, axis=0), 0.0 if state is None else state)
    return chunked(q, k, v, g, beta, start, **call)


def snapshot_of_another_slot(q, k, v, g, beta, state=None, **call: Any) -> _Results:
    """What prefill saves for decode lands in the next sequence's slot."""
    o, final = chunked(q, k, v, g, beta, state, **call)
    return o, jnp.roll(final, 1, axis=0)


# Gates and heads.


def decay_of_24(q, k, v, g, beta, state=None, **call: Any) -> _Results:
    """A_log is exponentiated twice: the decay's exponent is 24 times too large."""
    return _either(q, k, v, 24.0 * g, beta, state, call)


def decay_ignored(q, k, v, g, beta, state=None, **call: Any) -> _Results:
    """The state is not decayed before it is read and written."""
    return _either(q, k, v, jnp.zeros_like(g), beta, state, call)


def key_heads_permuted(q, k, v, g, beta, state=None, **call: Any) -> _Results:
    """Value head h uses key head h % Hk; right is h // (Hv // Hk)."""
    share = v.shape[2] // q.shape[2]
    q, k = (jnp.tile(x, (1, 1, share, 1)) for x in (q, k))
    return _either(q, k, v, g, beta, state, call)


def gate_sum_in_bf16(q, k, v, g, beta, state=None, **call: Any) -> _Results:
    """The sum of the gates over a chunk is accumulated in bfloat16."""
    batch, length = g.shape[:2]
    count = -(-length // CHUNK)
    rows = jnp.pad(only_real(g, call.get("lengths")), ((0, 0), (0, count * CHUNK - length), (0, 0)))
    rows = jnp.moveaxis(rows.reshape(batch, count, CHUNK, -1), 2, 0)

    def add(total: _Array, gate: _Array) -> _Results:
        grown = round_to(total + gate, BF16)
        return grown, grown - total

    # The differences of the rounded sums are gates whose exact sum is the rounded one.
    _, rows = jax.lax.scan(add, jnp.zeros_like(rows[0]), rows)
    gates = jnp.moveaxis(rows, 0, 2).reshape(batch, count * CHUNK, -1)[:, :length]
    return chunked(q, k, v, gates, beta, state, **call)


def decay_in_bf16(q, k, v, g, beta, state=None, **call: Any) -> _Results:
    """exp(g) is held in bfloat16, where 0.999 is 1: slow heads never forget."""
    return _rounded(q, k, v, g, beta, state, call, exp_g=BF16)


def beta_in_bf16(q, k, v, g, beta, state=None, **call: Any) -> _Results:
    """beta is rounded to bfloat16."""
    return _rounded(q, k, v, g, beta, state, call, beta=BF16)


# Inside a chunk.


def diagonal_twice(q, k, v, g, beta, state=None, **call: Any) -> _Results:
    """A token's own update is counted twice in its output; the state is right."""
    return by_chunks(q, k, v, g, beta, state, **call, step=planted(diagonal=2.0))


def beta_missing_in_kk(q, k, v, g, beta, state=None, **call: Any) -> _Results:
    """The matrix that is inverted lacks its factor beta."""
    return by_chunks(q, k, v, g, beta, state, **call, step=planted(beta_in_kk=False))


def key_decay_missing(q, k, v, g, beta, state=None, **call: Any) -> _Results:
    """Updates enter the state without their decay to the end of the chunk."""
    return by_chunks(q, k, v, g, beta, state, **call, step=planted(key_decay=False))


def off_diagonal_blocks_missing(q, k, v, g, beta, state=None, **call: Any) -> _Results:
    """The inverse is made of its 16 x 16 blocks on the diagonal alone."""
    block = np.arange(CHUNK) // BLOCK
    same = block[:, None] == block

    def inverse(a: _Array) -> _Array:
        return jnp.where(same, solved(jnp.where(same, a, 0.0)), 0.0)

    return by_chunks(q, k, v, g, beta, state, **call, step=planted(inverse=inverse))


def neumann_f16(q, k, v, g, beta, state=None, **call: Any) -> _Results:
    """The inverse of 16 x 16 blocks is the product (I - L)(I + L^2)(I + L^4)(I + L^8) in float16.

    The full inverse follows by substitution from the blocks. Keys that point the same way make the
    powers overflow.
    """
    return by_chunks(q, k, v, g, beta, state, **call, step=planted(inverse=_neumann(F16)))


def neumann_bf16(q, k, v, g, beta, state=None, **call: Any) -> _Results:
    """`neumann_f16` in bfloat16: no overflow, no digits."""
    return by_chunks(q, k, v, g, beta, state, **call, step=planted(inverse=_neumann(BF16)))


def exp_before_mask(q, k, v, g, beta, state=None, **call: Any) -> _Results:
    """exp(G_i - G_j) is taken for future tokens too, then multiplied by 0: inf * 0 is NaN."""

    def decay(total: _Array) -> _Array:
        return jnp.exp(total - jnp.swapaxes(total, -1, -2)) * np.tri(CHUNK, dtype=np.float32)

    return by_chunks(q, k, v, g, beta, state, **call, step=planted(decay=decay))


def residual_of_rounded(q, k, v, g, beta, state=None, **call: Any) -> _Results:
    """v and what the state predicts of it are rounded to bfloat16 before they are subtracted."""
    if v.shape[1] <= 8:
        return by_tokens(q, k, v, g, beta, state, **call, residual=_rounded_difference)
    return by_chunks(q, k, v, g, beta, state, **call, step=planted(residual=_rounded_difference))


def chunk_entry_f16(q, k, v, g, beta, state=None, **call: Any) -> _Results:
    """The state passes through float16 at every chunk's entry: infinite from 65,504 on."""
    return by_chunks(
        q, k, v, g, beta, state, **call, enter=lambda number, count, state: round_to(state, F16)
    )


def dots_one_bf16_pass(q, k, v, g, beta, state=None, **call: Any) -> _Results:
    """Every product has the platform's default precision: one pass of bfloat16 operands."""
    if v.shape[1] <= 8:
        return by_tokens(q, k, v, g, beta, state, **call, operand=lambda x: round_to(x, BF16))
    return _rounded(q, k, v, g, beta, state, call, dot="default")


# Decode.


def state_4_bits(q, k, v, g, beta, state=None, **call: Any) -> _Results:
    """The state keeps 4 mantissa bits after every token."""
    return _rounded(q, k, v, g, beta, state, call, state=Format(mantissa_bits=4))


def state_bf16(q, k, v, g, beta, state=None, **call: Any) -> _Results:
    """The state is stored in bfloat16 after every token."""
    return _rounded(q, k, v, g, beta, state, call, state=BF16)


def state_f16(q, k, v, g, beta, state=None, **call: Any) -> _Results:
    """The state is stored in float16 after every token."""
    return _rounded(q, k, v, g, beta, state, call, state=F16)


def reads_before_write(q, k, v, g, beta, state=None, **call: Any) -> _Results:
    """A token's output lacks its own update."""
    return by_tokens(q, k, v, g, beta, state, **call, reads_before_write=True)


# Controls: right, and not to be flagged.


def control_state_bf16_per_chunk(q, k, v, g, beta, state=None, **call: Any) -> _Results:
    """The state is carried from chunk to chunk in bfloat16, as FlashKDA does."""
    return _rounded(q, k, v, g, beta, state, call, chunk_state=BF16)


def control_v_new_bf16(q, k, v, g, beta, state=None, **call: Any) -> _Results:
    """What a chunk writes is rounded after the subtraction, as FLA does."""
    return _rounded(q, k, v, g, beta, state, call, v_new=BF16)


def control_gate_bf16(q, k, v, g, beta, state=None, **call: Any) -> _Results:
    """A token's log decay is rounded, its sum is not."""
    return _rounded(q, k, v, g, beta, state, call, g=BF16)


def control_qk_bf16(q, k, v, g, beta, state=None, **call: Any) -> _Results:
    """q and k are bfloat16 after their l2 norm, as in every bfloat16 kernel."""
    return _either(round_to(q, BF16), round_to(k, BF16), v, g, beta, state, call)


def control_zero_pads(q, k, v, g, beta, state=None, **call: Any) -> _Results:
    """64 padding tokens whose k, v, beta and g are 0 leave the state alone; disputed as a bug."""
    length = v.shape[1]
    lengths = call.pop("lengths", None)

    def padded(x: _Array) -> _Array:
        return jnp.pad(only_real(x, lengths), ((0, 0), (0, CHUNK)) + ((0, 0),) * (x.ndim - 2))

    o, final = chunked(*map(padded, (q, k, v, g, beta)), state, **call, lengths=None)
    return o[:, :length], final


def control_chunk_form(q, k, v, g, beta, state=None, **call: Any) -> _Results:
    """The form that faults inside a chunk are planted in, without any."""
    return by_chunks(q, k, v, g, beta, state, **call, step=planted())


def control_token_form(q, k, v, g, beta, state=None, **call: Any) -> _Results:
    """The recurrence that faults of decode are planted in, without any."""
    return by_tokens(q, k, v, g, beta, state, **call)


def _either(q, k, v, g, beta, state, call: dict[str, Any]) -> _Results:
    """The healthy op for so many tokens: a few are decode's, more are prefill's."""
    if v.shape[1] <= 8 and state is not None:
        return recurrent(q, k, v, g, beta, state, **call)
    return chunked(q, k, v, g, beta, state, **call)


def _rounded(q, k, v, g, beta, state, call: dict[str, Any], /, **formats: Any) -> _Results:
    changed = {"formats": dataclasses.replace(call["formats"], **formats)}
    return _either(q, k, v, g, beta, state, call | changed)


def _rounded_difference(a: _Array, b: _Array) -> _Array:
    return round_to(round_to(a, BF16) - round_to(b, BF16), BF16)


def _neumann(fmt: Format) -> Any:
    def product(a: _Array, b: _Array) -> _Array:
        return round_to(matmul(a, b), fmt)

    def inverse(a: _Array) -> _Array:
        rows = [slice(i, i + BLOCK) for i in range(0, CHUNK, BLOCK)]
        eye = jnp.eye(BLOCK, dtype=jnp.float32)
        diagonal = []
        for row in rows:
            power = round_to(a[..., row, row], fmt)
            x = eye - power
            for _ in range(3):
                power = product(power, power)
                x = product(x, eye + power)
            diagonal.append(x)
        # Block substitution: X_ij = -X_ii sum_k A_ik X_kj.
        blocks: dict[tuple[int, int], _Array] = {}
        for i, row in enumerate(rows):
            blocks[i, i] = diagonal[i]
            for j in range(i):
                total = sum(matmul(a[..., row, rows[m]], blocks[m, j]) for m in range(j, i))
                blocks[i, j] = -matmul(diagonal[i], total)
        zero = jnp.zeros_like(diagonal[0])
        count = range(len(rows))
        return jnp.concatenate(
            [jnp.concatenate([blocks.get((i, j), zero) for j in count], axis=-1) for i in count],
            axis=-2,
        )

    return inverse


def _square(k: _Array, v: _Array) -> None:
    if k.shape[3] != v.shape[3]:
        raise ValueError(f"a transposed state needs K = V; here K={k.shape[3]}, V={v.shape[3]}.")

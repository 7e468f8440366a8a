"""The delta rule chunk by chunk and token by token, with the lines open that faults replace.

`by_chunks` carries the state between chunks where a fault can get at it; what happens inside a
chunk is the healthy op, or `plain_chunk`, which is the equations of `pallas_kernels.delta_rule.xla`
in float32 for a gate per token. `by_tokens` is the recurrence.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import delta_rule
from pallas_kernels.formats import F32, round_to

CHUNK, BLOCK = 64, 16

_Array = jax.Array
_Results = tuple[_Array, _Array]
# (state, q, k, v, g, beta, scale, formats) -> (state after the chunk, o), shapes as the op's.
Step = Callable[..., _Results]


def healthy_chunk(
    state: _Array,
    q: _Array,
    k: _Array,
    v: _Array,
    g: _Array,
    beta: _Array,
    scale: float,
    formats: Any,
) -> _Results:
    """One chunk by the healthy op."""
    unstored = dataclasses.replace(formats, state=F32, chunk=CHUNK)
    o, state = delta_rule.chunked(q, k, v, g, beta, state, scale=scale, formats=unstored)
    return state, o


def by_chunks(
    q: _Array,
    k: _Array,
    v: _Array,
    g: _Array,
    beta: _Array,
    initial_state: _Array | None = None,
    *,
    lengths: _Array | None = None,
    scale: float | None = None,
    formats: Any,
    step: Step = healthy_chunk,
    enter: Callable[[_Array, int, _Array], _Array] = lambda number, count, state: state,
    leave: Callable[[_Array, int, _Array, _Array], _Array] = lambda number, count, old, new: new,
) -> _Results:
    """o [B, T, Hv, V] and the final state; arguments as `pallas_kernels.delta_rule.chunked`.

    `enter(number, count, state)` is the state that chunk `number` of `count` starts from,
    `leave(number, count, old, new)` the one that it hands on.
    """
    batch, length = v.shape[:2]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    count = -(-length // CHUNK)
    if initial_state is None:
        initial_state = jnp.zeros((batch, v.shape[2], q.shape[3], v.shape[3]), jnp.float32)

    def split(x: _Array) -> _Array:  # [B, T, ...] -> [chunks, B, CHUNK, ...], zero where padded
        x = only_real(x, lengths)
        x = jnp.pad(x, ((0, 0), (0, count * CHUNK - length)) + ((0, 0),) * (x.ndim - 2))
        return jnp.swapaxes(x.reshape(batch, count, CHUNK, *x.shape[2:]), 0, 1)

    def one(state: _Array, chunk: tuple[_Array, ...]) -> _Results:
        number, *inputs = chunk
        state = enter(number, count, state)
        new, o = step(state, *inputs, scale, formats)
        return leave(number, count, state, new), o

    chunks = (jnp.arange(count), *map(split, (q, k, v, g, beta)))
    state, o = jax.lax.scan(one, initial_state.astype(jnp.float32), chunks)
    o = jnp.swapaxes(o, 0, 1).reshape(batch, count * CHUNK, *v.shape[2:])[:, :length]
    return o, round_to(state, formats.state)


def only_real(x: _Array, lengths: _Array | None) -> _Array:
    """x [B, T, ...] in float32, zero past each row's length."""
    x = x.astype(jnp.float32)
    if lengths is None:
        return x
    real = jnp.arange(x.shape[1]) < lengths[:, None]
    return jnp.where(real.reshape(real.shape + (1,) * (x.ndim - 2)), x, 0.0)


def matmul(a: _Array, b: _Array) -> _Array:
    """a @ b in float32, exact products."""
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def solved(a: _Array) -> _Array:
    """(I + a)^-1 for strictly lower a [..., C, C]."""
    eye = jnp.broadcast_to(jnp.eye(a.shape[-1], dtype=a.dtype), a.shape)
    return jax.lax.linalg.triangular_solve(a, eye, left_side=True, lower=True, unit_diagonal=True)


def pair_decay(total: _Array) -> _Array:
    """exp(G_i - G_j) for j <= i, else 0: [..., C, C] from the gate sums G [..., C, 1]."""
    # Above the diagonal exp would overflow: the exponent is masked, not the exponential.
    exponent = jnp.where(_lower(), total - _transposed(total), -jnp.inf)
    return jnp.exp(exponent)


def plain_chunk(
    state: _Array,
    q: _Array,
    k: _Array,
    v: _Array,
    g: _Array,
    beta: _Array,
    scale: float,
    formats: Any,
    *,
    inverse: Callable[[_Array], _Array] = solved,
    decay: Callable[[_Array], _Array] = pair_decay,
    beta_in_kk: bool = True,
    key_decay: bool = True,
    diagonal: float = 1.0,
    residual: Callable[[_Array, _Array], _Array] = jnp.subtract,
) -> _Results:
    """One chunk; the keywords are the lines that faults replace. Rounds nothing itself.

    `inverse` of I + A, `decay` from the gate sums, beta as factor of A, the keys' decay to the
    chunk's end, what the diagonal of P is multiplied by, and `residual(u, w S)`.
    """
    del formats
    _check_gate(g)
    q, k = (jnp.repeat(x, v.shape[2] // x.shape[2], axis=2) for x in (q, k))
    q, k, v, g, beta = (
        jnp.swapaxes(x.astype(jnp.float32), 1, 2) for x in (q, k, v, g[..., None], beta[..., None])
    )  # [B, H, C, D]
    total = jnp.cumsum(g, axis=-2)
    between, into, last = decay(total), jnp.exp(total), total[..., -1:, :]
    a = matmul(k, _transposed(k)) * between  # `between` is the mask as well
    solve = inverse(jnp.where(_eye(), 0.0, beta * a if beta_in_kk else a))
    u, w = matmul(solve, beta * v), matmul(solve, beta * into * k)
    p = matmul(q, _transposed(k)) * between
    p = jnp.where(_eye(), diagonal * p, p)
    new = residual(u, matmul(w, state))
    o = into * matmul(q, state) + matmul(p, new)
    update = jnp.exp(last - total) * new if key_decay else new
    state = jnp.exp(last) * state + matmul(_transposed(k), update)
    return state, scale * jnp.swapaxes(o, 1, 2)


def planted(**lines: Any) -> Step:
    """`plain_chunk` with some of its lines replaced."""
    return functools.partial(plain_chunk, **lines)


def by_tokens(
    q: _Array,
    k: _Array,
    v: _Array,
    g: _Array,
    beta: _Array,
    state: _Array,
    *,
    lengths: _Array | None = None,
    scale: float | None = None,
    formats: Any,
    operand: Callable[[_Array], _Array] = lambda x: x,
    residual: Callable[[_Array, _Array], _Array] = jnp.subtract,
    reads_before_write: bool = False,
) -> _Results:
    """The recurrence for a gate per token; arguments as `pallas_kernels.delta_rule.recurrent`.

    `operand` is applied to both sides of the products with the state, `residual(v, k^T S)` is what
    is written, and with `reads_before_write` q reads the state before the token's own update.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    _check_gate(g)
    share = v.shape[2] // q.shape[2]
    lengths = jnp.full(v.shape[:1], v.shape[1], jnp.int32) if lengths is None else lengths

    def read(x: _Array, state: _Array) -> _Array:  # x^T S of every head
        return jnp.einsum("bhk,bhkv->bhv", operand(x), operand(state), precision="highest")

    def step(state: _Array, token: tuple[_Array, ...]) -> _Results:
        q, k, v, g, beta, real = token
        decayed = jnp.exp(g)[..., None, None] * state
        delta = residual(v, read(k, decayed)) * beta[..., None]
        new = decayed + k[..., :, None] * delta[..., None, :]
        o = read(q, decayed if reads_before_write else new)
        new = round_to(new, formats.state)
        return jnp.where(real[:, None, None, None], new, state), o

    q, k = (jnp.repeat(x, share, axis=2) for x in (q, k))
    inputs = tuple(jnp.swapaxes(only_real(x, lengths), 0, 1) for x in (q, k, v, g, beta))
    real = jnp.arange(v.shape[1])[:, None] < lengths
    state, o = jax.lax.scan(step, state.astype(jnp.float32), (*inputs, real))
    return scale * jnp.swapaxes(o, 0, 1), state


def _check_gate(g: _Array) -> None:
    if g.ndim != 3:
        raise ValueError(f"this form is for a gate per token, g [B, T, Hv]; it got {g.shape}.")


def _lower() -> np.ndarray:
    return np.tri(CHUNK, dtype=bool)


def _eye() -> np.ndarray:
    return np.eye(CHUNK, dtype=bool)


def _transposed(x: _Array) -> _Array:
    return jnp.swapaxes(x, -1, -2)

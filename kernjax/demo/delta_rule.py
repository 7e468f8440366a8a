"""The gated delta rule as training wants it: differentiable, quick to compile, quick on a CPU.

The chunked form of `pallas_kernels.delta_rule` (same equations, see there) in float32, without
formats, padding, states at the ends; the inverse of a chunk's triangle by recursive halves.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

CHUNK = 32  # measured quickest; any length computes the same function
_BLOCK = 8  # rows inverted by their (finite) Neumann series


def gated_delta_rule(
    q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array
) -> jax.Array:
    """o [B, T, Hv, V] from a zero state; q, k [B, T, Hk, K] normalised, v [B, T, Hv, V], g and
    beta [B, T, Hv]. T is padded to whole chunks."""
    batch, time, key_heads, key_dim = q.shape
    heads, value_dim = v.shape[2:]
    count = -(-time // CHUNK)

    def split(x: jax.Array) -> jax.Array:  # [B, T, H, D] -> [count, B Hv, C, D]
        x = jnp.repeat(x, heads // x.shape[2], axis=2)
        x = jnp.pad(x, ((0, 0), (0, count * CHUNK - time), (0, 0), (0, 0)))
        x = x.reshape(batch, count, CHUNK, heads, x.shape[-1]).transpose(1, 0, 3, 2, 4)
        return x.reshape(count, batch * heads, CHUNK, x.shape[-1])

    q, k, v = split(q * key_dim**-0.5), split(k), split(v)
    beta, total = split(beta[..., None]), jnp.cumsum(split(g[..., None]), axis=-2)
    lower = jnp.tril(jnp.ones((CHUNK, CHUNK), bool))
    # Mask the exponent, not the exponential: the upper half would overflow.
    decay = jnp.exp(jnp.where(lower, total - jnp.swapaxes(total, -1, -2), -1e30))
    decay_in, last = jnp.exp(total), total[..., -1:, :]
    keys = jnp.swapaxes(k, -1, -2)
    p = (q @ keys) * decay
    inverse = _unit_lower_inverse(((beta * k) @ keys) * decay)
    u, w = jnp.split(
        inverse @ jnp.concatenate([beta * v, beta * decay_in * k], axis=-1), [value_dim], axis=-1
    )
    reads = jnp.concatenate([w, q * decay_in], axis=-2)  # both multiply the state
    writes = jnp.swapaxes(k * jnp.exp(last - total), -1, -2)

    def step(state: jax.Array, chunk: tuple[jax.Array, ...]):
        u, reads, p, writes, decay_all = chunk
        from_state = reads @ state
        v_new = u - from_state[:, :CHUNK]
        o = from_state[:, CHUNK:] + p @ v_new
        return decay_all * state + writes @ v_new, o

    state = jnp.zeros((batch * heads, key_dim, value_dim), jnp.float32)
    _, o = lax.scan(step, state, (u, reads, p, writes, jnp.exp(last)))
    o = o.reshape(count, batch, heads, CHUNK, value_dim).transpose(1, 0, 3, 2, 4)
    return o.reshape(batch, count * CHUNK, heads, value_dim)[:, :time]


@jax.custom_vjp
def _unit_lower_inverse(a: jax.Array) -> jax.Array:
    """(I + strict_lower(a))^-1 for a [..., C, C].

    Inside blocks of 8 rows the Neumann series ends at the seventh power; then two inverted halves
    merge by X21 = -X22 A21 X11. The derivative is the algebraic one, -X da X.
    """
    size = a.shape[-1]
    a = jnp.where(jnp.tril(jnp.ones((size, size), bool), -1), a, 0)
    row, column = jnp.arange(size)[:, None], jnp.arange(size)
    n = -jnp.where(row // _BLOCK == column // _BLOCK, a, 0)
    n2 = n @ n
    x = jnp.eye(size) + n
    x = x + x @ n2
    x = x + x @ (n2 @ n2)
    block = _BLOCK
    while block < size:
        merged = row // (2 * block) == column // (2 * block)
        corner = jnp.where(merged & (row // block != column // block), a, 0)
        x = x - x @ (corner @ x)
        block *= 2
    return x


def _inverse_forward(a: jax.Array):
    x = _unit_lower_inverse(a)
    return x, x


def _inverse_backward(x: jax.Array, grad: jax.Array):
    xt = jnp.swapaxes(x, -1, -2)
    strict = jnp.tril(jnp.ones(x.shape[-2:], bool), -1)
    return (jnp.where(strict, -(xt @ grad) @ xt, 0),)


_unit_lower_inverse.defvjp(_inverse_forward, _inverse_backward)

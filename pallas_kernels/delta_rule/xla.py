"""Gated delta rule in plain XLA: a chunked form for many tokens, single steps for a few.

The recurrence, for one head with key dimension K and value dimension V:

    S = exp(g) * S                 g scalar (GDN) or one per key channel (KDA)
    d = (v - k^T S) * beta
    S = S + k d^T
    o = scale * q^T S

In a chunk of C tokens, with G = cumsum(g) and D_ij = exp(G_i - G_j) for j <= i (Yang et al.,
"Gated Delta Networks", arXiv 2412.06464; the WY form of `chunk_gated_delta_rule` in transformers
and flash-linear-attention):

    A     = I + strict_lower(beta_i (k_i . k_j) D_ij)
    u     = A^-1 (beta v)          w = A^-1 (beta exp(G) k)
    v_new = u - w S                p = lower((q_i . k_j) D_ij)
    o     = scale * (exp(G) q S + p v_new)
    S'    = exp(G_C) S + k^T (exp(G_C - G) v_new)

Only `w S`, `q S` and the last product depend on the chunk before, so everything else is computed
for all chunks at once, and the scan over chunks holds three dots.
With a gate per channel D_ij does not factor out of the product; see `_channel_products`.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.delta_rule.formats import DeltaRuleFormats
from pallas_kernels.formats import BF16, round_to

BLOCK = 16  # rows of one forward substitution, and of one sub-block of the per-channel gate


def chunked(q, k, v, g, beta, initial_state, lengths, scale, formats: DeltaRuleFormats):
    """Outputs [B, T, Hv, V] and final state [B, Hv, K, V], both float32; see `chunked` above."""
    batch, length, key_heads, key_dim = q.shape
    value_heads, value_dim = v.shape[2:]
    chunk = formats.chunk
    dot = functools.partial(_dot, formats=formats)
    q, k, v, g, beta = _mask((q, k, v, g, beta), lengths)
    g = round_to(g, formats.g)
    beta = round_to(beta, formats.beta)

    count = -(-length // chunk)
    q, k = (_split(x, chunk, count, key_heads, 1) for x in (q, k))  # [N, B, Hk, 1, C, K]
    v = _split(v, chunk, count, key_heads, value_heads // key_heads)  # [N, B, Hk, R, C, V]
    beta = _split(beta[..., None], chunk, count, key_heads, value_heads // key_heads)
    per_channel = g.ndim == 4
    g = g if per_channel else g[..., None]
    g = _split(g, chunk, count, key_heads, value_heads // key_heads)  # [N, B, Hk, R, C, K or 1]

    total = round_to(jnp.cumsum(g, axis=-2), formats.g_cumsum)
    decay_in = round_to(jnp.exp(total), formats.exp_g)
    decay_out = round_to(jnp.exp(total[..., -1:, :] - total), formats.exp_g)
    decay_all = jnp.swapaxes(decay_in[..., -1:, :], -1, -2)  # [..., K or 1, 1]
    products = _channel_products if per_channel else _scalar_products
    kk, p = products(q, k, total, formats)
    p = round_to(p, formats.p)
    inverse = round_to(_inverse(beta * kk, formats.dot), formats.inverse)
    u = round_to(dot(inverse, beta * v), formats.u)
    w = round_to(dot(inverse, beta * decay_in * k), formats.w)
    queries = decay_in * q if per_channel else q
    keys = decay_out * k if per_channel else k

    def step(state, xs):
        u, w, p, queries, keys, decay_in, decay_out, decay_all = xs
        v_new = u - dot(w, round_to(state, formats.state_operand))
        o = dot(queries, round_to(state, formats.h))
        o = o if per_channel else decay_in * o
        o = o + dot(p, round_to(v_new, formats.v_new))
        update = round_to(v_new if per_channel else decay_out * v_new, formats.v_new)
        state = decay_all * state + dot(jnp.swapaxes(keys, -1, -2), update)
        return round_to(state, formats.chunk_state), o

    shape = (batch, key_heads, value_heads // key_heads, key_dim, value_dim)
    state = round_to(initial_state.reshape(shape), formats.chunk_state)
    xs = (u, w, p, queries, keys, decay_in, decay_out, decay_all)
    state, o = lax.scan(step, state, xs)
    o = o.transpose(1, 0, 4, 2, 3, 5).reshape(batch, count * chunk, value_heads, value_dim)
    state = round_to(state.reshape(batch, value_heads, key_dim, value_dim), formats.state)
    return jnp.float32(scale) * o[:, :length], state


def recurrent(q, k, v, g, beta, state, lengths, scale, formats: DeltaRuleFormats):
    """The recurrence itself, token by token, by elementwise products and sums in float32."""
    batch, length, key_heads, _ = q.shape
    value_heads, value_dim = v.shape[2:]
    groups = value_heads // key_heads
    shape = state.shape
    q, k, v, g, beta = _mask((q, k, v, g, beta), lengths)
    g = round_to(g, formats.g)
    g = g if g.ndim == 4 else g[..., None]
    beta = round_to(beta, formats.beta)
    valid = jnp.arange(length)[:, None] < (length if lengths is None else lengths)
    valid = jnp.broadcast_to(valid, (length, batch))

    def step(state, xs):
        q, k, v, g, beta, valid = xs
        decayed = round_to(jnp.exp(g), formats.exp_g)[..., None] * state
        k = k[:, :, None, :, None]
        delta = beta[..., None] * (v - jnp.sum(k * decayed, axis=-2))
        new = decayed + k * delta[..., None, :]
        o = jnp.sum(q[:, :, None, :, None] * new, axis=-2)
        new = round_to(new, formats.state)
        return jnp.where(valid[:, None, None, None, None], new, state), o

    def heads(x):  # [B, T, Hv, D] -> [T, B, Hk, R, D]
        return jnp.moveaxis(x.reshape(batch, length, key_heads, groups, *x.shape[3:]), 1, 0)

    xs = (jnp.moveaxis(q, 1, 0), jnp.moveaxis(k, 1, 0), heads(v), heads(g), heads(beta), valid)
    state = state.astype(jnp.float32).reshape(batch, key_heads, groups, *shape[2:])
    state, o = lax.scan(step, state, xs)
    o = jnp.moveaxis(o, 0, 1).reshape(batch, length, value_heads, value_dim)
    return jnp.float32(scale) * o, state.reshape(shape)


def _mask(arrays, lengths):
    """The arrays [B, T, ...] in float32, zero from `lengths` on: such tokens change nothing."""
    arrays = tuple(x.astype(jnp.float32) for x in arrays)
    if lengths is None:
        return arrays
    valid = jnp.arange(arrays[0].shape[1]) < lengths[:, None]
    return tuple(jnp.where(valid.reshape(valid.shape + (1,) * (x.ndim - 2)), x, 0) for x in arrays)


def _split(x, chunk, count, key_heads, groups):
    """[B, T, H, D] -> [N, B, Hk, R, C, D], zero padded to whole chunks."""
    x = jnp.pad(x, ((0, 0), (0, count * chunk - x.shape[1]), (0, 0), (0, 0)))
    x = x.reshape(x.shape[0], count, chunk, key_heads, groups, x.shape[-1])
    return x.transpose(1, 0, 3, 4, 2, 5)


def _dot(a, b, formats):
    """a @ b over the last two dimensions, float32; leading dimensions broadcast."""
    if formats.dot == "default":
        a, b = round_to(a, BF16), round_to(b, BF16)
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def _scalar_products(q, k, total, formats):
    """(k_i . k_j) D_ij and (q_i . k_j) D_ij for one gate per token, both [..., C, C]."""
    keys = jnp.swapaxes(k, -1, -2)
    lower = jnp.tril(jnp.ones((q.shape[-2],) * 2, bool))
    # The upper half would overflow: mask the exponent, not the exponential.
    decay = jnp.where(lower, total - jnp.swapaxes(total, -1, -2), -jnp.inf)
    decay = round_to(jnp.exp(decay), formats.exp_g)
    return _dot(k, keys, formats) * decay, _dot(q, keys, formats) * decay


def _channel_products(q, k, total, formats):
    """sum_c x_ic k_jc exp(G_ic - G_jc) for x = k and x = q, j <= i, zero elsewhere: [..., C, C].

    exp(G_i) exp(-G_j) would overflow, so rows go in sub-blocks. Left of the diagonal sub-block the
    decay splits at the block's first row r into exp(G_i - G_r) exp(G_r - G_j), neither above one;
    inside it each pair gets its own exponential.
    """
    chunk = q.shape[-2]
    lower = jnp.tril(jnp.ones((BLOCK, BLOCK), bool))[..., None]
    x = jnp.stack(jnp.broadcast_arrays(k, q))
    rows = []
    for start in range(0, chunk, BLOCK):
        block = slice(start, start + BLOCK)
        x_block, k_block, g_block = x[..., block, :], k[..., block, :], total[..., block, :]
        first = g_block[..., :1, :]
        pair = g_block[..., :, None, :] - g_block[..., None, :, :]
        pair = round_to(jnp.exp(jnp.where(lower, pair, -jnp.inf)), formats.exp_g)
        diagonal = jnp.sum(x_block[..., :, None, :] * k_block[..., None, :, :] * pair, axis=-1)
        row = [diagonal]
        if start:
            left = x_block * round_to(jnp.exp(g_block - first), formats.exp_g)
            right = round_to(jnp.exp(first - total[..., :start, :]), formats.exp_g)
            row.insert(0, _dot(left, jnp.swapaxes(right * k[..., :start, :], -1, -2), formats))
        row.append(jnp.zeros((*diagonal.shape[:-1], chunk - start - BLOCK), jnp.float32))
        rows.append(jnp.concatenate(row, axis=-1))
    kk, qk = jnp.concatenate(rows, axis=-2)
    return kk, qk


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _inverse(lower, dot):
    """(I + strict_lower(a))^-1 for a [..., C, C], C = 16 * 2^n.

    Forward substitution inside blocks of 16 rows, for all blocks at once; two inverted halves
    merge by X21 = -X22 A21 X11. A Neumann series over the chunk would overflow for keys that
    point the same way. The derivative is the algebraic one, -X da X.
    """
    formats = DeltaRuleFormats(dot=dot)
    chunk = lower.shape[-1]
    lower = jnp.where(jnp.tril(jnp.ones((chunk, chunk), bool), -1), lower, 0)
    inverse = _forward_substitution(_diagonal_blocks(lower, BLOCK))
    size = BLOCK
    while size < chunk:
        blocks = _diagonal_blocks(lower, 2 * size)
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        corner = -_dot(_dot(second, blocks[..., size:, :size], formats), first, formats)
        top = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        inverse = jnp.concatenate([top, jnp.concatenate([corner, second], axis=-1)], axis=-2)
        size *= 2
    return inverse[..., 0, :, :]


@_inverse.defjvp
def _inverse_jvp(dot, primals, tangents):
    formats = DeltaRuleFormats(dot=dot)
    inverse = _inverse(primals[0], dot)
    change = jnp.where(jnp.tril(jnp.ones(inverse.shape[-2:], bool), -1), tangents[0], 0)
    return inverse, -_dot(_dot(inverse, change, formats), inverse, formats)


def _diagonal_blocks(x, size):
    """[..., C, C] -> the C / size square blocks on the diagonal, [..., C / size, size, size]."""
    starts = range(0, x.shape[-1], size)
    return jnp.stack([x[..., i : i + size, i : i + size] for i in starts], axis=-3)


def _forward_substitution(lower):
    """(I + a)^-1 for strictly lower a [..., 16, 16], row by row."""
    eye = jnp.broadcast_to(jnp.eye(BLOCK, dtype=jnp.float32), lower.shape)
    return lax.linalg.triangular_solve(lower, eye, left_side=True, lower=True, unit_diagonal=True)

"""Gated delta rule in plain XLA: a chunked form for many tokens, single steps for a few.

The recurrence, for one head with key dimension K and value dimension V:

    S = exp(g) * S                 g one per token (GDN), or one per token and key channel (KDA)
    d = (v - k^T S) * beta
    S = S + k d^T
    o = scale * q^T S

In a chunk of C tokens, with G = cumsum(g) and D_ij = exp(G_i - G_j) for j <= i (Yang et al.,
"Gated Delta Networks", arXiv 2412.06464; `torch_chunk_gated_delta_rule` in transformers):

    A     = I + strict_lower(beta_i (k_i . k_j) D_ij)
    u     = A^-1 (beta v)          w = A^-1 (beta exp(G) k)
    v_new = u - w S                p = lower((q_i . k_j) D_ij)
    o     = scale * (exp(G) (q S) + p v_new)
    S'    = exp(G_C) S + k^T (exp(G_C - G) v_new)

The scan carries S from chunk to chunk and computes all of this inside a step: on a CPU the
chunk's tensors then stay in the cache, which is quicker than to prepare all chunks at once.
With a gate per channel, D_ij stays inside the sum over channels; see `_decayed_products`.

No sum here multiplies by a broadcast factor and then reduces: jaxlib 0.10.2 on a CPU gets some of
those wrong (jax-ml/jax issues 39103, 39257). Dots of two or more rows and columns are right.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.delta_rule.formats import DeltaRuleFormats
from pallas_kernels.formats import BF16, round_to

BLOCK = 16  # rows of one forward substitution
_Sums = tuple[jax.Array, jax.Array]


def chunked(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    initial_state: jax.Array,
    *,
    lengths: jax.Array | None,
    scale: float,
    formats: DeltaRuleFormats,
) -> tuple[jax.Array, jax.Array]:
    """Outputs [B, T, Hv, V] and final state [B, Hv, K, V], float32; arguments as the public
    `chunked`. Differentiable. NotImplementedError for float64: the reference has it."""
    _refuse_float64(q, k, v, g, beta, initial_state)
    batch, length, key_heads, key_dim = q.shape
    value_heads, value_dim = v.shape[2:]
    count = -(-length // formats.chunk)
    # Decays per channel sit inside the products with k: value heads have nothing left to share.
    shared = 1 if g.ndim == 4 else value_heads // key_heads

    def split(x: jax.Array) -> jax.Array:  # [B, T, ...] -> [N, B, C, ...]
        x = jnp.pad(x, ((0, 0), (0, count * formats.chunk - length)) + ((0, 0),) * (x.ndim - 2))
        return jnp.swapaxes(x.reshape(batch, count, formats.chunk, *x.shape[2:]), 0, 1)

    if lengths is None:
        lengths = jnp.full((batch,), length, jnp.int32)
    valid = jnp.arange(length, dtype=jnp.int32) < lengths[:, None]
    state = initial_state.astype(jnp.float32)
    state = state.reshape(batch, value_heads // shared, shared, key_dim, value_dim)
    state, o = lax.scan(
        lambda state, chunk: _one_chunk(state, *chunk, formats),
        round_to(state, formats.chunk_state),
        tuple(map(split, (q, k, v, g, beta, valid))),
    )
    o = jnp.swapaxes(o, 0, 1).reshape(batch, -1, value_heads, value_dim)[:, :length]
    state = state.reshape(batch, value_heads, key_dim, value_dim)
    return jnp.float32(scale) * o, round_to(state, formats.state)


def _one_chunk(
    state: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    valid: jax.Array,
    formats: DeltaRuleFormats,
) -> tuple[jax.Array, jax.Array]:
    """The next state [B, H, R, K, V] and o / scale [B, C, H, R, V] of C tokens.

    R value heads share a key head; inputs as those of `chunked`, C tokens each.
    """
    per_channel = g.ndim == 4
    g = g if per_channel else g[..., None]
    q, k, v, g, beta = _mask((q, k, v, g, beta[..., None]), valid)
    heads = state.shape[1:3]
    if per_channel:
        q, k = (jnp.repeat(x, heads[0] // x.shape[2], axis=2) for x in (q, k))
    dot = functools.partial(_dot, mode=formats.dot)

    def by_head(x: jax.Array, heads: tuple[int, int]) -> jax.Array:  # -> [B, H, R, C, D]
        return jnp.moveaxis(x.reshape(*x.shape[:2], *heads, x.shape[-1]), 1, -2)

    q, k = by_head(q, (heads[0], 1)), by_head(k, (heads[0], 1))
    v = by_head(v, heads)
    beta = round_to(by_head(beta, heads), formats.beta)
    total = _gate_sums(round_to(by_head(g, heads), formats.g), formats)
    decay_in = _decay(lambda x: x, total, formats)  # [B, H, R, C, K or 1]
    decay_out = _decay(lambda x: x[..., -1:, :] - x, total, formats)
    decay_all = jnp.swapaxes(decay_in[..., -1:, :], -1, -2)

    if per_channel:
        kk, p = (_decayed_products(x, k, total, formats) for x in (k, q))
        reads, writes = decay_in * q, decay_out * k
    else:
        decay = _pair_decay(total, formats)
        kk, p = (dot("ik,jk", x, k) * decay for x in (k, q))
        reads, writes = q, k
    inverse = round_to(_unit_lower_inverse(beta * kk, formats.dot), formats.inverse)
    u = round_to(dot("ik,kj", inverse, beta * v), formats.u)
    w = round_to(dot("ik,kj", inverse, decay_in * beta * k), formats.w)

    v_new = u - dot("ik,kj", w, round_to(state, formats.state_operand))
    o = dot("ik,kj", reads, round_to(state, formats.h))
    o = o if per_channel else decay_in * o
    o = o + dot("ik,kj", round_to(p, formats.p), round_to(v_new, formats.v_new))
    update = round_to(v_new if per_channel else decay_out * v_new, formats.v_new)
    state = decay_all * state + dot("ik,kj", jnp.swapaxes(writes, -1, -2), update)
    return round_to(state, formats.chunk_state), jnp.moveaxis(o, -2, 1)


def recurrent(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    *,
    lengths: jax.Array | None,
    scale: float,
    formats: DeltaRuleFormats,
) -> tuple[jax.Array, jax.Array]:
    """Outputs [B, T, Hv, V] and the state after T tokens, float32; arguments as the public one.

    The state is read once, by k and q together, before it changes: with S the state that enters,
    d = (v - (exp(g) k)^T S) * beta, then o = (exp(g) q)^T S + (q . k) d. Float32 throughout,
    whatever `formats.dot` says: fused decode kernels keep a step on the vector unit.
    """
    _refuse_float64(q, k, v, g, beta, state)
    batch, length, key_heads, key_dim = q.shape
    value_heads, value_dim = v.shape[2:]
    shape = (batch, key_heads, value_heads // key_heads)  # [B, Hk, R]
    if lengths is None:
        lengths = jnp.full((batch,), length, jnp.int32)
    valid = jnp.arange(length, dtype=jnp.int32) < lengths[:, None]
    q, k, v, g, beta = _mask((q, k, v, g, beta), valid)
    decay = round_to(jnp.exp(round_to(g, formats.g)), formats.exp_g)
    beta = round_to(beta, formats.beta)

    def step(state: jax.Array, token: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q, k, v, decay, beta, valid = token
        decay = decay.reshape(*shape, 1, -1)  # [B, Hk, R, 1, K or 1]
        rows = jnp.stack([k, q], axis=-2)[:, :, None]  # [B, Hk, 1, 2, K]
        read = _dot("ik,kj", decay * rows, state, "highest")  # [B, Hk, R, 2, V]
        delta = (v.reshape(*shape, 1, -1) - read[..., :1, :]) * beta.reshape(*shape, 1, 1)
        qk = jnp.sum(q * k, axis=-1)[..., None, None, None]
        o = read[..., 1:, :] + qk * delta
        new = jnp.swapaxes(decay, -1, -2) * state + k[:, :, None, :, None] * delta
        new = round_to(new, formats.state)
        state = jnp.where(valid[:, None, None, None, None], new, state)
        return state, o.reshape(batch, value_heads, value_dim)

    tokens = tuple(jnp.swapaxes(x, 0, 1) for x in (q, k, v, decay, beta, valid))
    state = state.astype(jnp.float32).reshape(*shape, key_dim, value_dim)
    state, o = lax.scan(step, state, tokens)
    state = state.reshape(batch, value_heads, key_dim, value_dim)
    return jnp.float32(scale) * jnp.swapaxes(o, 0, 1), state


def _refuse_float64(*arrays: jax.Array) -> None:
    if any(x.dtype == jnp.float64 for x in arrays):
        raise NotImplementedError(
            "xla delta rule computes in float32; use 'reference' for float64."
        )


def _mask(arrays: tuple[jax.Array, ...], valid: jax.Array) -> tuple[jax.Array, ...]:
    """The arrays [B, T, ...] in float32, zero where not valid: such tokens change nothing."""
    return tuple(
        jnp.where(valid.reshape(valid.shape + (1,) * (x.ndim - 2)), x.astype(jnp.float32), 0)
        for x in arrays
    )


def _dot(spec: str, a: jax.Array, b: jax.Array, mode: str) -> jax.Array:
    """The product of two matrices, float32; `spec` is "ik,kj" or "ik,jk".

    Dimensions before the last two are a batch; where one operand has 1 there, it is repeated.
    """
    if mode == "default":
        a, b = round_to(a, BF16), round_to(b, BF16)
    batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = (jnp.broadcast_to(x, batch + x.shape[-2:]) for x in (a, b))
    left, right = (len(batch) + axes.index("k") for axes in spec.split(","))
    leading = tuple(range(len(batch)))
    return lax.dot_general(
        a, b, (((left,), (right,)), (leading, leading)), precision=lax.Precision.HIGHEST
    )


def _gate_sums(g: jax.Array, formats: DeltaRuleFormats) -> _Sums:
    """G = cumsum(g) over the chunk, [..., C, D], as a coarse part and a small remainder.

    Next to G = -300 float32 steps by 3e-5, which would be the error of every exp(G_i - G_j).
    Multiples of 2^-10 add up exactly down to -16384, and sums of the remainders stay below 1/16.
    A rounded g_cumsum has no remainder. (A dot, because XLA's CPU compiler fuses a cumsum into
    its consumers, and sums again for each of their elements.)
    """
    coarse = jnp.round(g * jnp.float32(1024)) / jnp.float32(1024)
    lower = jnp.tril(jnp.ones((g.shape[-2],) * 2, jnp.float32))
    if g.shape[-1] == 1:
        # All heads at once are rows of one product: a batch of two columns each takes four times
        # as long.
        rows = jnp.stack([coarse, g - coarse])[..., 0]
        axes = (((rows.ndim - 1,), (1,)), ((), ()))
        sums = lax.dot_general(rows, lower, axes, precision=lax.Precision.HIGHEST)[..., None]
        coarse, remainder = sums[0], sums[1]
    else:
        sums = _dot("ik,kj", lower, jnp.concatenate([coarse, g - coarse], axis=-1), "highest")
        coarse, remainder = jnp.split(sums, 2, axis=-1)
    if formats.g_cumsum.is_exact:
        return coarse, remainder
    return round_to(coarse + remainder, formats.g_cumsum), jnp.zeros_like(remainder)


def _decay(
    difference: Callable[[jax.Array], jax.Array], total: _Sums, formats: DeltaRuleFormats
) -> jax.Array:
    """exp of a difference of gate sums, which `difference` takes from either part."""
    return round_to(jnp.exp(difference(total[0]) + difference(total[1])), formats.exp_g)


def _pair_decay(total: _Sums, formats: DeltaRuleFormats) -> jax.Array:
    """D_ij = exp(G_i - G_j) for j <= i, else 0: [..., C, C] from G [..., C, 1]."""
    row = np.arange(total[0].shape[-2])
    lower = row[:, None] >= row

    def difference(x: jax.Array) -> jax.Array:
        # Above the diagonal exp would overflow: mask the exponent, not the exponential.
        return jnp.where(lower, x - jnp.swapaxes(x, -1, -2), jnp.float32(-jnp.inf))

    return _decay(difference, total, formats)


def _decayed_products(
    x: jax.Array, k: jax.Array, total: _Sums, formats: DeltaRuleFormats
) -> jax.Array:
    """sum_c x_ic k_jc exp(G_ic - G_jc) for j <= i, else 0: [..., C, C]; all three [..., C, K].

    exp(G_i) exp(-G_j) would overflow. Take instead the smallest of the blocks of 2, 4, .., C rows
    that holds both i and j, and r, the first row of its second half: j < r <= i, so neither factor
    of exp(G_i - G_r) exp(G_r - G_j) is above one, whatever the gates are. Each block size is one
    batched dot; sizes up to 16 share the 16-row blocks, where most of the dot is masked.
    """
    chunk = x.shape[-2]
    x_rows, k_rows = _rows(x, BLOCK), _rows(k, BLOCK)
    row = np.arange(BLOCK)
    pairs = _dot("ik,jk", x_rows, k_rows, formats.dot)
    out = jnp.where(row[:, None] == row, pairs, 0)
    half = 1
    while half < BLOCK:
        block = row // (2 * half)
        second = (row % (2 * half) >= half)[:, None]
        factor = _decay(functools.partial(_from_middle, half=half), total, formats)
        factor = _rows(factor, BLOCK)
        left, right = jnp.where(second, factor * x_rows, 0), jnp.where(second, 0, factor * k_rows)
        pairs = _dot("ik,jk", left, right, formats.dot)
        out = out + jnp.where(block[:, None] == block, pairs, 0)
        half *= 2
    while half < chunk:
        factor = _decay(functools.partial(_from_middle, half=half), total, formats)
        left, right = _rows(factor * x, 2 * half), _rows(factor * k, 2 * half)
        below = _dot("ik,jk", left[..., half:, :], right[..., :half, :], formats.dot)
        out = _merge(out[..., 0::2, :, :], below, out[..., 1::2, :, :])
        half *= 2
    return out[..., 0, :, :]


def _from_middle(total: jax.Array, half: int) -> jax.Array:
    """G_i - G_r for the second half of each block of 2 * half rows, G_r - G_i for the first.

    r is the first row of the second half, so neither is above zero.
    """
    blocks = _rows(total, 2 * half)
    early, late = blocks[..., :half, :], blocks[..., half:, :]
    middle = late[..., :1, :]
    return jnp.concatenate([middle - early, late - middle], axis=-2).reshape(total.shape)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _unit_lower_inverse(a: jax.Array, dot: str) -> jax.Array:
    """(I + strict_lower(a))^-1 for a [..., C, C].

    Forward substitution inside blocks of 16 rows, for all blocks at once; neighbours then merge
    by X21 = -X22 a21 X11. A Neumann series over the chunk overflows for keys that point the same
    way. The derivative is the algebraic one, -X da X.
    """
    chunk = a.shape[-1]
    row = np.arange(chunk)
    a = jnp.where(row[:, None] > row, a, 0)
    blocks = _diagonal_blocks(a, BLOCK)
    eye = jnp.broadcast_to(jnp.eye(BLOCK, dtype=jnp.float32), blocks.shape)
    inverse = lax.linalg.triangular_solve(
        blocks, eye, left_side=True, lower=True, unit_diagonal=True
    )
    half = BLOCK
    while half < chunk:
        early, late = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        below = _diagonal_blocks(a, 2 * half)[..., half:, :half]
        below = _dot("ik,kj", _dot("ik,kj", late, below, dot), early, dot)
        inverse = _merge(early, -below, late)
        half *= 2
    return inverse[..., 0, :, :]


@_unit_lower_inverse.defjvp
def _unit_lower_inverse_jvp(
    dot: str, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    inverse = _unit_lower_inverse(primals[0], dot)
    row = np.arange(inverse.shape[-1])
    change = jnp.where(row[:, None] > row, tangents[0], 0)
    change = _dot("ik,kj", _dot("ik,kj", inverse, change, dot), inverse, dot)
    return inverse, -change


def _rows(x: jax.Array, size: int) -> jax.Array:
    """[..., C, D] -> [..., C / size, size, D]."""
    return x.reshape(*x.shape[:-2], x.shape[-2] // size, size, x.shape[-1])


def _diagonal_blocks(x: jax.Array, size: int) -> jax.Array:
    """The C / size square blocks on the diagonal of [..., C, C]: [..., C / size, size, size]."""
    starts = range(0, x.shape[-1], size)
    return jnp.stack([x[..., i : i + size, i : i + size] for i in starts], axis=-3)


def _merge(early: jax.Array, below: jax.Array, late: jax.Array) -> jax.Array:
    """The block matrix [[early, 0], [below, late]]."""
    top = jnp.concatenate([early, jnp.zeros_like(early)], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([below, late], axis=-1)], axis=-2)

"""The delta rule as plain as it can be written, for tests and for finding out who is wrong.

- `recurrence` and `recurrent`: the recurrence, one token after another. This is the truth.
- `chunked`: the chunk equations of `xla.py`, one chunk after another, every rounding site written
  where `DeltaRuleFormats` puts it. This is the truth's twin for rounded formats: an
  implementation with the same formats must agree with it to the last float32 digits.

All are differentiable, repeat key heads, and work in the dtype of q: in float64 under
`jax_enable_x64`, where only the named sites round.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.delta_rule.formats import DeltaRuleFormats
from pallas_kernels.formats import BF16, Format, round_to

RECURRENCE_SITES = ("state", "g", "exp_g", "beta")
_Results = tuple[jax.Array, jax.Array]


def recurrence(
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
) -> _Results:
    """o [B, T, Hv, V] and the final state [B, Hv, K, V]; arguments as the public `chunked`.

    `formats.state` rounds the final state only. NotImplementedError for a rounded format of a
    tensor that only chunks have, and for dot="default".
    """
    sites = {name: getattr(formats, name) for name in DeltaRuleFormats.__dataclass_fields__}
    rounded = [
        name
        for name, fmt in sites.items()
        if isinstance(fmt, Format) and not fmt.is_exact and name not in RECURRENCE_SITES
    ]
    if formats.dot != "highest":
        rounded.append("dot")
    if rounded:
        raise NotImplementedError(
            f"recurrence has no chunks, so nothing to round for {', '.join(rounded)}."
        )
    inputs = _prepare(q, k, v, g, beta, lengths)
    return _scan_tokens(*inputs, initial_state, lengths, scale, formats, every_step=False)


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
) -> _Results:
    """As `recurrence`, with the state rounded to `formats.state` after every real token."""
    inputs = _prepare(q, k, v, g, beta, lengths)
    return _scan_tokens(*inputs, state, lengths, scale, formats, every_step=True)


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
) -> _Results:
    """The chunk equations with every rounding site; arguments as the public `chunked`."""
    dtype, length = _dtype(q), q.shape[1]
    inputs = _prepare(q, k, v, g, beta, lengths)
    count = -(-length // formats.chunk)

    def split(x: jax.Array) -> jax.Array:  # [B, T, H, D] -> [N, B, H, C, D]
        x = jnp.pad(x, ((0, 0), (0, count * formats.chunk - length), (0, 0), (0, 0)))
        x = x.reshape(x.shape[0], count, formats.chunk, *x.shape[2:])
        return x.transpose(1, 0, 3, 2, 4)

    state = _round(initial_state.astype(dtype), formats.chunk_state)
    state, o = lax.scan(
        lambda state, chunk: _one_chunk(state, *chunk, formats), state, tuple(map(split, inputs))
    )
    o = o.transpose(1, 0, 3, 2, 4).reshape(q.shape[0], -1, *v.shape[2:])[:, :length]
    return o * jnp.asarray(scale, dtype), _round(state, formats.state)


def _one_chunk(
    state: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    formats: DeltaRuleFormats,
) -> tuple[jax.Array, jax.Array]:
    """The next state [B, H, K, V] and o / scale [B, H, C, V]; g [B, H, C, 1 or K]."""
    per_channel = g.shape[-1] > 1
    row = np.arange(formats.chunk)
    lower, strict = row[:, None] >= row, row[:, None] > row

    def dot(a: jax.Array, b: jax.Array) -> jax.Array:
        if formats.dot == "default":
            a, b = _round(a, BF16), _round(b, BF16)
        return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)

    def exp(x: jax.Array) -> jax.Array:
        return _round(jnp.exp(x), formats.exp_g)

    def transposed(x: jax.Array) -> jax.Array:
        return jnp.swapaxes(x, -1, -2)

    def decayed(x: jax.Array) -> jax.Array:  # sum_c x_ic k_jc exp(G_ic - G_jc)
        if not per_channel:
            exponent = jnp.where(lower, total - transposed(total), -jnp.inf)
            return dot(x, transposed(k)) * exp(exponent)
        return _decayed_by_channel(x, k, total, dot, exp)

    g, beta = _round(g, formats.g), _round(beta, formats.beta)
    total = _round(jnp.cumsum(g, axis=-2), formats.g_cumsum)
    last = total[..., -1:, :]

    a = jnp.where(strict, beta * decayed(k), 0)
    inverse = _round(_unit_lower_inverse(a, dot), formats.inverse)
    u = _round(dot(inverse, beta * v), formats.u)
    w = _round(dot(inverse, exp(total) * beta * k), formats.w)
    p = _round(jnp.where(lower, decayed(q), 0), formats.p)

    v_new = u - dot(w, _round(state, formats.state_operand))
    intra = dot(p, _round(v_new, formats.v_new))
    h = _round(state, formats.h)
    if per_channel:
        o = dot(exp(total) * q, h) + intra
        update = dot(transposed(exp(last - total) * k), _round(v_new, formats.v_new))
    else:
        o = exp(total) * dot(q, h) + intra
        update = dot(transposed(k), _round(exp(last - total) * v_new, formats.v_new))
    return _round(transposed(exp(last)) * state + update, formats.chunk_state), o


def _decayed_by_channel(
    x: jax.Array,
    k: jax.Array,
    total: jax.Array,
    dot: Callable[[jax.Array, jax.Array], jax.Array],
    exp: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """sum_c x_ic k_jc exp(G_ic - G_r) exp(G_r - G_jc) for j <= i.

    r is the first row of the second half of the smallest power-of-two block that holds i and j.
    """
    chunk = x.shape[-2]
    row = np.arange(chunk)
    out = jnp.where(row[:, None] == row, dot(x, jnp.swapaxes(k, -1, -2)), 0)
    half = 1
    while half < chunk:
        block = row // (2 * half)
        reference = total[..., block * 2 * half + half, :]
        is_second = row // half % 2 == 1
        left = x * exp(jnp.minimum(total - reference, 0))
        right = k * exp(jnp.minimum(reference - total, 0))
        pairs = (block[:, None] == block) & is_second[:, None] & ~is_second
        out = out + jnp.where(pairs, dot(left, jnp.swapaxes(right, -1, -2)), 0)
        half *= 2
    return out


def _unit_lower_inverse(
    a: jax.Array, dot: Callable[[jax.Array, jax.Array], jax.Array]
) -> jax.Array:
    """(I + a)^-1 for strictly lower a [..., C, C]: substitution up to 16 rows, halves above."""
    rows = a.shape[-1]
    if rows <= 16:
        eye = jnp.broadcast_to(jnp.eye(rows, dtype=a.dtype), a.shape)
        return lax.linalg.triangular_solve(a, eye, left_side=True, lower=True, unit_diagonal=True)
    half = rows // 2
    early = _unit_lower_inverse(a[..., :half, :half], dot)
    late = _unit_lower_inverse(a[..., half:, half:], dot)
    below = -dot(dot(late, a[..., half:, :half]), early)
    return jnp.block([[early, jnp.zeros_like(early)], [below, late]])


def _scan_tokens(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    lengths: jax.Array | None,
    scale: float,
    formats: DeltaRuleFormats,
    every_step: bool,
) -> _Results:
    """The recurrence over prepared inputs [B, T, H, D]; padding leaves the state untouched."""
    dtype, (batch, length) = q.dtype, q.shape[:2]
    g, beta = _round(g, formats.g), _round(beta, formats.beta)
    if lengths is None:
        lengths = jnp.full((batch,), length, jnp.int32)

    def over_keys(x: jax.Array, state: jax.Array) -> jax.Array:  # x^T S for each head
        # The barrier keeps the sum apart: jaxlib 0.10.2 gets some fused ones wrong on a CPU.
        return jnp.sum(lax.optimization_barrier(x[..., None] * state), axis=-2)

    def step(state: jax.Array, token: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q, k, v, g, beta, valid = token
        new = _round(jnp.exp(g), formats.exp_g)[..., None] * state
        delta = (v - over_keys(k, new)) * beta
        new = new + k[..., None] * delta[..., None, :]
        o = over_keys(q, new)
        new = _round(new, formats.state) if every_step else new
        return jnp.where(valid[:, None, None, None], new, state), o

    valid = jnp.arange(length, dtype=jnp.int32)[:, None] < lengths
    tokens = tuple(jnp.swapaxes(x, 0, 1) for x in (q, k, v, g, beta))
    state, o = lax.scan(step, state.astype(dtype), (*tokens, valid))
    state = state if every_step else _round(state, formats.state)
    return jnp.swapaxes(o, 0, 1) * jnp.asarray(scale, dtype), state


def _prepare(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    lengths: jax.Array | None,
) -> tuple[jax.Array, ...]:
    """All five as [B, T, Hv, D] in one dtype, key heads repeated, zero past `lengths`."""
    dtype, groups = _dtype(q), v.shape[2] // q.shape[2]
    q, k = jnp.repeat(q, groups, axis=2), jnp.repeat(k, groups, axis=2)
    g = g if g.ndim == 4 else g[..., None]
    inputs = tuple(x.astype(dtype) for x in (q, k, v, g, beta[..., None]))
    if lengths is None:
        return inputs
    valid = (jnp.arange(q.shape[1], dtype=jnp.int32) < lengths[:, None])[..., None, None]
    return tuple(jnp.where(valid, x, 0) for x in inputs)


def _dtype(q: jax.Array) -> jnp.dtype:
    return jnp.dtype("float64" if q.dtype == jnp.float64 else "float32")


def _round(x: jax.Array, fmt: Format) -> jax.Array:
    return x if fmt.is_exact else round_to(x, fmt).astype(x.dtype)

"""Delta rules with one planted fault each: accuracy bugs that inference kernels really had.

A plain float32 NumPy chunk form and token form, where `fault` names the one line that is wrong.
The same forms without a fault pass every check, so a refusal is the fault's doing. Those that
`kernjax.faults` plants in a model are checked against these (test_faults_oracle.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import ml_dtypes
import numpy as np
from delta_rule_cases import Implementation

CHUNK, BLOCK = 64, 16


def planted(fault: str | None) -> Implementation:
    """Chunk form and token form with the fault planted."""
    chunked = functools.partial(_chunked, fault)
    return Implementation(fault or "none", chunked, functools.partial(_recurrent, fault))


def _bf16(x: np.ndarray) -> np.ndarray:
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def _when(active: bool, change: Callable[[np.ndarray], np.ndarray], x: np.ndarray) -> np.ndarray:
    return change(x) if active else x


def _chunked(fault, q, k, v, g, beta, state, *, lengths=None, formats=None):
    q, k, g, beta, v = (np.asarray(x, np.float32) for x in (q, k, g, beta, v))
    state, length = np.asarray(state, np.float32), q.shape[1]
    if lengths is not None:
        real = np.arange(length) < lengths[:, None]
        masked = {"beta unmasked": (0, 1, 2, 4), "k unmasked": (0, 2, 3, 4),
                  "q unmasked": (1, 2, 3, 4)}.get(fault, range(5))  # fmt: skip
        inputs = [q, k, v, g, beta]
        for i in masked:
            inputs[i] = np.where(
                real.reshape(real.shape + (1,) * (inputs[i].ndim - 2)), inputs[i], 0
            )
        q, k, v, g, beta = inputs
    groups = v.shape[2] // q.shape[2]
    if fault == "key heads permuted":  # g19: h % Hk instead of h // (Hv // Hk)
        q, k = np.tile(q, (1, 1, groups, 1)), np.tile(k, (1, 1, groups, 1))
    else:
        q, k = np.repeat(q, groups, axis=2), np.repeat(k, groups, axis=2)
    g = g if g.ndim == 4 else g[..., None]
    if fault == "decay exponent x24":  # g18: A_log exponentiated twice
        g = np.float32(24) * g
    g = _when(fault == "control: g bf16", _bf16, g)
    q = _when(fault == "control: q and k bf16", _bf16, q)
    k = _when(fault == "control: q and k bf16", _bf16, k)

    count = -(-length // CHUNK)
    pads = ((0, 0), (0, count * CHUNK - length), (0, 0), (0, 0))
    inputs = [np.moveaxis(np.pad(x, pads), 2, 1) for x in (q, k, v, g, beta[..., None])]
    if fault == "pads update the state":  # g15: the last real token is repeated, and written
        for i, x in enumerate(inputs[:4]):
            inputs[i] = np.concatenate([x[:, :, :length], *[x[:, :, length - 1 : length]] * (
                count * CHUNK - length)], axis=2)  # fmt: skip
        x = inputs[4]
        inputs[4] = np.where(np.arange(count * CHUNK)[:, None] < length, x, 0.5).astype(np.float32)
    o = []
    for n in range(count):
        chunk = [x[:, :, n * CHUNK : (n + 1) * CHUNK] for x in inputs]
        if fault == "state not carried" and n:  # g01
            state = np.zeros_like(state)
        if fault == "state dropped once" and n == 3:  # g02
            state = np.zeros_like(state)
        if fault == "state transposed":  # g03
            state = np.swapaxes(state, -1, -2)
        new, o_chunk = _one_chunk(fault, state, *chunk)
        if not (fault == "last update skipped" and n == count - 1):  # g14
            state = new
        state = _when(fault == "control: state bf16 per chunk", _bf16, state)
        o.append(o_chunk)
    o = np.concatenate(o, axis=2)[:, :, :length] * np.float32(q.shape[-1] ** -0.5)
    return np.moveaxis(o, 1, 2), state


@np.errstate(over="ignore", invalid="ignore")
def _one_chunk(fault, state, q, k, v, g, beta):
    row = np.arange(CHUNK)
    lower, strict = row[:, None] >= row, row[:, None] > row
    total = np.cumsum(g, axis=-2, dtype=np.float32)
    if fault == "gate sum in bf16":  # g04: the accumulator itself is bf16
        total = g.copy()
        for i in range(1, CHUNK):
            total[..., i, :] = _bf16(_bf16(total[..., i - 1, :]) + g[..., i, :])
    last = total[..., -1:, :]
    keys = np.swapaxes(k, -1, -2)
    if fault == "gates split from the chunk's start":  # exp(-G) overflows
        decay_k = np.swapaxes(k * np.exp(-total), -1, -2)
        kk, qk = ((x * np.exp(total)) @ decay_k for x in (k, q))
    elif g.shape[-1] == 1:
        exponent = total - np.swapaxes(total, -1, -2)
        seen = row[:, None] >= row - 1 if fault == "decay mask one off" else lower  # g07
        decay = np.exp(np.where(seen, exponent, -np.inf))
        if fault == "decay mask one off":
            lower = seen
        kk, qk = (k @ keys) * decay, (q @ keys) * decay
    else:
        kk, qk = np.zeros((2, *q.shape[:-1], CHUNK), np.float32)
        for j in range(CHUNK):
            exponent = np.minimum(total - total[..., j : j + 1, :], 0)
            column = k[..., j : j + 1, :] * np.exp(exponent)
            kk[..., j], qk[..., j] = (k * column).sum(-1), (q * column).sum(-1)
    a = np.where(strict, kk if fault == "beta missing in k k^T" else beta * kk, 0)  # g09
    inverse = _inverse(fault, a)
    decay_in, decay_out = np.exp(total), np.exp(last - total)
    if fault == "key decay missing":  # g12
        decay_out = np.ones_like(decay_out)
    u, w = inverse @ (beta * v), inverse @ (beta * decay_in * k)
    read = w @ state
    v_new = u - _when(fault == "residual rounded before subtraction", _bf16, read)  # g23
    v_new = _when(fault in ("control: v_new bf16", "residual rounded before subtraction"),
                  _bf16, v_new)  # fmt: skip
    o = (decay_in * q) @ state + np.where(lower, qk, 0) @ v_new
    return np.swapaxes(np.exp(last), -1, -2) * state + np.swapaxes(k * decay_out, -1, -2) @ v_new, o


def _inverse(fault, a):
    eye = np.eye(CHUNK)
    if fault == "Neumann series":
        power, inverse = -a, (eye - a).astype(np.float32)
        for _ in range(5):
            power = power @ power
            inverse = np.nan_to_num(inverse + inverse @ power)
        return inverse
    if fault == "off-diagonal blocks missing":  # g10
        block = np.arange(CHUNK) // BLOCK
        return (np.linalg.inv(eye + a) * (block[:, None] == block)).astype(np.float32)
    return np.linalg.inv(eye + a).astype(np.float32)


def _recurrent(fault, q, k, v, g, beta, state, *, formats=None):
    state = np.asarray(state, np.float32)
    groups = v.shape[2] // q.shape[2]
    q, k = np.repeat(q, groups, axis=2), np.repeat(k, groups, axis=2)
    g = g if g.ndim == 4 else g[..., None]
    o = np.zeros(v.shape, np.float32)
    for t in range(q.shape[1]):
        decay = _when(fault == "decay in bf16", _bf16, np.exp(g[:, t]))  # g27: .999 becomes 1
        state = decay[..., None] * state
        delta = (v[:, t] - np.einsum("bhk,bhkv->bhv", k[:, t], state)) * beta[:, t, :, None]
        state = state + k[:, t][..., None] * delta[..., None, :]
        o[:, t] = np.einsum("bhk,bhkv->bhv", q[:, t], state)
        state = _when(fault == "state bf16 per token", _bf16, state)  # g22
    return o * np.float32(q.shape[-1] ** -0.5), state

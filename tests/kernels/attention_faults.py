"""Attention with one planted fault each: accuracy bugs that inference kernels really had.

A plain float32 NumPy flash attention, where `fault` names the one line that is wrong. Without a
fault it passes every check, so a refusal is the fault's doing. Those that `kernjax.faults` plants
in a model are checked against these (test_faults_oracle.py).
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
from attention_cases import Case, Implementation, rounded, visible

from pallas_kernels.formats import F32, Format


def planted(fault: str | None) -> Implementation:
    prefill = functools.partial(_outer, fault)
    decode = functools.partial(_outer, {"decode ignores the offset": "no prefix"}.get(fault, fault))
    return Implementation(fault or "none", prefill, decode)


def _outer(fault: str | None, case: Case) -> np.ndarray:
    """The faults outside the kernel: positions, lengths, scales."""
    length = case.kv_length
    match fault:
        case "causal sees the next":
            case = case._replace(q_offset=case.q_offset + 1)
        case "causal misses itself":
            case = case._replace(q_offset=case.q_offset - 1)
        case "no prefix":
            case = case._replace(q_offset=np.zeros_like(case.q_offset))
        case "kv_length ignored":
            case = case._replace(kv_length=np.full_like(length, case.k.shape[1]))
        case "longest kv_length for all":
            case = case._replace(kv_length=np.full_like(length, length.max()))
        case "scale twice":
            case = case._replace(scale=case.scale**2)
        case "scale by width":
            case = case._replace(scale=case.q.shape[-1] ** -0.5)
        case "k_scale ignored":
            case = case._replace(k_scale=1.0)
        case "v_scale ignored":
            case = case._replace(v_scale=1.0)
        case "k_scale inverted":
            case = case._replace(k_scale=1 / case.k_scale)
        case "k_scale for v":
            case = case._replace(v_scale=case.k_scale)
        case "other block in decode" if case.q.shape[1] == 1:
            case = case._replace(formats=_with(case, block_k=case.formats.block_k // 2))
        case "p unscaled":
            case = case._replace(formats=_with(case, p=Format(case.formats.p.dtype)))
        case "lazy rescale ignored":
            case = case._replace(formats=_with(case, rescale_threshold=0.0))
        case "lazy threshold in nats":
            threshold = case.formats.rescale_threshold * np.log2(np.e)
            case = case._replace(formats=_with(case, rescale_threshold=threshold))
        case "wrong row sum":
            other = "rounded" if case.formats.row_sum == "unrounded" else "unrounded"
            case = case._replace(formats=_with(case, row_sum=other))
        case "split without LSE" if case.k.shape[1] > 1:
            half = case.k.shape[1] // 2
            left = case._replace(k=case.k[:, :half], v=case.v[:, :half])
            right = case._replace(
                k=case.k[:, half:], v=case.v[:, half:], q_offset=case.q_offset - half,
                kv_length=case.kv_length - half,
            )  # fmt: skip
            return (_flash(None, left) + _flash(None, right)) / np.float32(2)
        case "other result each time":
            noise = np.random.default_rng().standard_normal(case.q.shape[:3])[..., None]
            return _flash(None, case) * (1 + 1e-7 * noise).astype(np.float32)
    return _flash(fault, case)


def _with(case: Case, **changes):
    return dataclasses.replace(case.formats, **changes)


def _flash(fault: str | None, case: Case) -> np.ndarray:
    f = case.formats
    batch, tokens, heads, width = case.q.shape
    capacity, groups = case.k.shape[1:3]
    used = (np.arange(capacity) < case.kv_length[:, None])[:, :, None, None]
    k = case.k.astype(np.float32) * np.float32(case.k_scale)
    v = case.v.astype(np.float32) * np.float32(case.v_scale)
    if fault != "garbage only masked in scores":
        v = np.where(used, v, 0)
    k = np.where(used, k, 0)
    q, k, v = (_round(x, fmt) for x, fmt in ((case.q.astype(np.float32), f.q), (k, f.k), (v, f.v)))
    if fault == "key heads interleaved":  # n % G for n // (N // G)
        k, v = (np.tile(x, (1, 1, heads // groups, 1)) for x in (k, v))
    else:
        k, v = (np.repeat(x, heads // groups, axis=2) for x in (k, v))
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    scores = q @ k.transpose(0, 1, 3, 2) * np.float32(case.scale)
    scores = _round(scores, f.scores)
    seen = visible(case)
    if fault == "positions in int16":
        key = np.arange(capacity).astype(np.int16)
        position = (case.q_offset[:, None] + np.arange(tokens)).astype(np.int16)
        seen = (key <= position[:, :, None]) & used[:, None, :, 0, 0]
    scores = np.where(seen[:, None], scores, np.float32(-np.inf))

    m = np.full((batch, heads, tokens, 1), -np.inf, np.float32)
    total, acc = np.zeros_like(m), np.zeros((batch, heads, tokens, v.shape[-1]), np.float32)
    for start in range(0, capacity, f.block_k):
        s, v_tile = scores[..., start : start + f.block_k], v[:, :, start : start + f.block_k]
        top = np.maximum(m, s.max(-1, keepdims=True))
        if fault != "m not rounded":
            top = _round(top, f.m)
        kept = _zero_where_empty(top) - m <= f.rescale_threshold * np.log(2)
        top = np.where(kept, m, top).astype(np.float32)
        safe = _zero_where_empty(top)
        p, alpha = np.exp(s - safe), np.exp(m - safe)
        if fault == "l summed from rounded P":
            mass = _round(p, f.p).sum(-1, keepdims=True)
        else:
            mass = (_round(p, f.p) if f.row_sum == "rounded" else p).sum(-1, keepdims=True)
        p = p if fault == "p not rounded" else _round(p, f.p)
        total = _round(total * alpha + mass, F32 if fault == "l not rounded" else f.l)
        grown = acc if fault == "acc not rescaled at a new max" else acc * alpha
        acc = _round(grown + p @ v_tile, F32 if fault == "acc not rounded" else f.acc)
        m = top
    with np.errstate(invalid="ignore"):
        out = acc / np.where((total == 0) & (fault != "keyless rows divide by 0"), 1, total)
    if fault == "output in bf16":
        out = _round(out, Format("bfloat16"))
    return out.transpose(0, 2, 1, 3).astype(np.float32)


def _round(x: np.ndarray, fmt: Format) -> np.ndarray:
    return rounded(x, fmt).astype(np.float32)


def _zero_where_empty(m: np.ndarray) -> np.ndarray:
    return np.where(np.isneginf(m), np.float32(0), m)

"""Inputs, oracles and checks for attention implementations.

A check takes an `Implementation` and raises AssertionError: the same functions judge our kernels
and refuse the planted faults of attention_faults.py. Oracles are NumPy in float64 and share no code
with the package: `dense` is the truth, `tiled` rounds where `AttentionFormats` says.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import ml_dtypes
import numpy as np

from kernjax.scoring.programs import CPU_OPTIONS
from pallas_kernels import attention
from pallas_kernels.attention import AttentionFormats
from pallas_kernels.formats import BF16, E4M3, E4M3_256, E4M3_448, F16, Format


class Implementation(NamedTuple):
    """Prefill and decode, both called as `prefill(case)` and `decode(case)`."""

    name: str
    prefill: Callable[[Case], np.ndarray]
    decode: Callable[[Case], np.ndarray]


class Case(NamedTuple):
    """One call: arrays and scales, as `attention.prefill` takes them."""

    q: np.ndarray  # [B, T, N, H]
    k: np.ndarray  # [B, S, G, H]
    v: np.ndarray  # [B, S, G, Hv]
    q_offset: np.ndarray  # int32 [B]
    kv_length: np.ndarray  # int32 [B]
    scale: float
    k_scale: float = 1.0
    v_scale: float = 1.0
    formats: AttentionFormats = AttentionFormats(block_k=64)  # several tiles at these lengths

    def tokens(self, start: int, stop: int) -> Case:
        """The call for query tokens start..stop, when no later key has been written."""
        kv_length = np.minimum(self.kv_length, self.q_offset + stop)
        return self._replace(
            q=self.q[:, start:stop], q_offset=self.q_offset + np.int32(start), kv_length=kv_length
        )

    def row(self, b: int) -> Case:
        one = slice(b, b + 1)
        return self._replace(
            q=self.q[one], k=self.k[one], v=self.v[one], q_offset=self.q_offset[one],
            kv_length=self.kv_length[one],
        )  # fmt: skip


@functools.cache
def _jitted(op: str) -> Callable[..., jax.Array]:
    return jax.jit(
        getattr(attention, op),
        static_argnames=("formats", "implementation"),
        compiler_options=CPU_OPTIONS,  # as commands compile it
    )


def ours(name: str) -> Implementation:
    """An implementation of the package's tables, jitted, lengths and scales traced."""

    def call(op: str, case: Case) -> np.ndarray:
        # The tiled reference is a long program but a few distinct operations: not jitted.
        eager = name == "reference" and not case.formats.is_tile_independent
        function = getattr(attention, op) if eager else _jitted(op)
        rest = {field: getattr(case, field) for field in Case._fields[3:]}
        return np.asarray(function(case.q, case.k, case.v, implementation=name, **rest))

    prefill, decode = functools.partial(call, "prefill"), functools.partial(call, "decode")
    return Implementation(name, prefill, decode)


def make(
    seed: int,
    *,
    B: int = 2,
    T: int = 17,
    S: int = 150,
    N: int = 4,
    G: int = 2,
    H: int = 16,
    Hv: int = 16,
    sigma: float = 1.0,
    lengths: tuple[int, ...] | None = None,
    poison: bool = True,
    constant_v: bool = False,
) -> Case:
    """Scores of standard deviation `sigma`; the queries are the last T of kv_length tokens.

    `lengths` defaults to S and below; slots past them hold NaN.
    """
    rng = np.random.default_rng(seed)
    lengths = tuple(S - 23 * b for b in range(B)) if lengths is None else lengths
    kv_length = np.array(lengths, np.int32)
    q = rng.standard_normal((B, T, N, H), np.float32) * np.float32(sigma)
    k = rng.standard_normal((B, S, G, H), np.float32)
    v = rng.standard_normal((B, S, G, Hv), np.float32)
    if constant_v:
        v[:] = 1
    if poison:
        unused = np.arange(S) >= kv_length[:, None]
        k[unused] = np.nan
        v[unused] = np.nan
    return Case(q, k, v, kv_length - np.int32(T), kv_length, H**-0.5)


def visible(case: Case) -> np.ndarray:
    """bool [B, T, S]."""
    key = np.arange(case.k.shape[1])
    position = case.q_offset[:, None] + np.arange(case.q.shape[1])
    seen = key <= position[:, :, None]
    return seen & (key < case.kv_length[:, None])[:, None, :]


def raw_scores(case: Case, rounded: Callable[[np.ndarray, Format], np.ndarray]) -> tuple:
    """scores [B, N, T, S] (-inf where unseen) and values [B, N, S, Hv], float64."""
    share = case.q.shape[2] // case.k.shape[2]
    used = (np.arange(case.k.shape[1]) < case.kv_length[:, None])[:, :, None, None]
    k = np.where(used, case.k.astype(np.float64) * case.k_scale, 0)
    v = np.where(used, case.v.astype(np.float64) * case.v_scale, 0)
    formats = case.formats
    q = rounded(case.q.astype(np.float64), formats.q)
    k, v = rounded(k, formats.k), rounded(v, formats.v)
    k, v = (np.repeat(x, share, axis=2).transpose(0, 2, 1, 3) for x in (k, v))
    scores = q.transpose(0, 2, 1, 3) @ k.transpose(0, 1, 3, 2) * case.scale
    scores = rounded(scores, formats.scores)
    return np.where(visible(case)[:, None], scores, -np.inf), v


def dense(case: Case) -> np.ndarray:
    """The truth [B, T, N, Hv]: softmax in float64, nothing rounded."""
    scores, v = raw_scores(case, lambda x, fmt: x)
    m = scores.max(-1, keepdims=True)
    p = np.exp(scores - np.where(np.isneginf(m), 0, m))
    total = p.sum(-1, keepdims=True)
    return (p @ v / np.where(total == 0, 1, total)).transpose(0, 2, 1, 3)


def rounded(x: np.ndarray, fmt: Format) -> np.ndarray:
    """x on the format's grid by ml_dtypes, or by integers where only mantissa bits are named."""
    if fmt.is_exact:
        return x
    x = x.astype(np.float32)
    if fmt.mantissa_bits is not None:
        drop = 23 - fmt.mantissa_bits
        bits = x.view(np.uint32)
        bits = bits + np.uint32((1 << (drop - 1)) - 1) + ((bits >> np.uint32(drop)) & np.uint32(1))
        return (bits & ~np.uint32((1 << drop) - 1)).view(np.float32).astype(np.float64)
    y = x * np.float32(fmt.scale)
    if fmt.dtype == E4M3.dtype:
        y = np.clip(y, -448, 448)
    dtype = getattr(ml_dtypes, fmt.dtype, None) or np.dtype(fmt.dtype)
    return (y.astype(dtype).astype(np.float32) / np.float32(fmt.scale)).astype(np.float64)


def tiled(case: Case) -> np.ndarray:
    """The rounding-point oracle [B, T, N, Hv]: online softmax in float64, named sites rounded."""
    f = case.formats
    scores, v = raw_scores(case, rounded)
    m = np.full((*scores.shape[:3], 1), -np.inf)
    total, acc = np.zeros_like(m), np.zeros((*scores.shape[:3], v.shape[-1]))
    for start in range(0, scores.shape[-1], f.block_k):
        s, v_tile = scores[..., start : start + f.block_k], v[:, :, start : start + f.block_k]
        top = rounded(np.maximum(m, s.max(-1, keepdims=True)), f.m)
        safe = np.where(np.isneginf(top), 0, top)
        kept = (safe - m) / np.log(2) <= f.rescale_threshold
        top = np.where(kept, m, top)
        safe = np.where(np.isneginf(top), 0, top)
        p, alpha = np.exp(s - safe), np.exp(m - safe)
        p_rounded = rounded(p, f.p)
        mass = (p_rounded if f.row_sum == "rounded" else p).sum(-1, keepdims=True)
        total = rounded(total * alpha + mass, f.l)
        acc = rounded(acc * alpha + p_rounded @ v_tile, f.acc)
        m = top
    return (acc / np.where(total == 0, 1, total)).transpose(0, 2, 1, 3)


def in_parts(case: Case, keys: int) -> tuple[np.ndarray, np.ndarray]:
    """`tiled` over parts of so many keys, merged: outputs [1, T, N, Hv], log-sum-exp [1, T, N].

    One sequence whose queries all see a key.
    """
    parts = []
    for start in range(0, int(case.kv_length[0]), keys):
        these, shift = slice(start, start + keys), np.int32(start)
        part = case._replace(
            k=case.k[:, these], v=case.v[:, these], q_offset=case.q_offset - shift,
            kv_length=np.minimum(case.kv_length - shift, np.int32(keys)),
        )  # fmt: skip
        scores, _ = raw_scores(part, rounded)
        parts.append((tiled(part), np.logaddexp.reduce(scores, axis=-1).transpose(0, 2, 1)))
    lse = np.logaddexp.reduce([part for _, part in parts])
    return sum(o * np.exp(part - lse)[..., None] for o, part in parts), lse


def row_errors(o: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Relative error of each output vector, [B, T, N]."""
    assert o.shape == truth.shape and o.dtype == np.float32, (o.shape, truth.shape, o.dtype)
    assert np.isfinite(o).all(), "not finite"
    size = np.linalg.norm(truth, axis=-1)
    return np.linalg.norm(o - truth, axis=-1) / np.where(size == 0, 1, size)


def frobenius(o: np.ndarray, truth: np.ndarray) -> float:
    assert o.shape == truth.shape and o.dtype == np.float32, (o.shape, truth.shape, o.dtype)
    assert np.isfinite(o).all(), "not finite"
    return float(np.linalg.norm(o - truth) / np.linalg.norm(truth))


def assert_true(o: np.ndarray, case: Case, bound: float = 2e-6) -> None:
    """Near the truth as a whole, and in no query position 10 times less so."""
    truth = dense(case)
    error = frobenius(o, truth)
    assert error <= bound, f"{error=:.2e} above {bound=}"
    worst = row_errors(o, truth).max()
    assert worst <= 10 * bound, f"{worst=:.2e}"


# --- checks; each raises AssertionError ---------------------------------------------------------


def check_score_spread(impl: Implementation) -> None:
    for sigma in (0.5, 1.0, 2.0, 4.0):
        case = make(1, sigma=sigma)
        assert_true(impl.prefill(case), case)


def check_maxima(impl: Implementation) -> None:
    """A late hot key, and maxima that ascend and descend from tile to tile."""
    case = make(2)
    for shape in ("late", "ascending", "descending"):
        k = case.k.copy()
        direction = case.q[:, 8].reshape(2, 2, 2, 16).mean(2)[:, None]  # towards these queries
        if shape == "late":
            k[:, 100:101] = 8 * direction
        else:
            ramp = np.linspace(0, 6, k.shape[1], dtype=np.float32)[None, :, None, None]
            k = k + (ramp if shape == "ascending" else ramp[:, ::-1]) * direction
        changed = case._replace(k=k)
        assert_true(impl.prefill(changed), changed)


def check_lengths(impl: Implementation) -> None:
    """Query counts around tile edges, with a cached prefix and NaN past each row's length."""
    for tokens in (1, 15, 63, 65):
        case = make(3, T=tokens)
        assert_true(impl.prefill(case), case)


def check_first_tokens(impl: Implementation) -> None:
    """No prefix: query t sees t + 1 keys, so one key too many or too few is plain."""
    case = make(4, T=17, lengths=(17, 17))
    assert_true(impl.prefill(case), case)


def check_ragged(impl: Implementation) -> None:
    """kv_length below the queries' own positions (padding), and an empty row: zeros."""
    case = make(5, lengths=(40, 150))._replace(
        q_offset=np.array([33, 120], np.int32), kv_length=np.array([40, 0], np.int32)
    )
    o = impl.prefill(case)
    assert_true(o, case)
    assert (o[1] == 0).all()


def check_heads(impl: Implementation) -> None:
    """6 query heads on 1 key head, 1 on 1 each, and values narrower than keys (MLA's 192/128)."""
    for N, G, H, Hv in ((6, 1, 16, 16), (2, 2, 16, 16), (4, 2, 192, 128)):
        case = make(6, N=N, G=G, H=H, Hv=Hv)
        assert_true(impl.prefill(case), case)


def check_scales(impl: Implementation) -> None:
    """fp8 caches whose scales are no 1, and a softmax scale that is not H**-0.5."""
    case = make(7)
    for k_scale, v_scale, scale in ((0.25, 0.5, 0.25), (2.0, 0.25, 0.25), (0.5, 2.0, 0.1)):
        k, v = (
            (x / np.float32(s)).astype(ml_dtypes.float8_e4m3fn)
            for x, s in ((case.k, k_scale), (case.v, v_scale))
        )
        scaled = case._replace(k=k, v=v, k_scale=k_scale, v_scale=v_scale, scale=scale)
        assert_true(impl.prefill(scaled), scaled)


def check_splits(impl: Implementation) -> None:
    """One shot, two prefills, and prefill then token by token agree: the same numbers."""
    case = make(8)
    whole = impl.prefill(case)
    split = [impl.prefill(case.tokens(0, 15)), impl.prefill(case.tokens(15, 17))]
    steps = [impl.decode(case.tokens(t, t + 1)) for t in range(17)]
    pair = impl.decode(case.tokens(15, 17))
    np.testing.assert_allclose(np.concatenate(split, 1), whole, rtol=0, atol=2e-6)
    np.testing.assert_allclose(np.concatenate(steps, 1), whole, rtol=0, atol=2e-6)
    np.testing.assert_allclose(pair, whole[:, 15:], rtol=0, atol=2e-6)


def check_batch(impl: Implementation) -> None:
    """Each row of a batch is what it is alone."""
    case = make(9)
    batch = impl.prefill(case)
    for b in range(2):
        np.testing.assert_allclose(batch[b : b + 1], impl.prefill(case.row(b)), rtol=0, atol=2e-6)


def check_repeatable(impl: Implementation) -> None:
    case = make(10)
    first = impl.prefill(case)
    assert first.tobytes() == impl.prefill(case).tobytes()


def check_far_positions(impl: Implementation) -> None:
    """Positions beyond int16 (32767) and uint16 (65535), at a small width."""
    far = np.array([33_000, 66_000], np.int32)
    case = make(11, T=2, S=66_100, N=1, G=1, H=4, Hv=4, lengths=tuple(far))
    assert_true(impl.prefill(case), case)


def check_mass(impl: Implementation) -> None:
    """V = 1: the output is the mass that P keeps. e4m3 loses it, prescaled e4m3 does not."""
    case = make(12, T=8, S=2048, H=16, sigma=2.0, constant_v=True, lengths=(2048, 2000))
    direct = impl.prefill(case._replace(formats=AttentionFormats(p=E4M3)))
    assert 0.9 < direct.mean() < 0.995, direct.mean()
    for fmt in (E4M3_448, E4M3_256):
        kept = impl.prefill(case._replace(formats=AttentionFormats(p=fmt)))
        assert 0.998 < kept.mean() < 1.002, (str(fmt), kept.mean())


def check_rounding(impl: Implementation, formats: AttentionFormats, sigma: float = 2.0) -> None:
    """Rounds where the oracle rounds.

    Near a tie a last-bit difference of float32 flips one rounding, which moves one output vector:
    four fifths of them must agree to float32, and all together to a third of what the formats cost.
    """
    case = make(13, T=24, S=400, sigma=sigma, lengths=(400, 350))._replace(formats=formats)
    o, oracle = impl.prefill(case), tiled(case)
    bulk = float(np.quantile(row_errors(o, oracle), 0.8))
    assert bulk <= 2e-6, f"{bulk=:.2e}"
    cost = np.linalg.norm(oracle - dense(case))
    apart = np.linalg.norm(o - oracle)
    assert apart <= cost / 3 + 2e-6 * np.linalg.norm(oracle), f"{apart / cost=:.2e}"


CHECKS = (
    check_score_spread,
    check_maxima,
    check_lengths,
    check_first_tokens,
    check_ragged,
    check_heads,
    check_scales,
    check_splits,
    check_batch,
    check_repeatable,
    check_far_positions,
    check_mass,
)

# name -> formats whose every rounding site shows, over several key tiles.
ROUNDINGS = {
    "operands": AttentionFormats(q=BF16, k=E4M3, v=E4M3_448, block_k=128),
    "scores": AttentionFormats(scores=BF16, block_k=128),
    "p bf16": AttentionFormats(p=BF16, block_k=128),
    "p f16": AttentionFormats(p=F16, block_k=128),
    "p m4": AttentionFormats(p=Format(mantissa_bits=4), v=BF16, block_k=128),
    "p fp8": AttentionFormats(p=E4M3, block_k=128),
    "p fp8*448": AttentionFormats(p=E4M3_448, block_k=128),
    "p fp8*448, bf16 dots": AttentionFormats(q=BF16, k=BF16, v=BF16, p=E4M3_448, block_k=128),
    "bf16": AttentionFormats(q=BF16, k=BF16, v=BF16, p=BF16, block_k=128),
    "row sum": AttentionFormats(p=E4M3, row_sum="rounded", block_k=128),
    "row sum, bf16 dots": AttentionFormats(v=BF16, p=E4M3_448, row_sum="rounded", block_k=128),
    "m l acc": AttentionFormats(m=BF16, l=BF16, acc=BF16, block_k=128),
    "lazy": AttentionFormats(p=E4M3_256, rescale_threshold=4.0, block_k=128),
}

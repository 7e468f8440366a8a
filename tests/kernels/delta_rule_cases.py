"""Inputs, truth and checks for any implementation of the delta rule.

A check takes an `Implementation` and raises AssertionError when it is wrong, so the same check
runs on the real one and on planted faults (`delta_rule_faults.py`), which it must refuse.
The truth is a float64 token recurrence in NumPy: never another chunked form.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from kernjax.scoring.programs import CPU_OPTIONS
from pallas_kernels import delta_rule
from pallas_kernels.delta_rule import DeltaRuleFormats
from pallas_kernels.formats import BF16

WINDOW = 64  # a fault at a chunk's edge is local: errors are taken per head and 64 tokens
F32_BUDGET = 1e-5

# Key cosine (1.0: runs of 16 identical keys), log decay per token, beta near one.
FAMILIES = (
    (0.0, -0.02, False),
    (0.3, -1e-3, False),
    (0.3, -0.3, False),
    (0.3, -5.0, False),
    (0.3, "alternating", False),
    (0.3, "strong, some weak", False),
    (0.6, -0.02, False),
    (0.9, -1e-3, True),
    (0.9, -0.02, True),
    (1.0, -1e-3, True),
    (1.0, -0.02, True),
)


class Case(NamedTuple):
    """Arguments of the rule in order, float32 (see `pallas_kernels.delta_rule.chunked`)."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    g: np.ndarray
    beta: np.ndarray
    state: np.ndarray

    def row(self, b: int) -> Case:
        return Case(*(x[b : b + 1] for x in self))

    def tokens(self, start: int, stop: int, state: Any = None) -> Case:
        state = self.state if state is None else np.asarray(state)
        return Case(*(x[:, start:stop] for x in self[:5]), state)


@dataclasses.dataclass(frozen=True)
class Implementation:
    """`chunked` and `recurrent` with the public signatures (state always given)."""

    name: str
    chunked: Callable[..., Any]
    recurrent: Callable[..., Any]


_jit = functools.partial(jax.jit, static_argnames=("formats", "implementation", "scale"))
# As commands compile them; and the same programs in half the time: for many formats or lengths.
QUICK_OPTIONS = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
_quick = functools.partial(_jit, compiler_options=QUICK_OPTIONS)
_usual = functools.partial(_jit, compiler_options=CPU_OPTIONS)
XLA = Implementation("xla", _usual(delta_rule.chunked), _usual(delta_rule.recurrent))
QUICK = Implementation("xla", _quick(delta_rule.chunked), _quick(delta_rule.recurrent))


def case(
    length: int,
    families: tuple[tuple[float, Any, bool], ...] = FAMILIES,
    *,
    key_heads: int = 2,
    value_heads: int = 6,
    key_dim: int = 32,
    value_dim: int = 24,
    per_channel: bool = False,
    seed: int = 0,
) -> Case:
    """One batch row per family; a random, so non-symmetric, state enters."""
    rng = np.random.default_rng(seed)
    rows = [
        _row(rng, length, *family, key_heads, value_heads, key_dim, per_channel)
        for family in families
    ]
    q, k, g, beta = (np.stack(x) for x in zip(*rows, strict=True))
    v = rng.normal(size=(len(rows), length, value_heads, value_dim))
    state = rng.normal(size=(len(rows), value_heads, key_dim, value_dim))
    return Case(*(x.astype(np.float32) for x in (q, k, v, g, beta, state)))


def _row(rng, length, cosine, gate, beta_near_one, key_heads, value_heads, key_dim, per_channel):
    fresh = _unit(rng.normal(size=(length, key_heads, key_dim)))
    if cosine == 1.0:
        k = fresh[np.arange(length) // 16 * 16]
    else:
        shared = _unit(rng.normal(size=(1, key_heads, key_dim)))
        k = _unit(np.sqrt(cosine) * shared + np.sqrt(1 - cosine) * fresh)
    q = _unit(rng.normal(size=k.shape))
    shape = (length, value_heads) + ((key_dim,) if per_channel else ())
    if gate == "alternating":
        g = np.where(np.arange(length) % 2, -5.0, 0.0).reshape(-1, *(1,) * (len(shape) - 1))
        g = np.broadcast_to(g, shape)
    elif gate == "strong, some weak":
        # Weak gates far down a chunk: differences of large sums must still be right.
        g = np.where(rng.uniform(size=shape) < 0.9, -4.9, -1e-4)
    else:
        g = gate * rng.uniform(0.5, 1.0 if gate == -5.0 else 1.5, size=shape)
    beta = 1 / (1 + np.exp(-2 * rng.normal(size=shape[:2]) - (6 if beta_near_one else 0)))
    return q, k, g, beta


def _unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def truth(case: Case, lengths: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """o [B, T, Hv, V] and the final state in float64, token by token; o is zero past lengths."""
    q, k, v, g, beta, state = (x.astype(np.float64) for x in case)
    groups = v.shape[2] // q.shape[2]
    q, k = np.repeat(q, groups, axis=2), np.repeat(k, groups, axis=2)
    g = g if g.ndim == 4 else g[..., None]
    o = np.zeros(v.shape)
    for t in range(q.shape[1]):
        rows = np.arange(len(q)) if lengths is None else np.flatnonzero(t < lengths)
        s = state[rows] * np.exp(g[rows, t])[..., None]
        d = v[rows, t] - np.einsum("bhk,bhkv->bhv", k[rows, t], s)
        d = d * beta[rows, t][..., None]
        s = s + k[rows, t][..., None] * d[..., None, :]
        o[rows, t] = np.einsum("bhk,bhkv->bhv", q[rows, t], s)
        state[rows] = s
    return o * q.shape[-1] ** -0.5, state


def oracle(case: Case, formats: DeltaRuleFormats) -> tuple[np.ndarray, np.ndarray]:
    """The chunk equations in float64, the named sites rounded."""
    # Op by op: the sites differ in a few roundings, so nearly every op is compiled only once.
    with jax.enable_x64(True), jax.disable_jit():
        wide = (x.astype(np.float64) for x in case)
        got = delta_rule.chunked(*wide, formats=formats, implementation="reference")
        return tuple(np.asarray(x) for x in got)


def assert_like_oracle(got: tuple[Any, Any], case: Case, formats: DeltaRuleFormats) -> None:
    """o and final state are those of the same rounding sites in float64."""
    # A value on the edge between two bf16 numbers may fall either way, and moves its head by up
    # to some 1e-3; a rounding in the wrong place moves every head by some 1e-3.
    for x, want, axes in zip(got, oracle(case, formats), ((1, 3), (2, 3)), strict=True):
        errors = relative(x, want, axes)  # [B, Hv]
        assert np.quantile(errors, 0.75) < 3e-5, errors
        assert np.max(errors) < 5e-3, errors


def relative(x: Any, y: Any, axes: tuple[int, ...] | None = None) -> Any:
    """Frobenius norm of x - y over that of y; NaN counts as infinite."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    difference = np.sqrt(np.sum((x - y) ** 2, axis=axes))
    norm = np.sqrt(np.sum(y**2, axis=axes))
    return np.nan_to_num(difference / np.maximum(norm, 1e-300), nan=np.inf)


def window_errors(o: Any, want: np.ndarray) -> np.ndarray:
    """Relative error [B, windows, Hv] of o per head and window of 64 tokens."""
    starts = range(0, want.shape[1], WINDOW)
    return np.stack(
        [relative(o[:, s : s + WINDOW], want[:, s : s + WINDOW], (1, 3)) for s in starts], axis=1
    )


def assert_near(got: tuple[Any, Any], want: tuple[Any, Any], budget: float, what: str) -> None:
    """Both o (per head and window) and the final state (per head) are within the budget."""
    o, state = (np.asarray(x, np.float64) for x in got)
    want = tuple(np.asarray(x, np.float64) for x in want)
    assert o.shape == want[0].shape and state.shape == want[1].shape, what
    worst = window_errors(o, want[0]).max()
    assert worst <= budget, f"{what}: o is off by {worst:.1e}, budget {budget:.1e}"
    worst = relative(state, want[1], (2, 3)).max()
    assert worst <= budget, f"{what}: the final state is off by {worst:.1e}, budget {budget:.1e}"


@functools.cache
def _known(length: int, per_channel: bool, value_dim: int = 24) -> tuple[Case, Any]:
    known = case(length, per_channel=per_channel, value_dim=value_dim)
    return known, truth(known)


FULL = np.full(len(FAMILIES), 300, np.int32)


def check_families(
    implementation: Implementation,
    per_channel: bool = False,
    chunk: int = 64,
    square: bool = False,
    budget: float = F32_BUDGET,
) -> None:
    """Every family of keys and gates, 300 tokens, against the truth."""
    known, want = _known(300, per_channel, 32 if square else 24)
    got = implementation.chunked(*known, lengths=FULL, formats=DeltaRuleFormats(chunk=chunk))
    assert_near(got, want, budget, implementation.name)


RAGGED = np.array([300, 1, 15, 16, 17, 63, 64, 65, 128, 299, 0], np.int32)


def check_ragged(implementation: Implementation, per_channel: bool = False) -> None:
    """Rows of different lengths with NaN behind them, against the truth of the trimmed rows."""
    known, _ = _known(300, per_channel)
    poisoned = Case(*(_past(x, RAGGED, np.nan) for x in known[:5]), known.state)
    got = implementation.chunked(*poisoned, lengths=RAGGED, formats=DeltaRuleFormats())
    assert_near(got, truth(known, RAGGED), F32_BUDGET, implementation.name)


def _past(x: np.ndarray, lengths: np.ndarray, value: float) -> np.ndarray:
    padding = np.arange(x.shape[1]) >= lengths[:, None]
    return np.where(padding.reshape(padding.shape + (1,) * (x.ndim - 2)), np.float32(value), x)


def check_split(implementation: Implementation, per_channel: bool = False) -> None:
    """One call for 300 tokens is two calls split at 1, 63, 64 or 65, is 300 single steps."""
    known, _ = _known(300, per_channel)

    def call(start: int, stop: int, state: Any) -> tuple[np.ndarray, Any]:
        # Always 300 tokens, of which some are real: one compilation for every split.
        moved = Case(*(np.roll(x, -start, axis=1) for x in known[:5]), np.asarray(state))
        lengths = np.full(len(known.q), stop - start, np.int32)
        o, state = implementation.chunked(*moved, lengths=lengths, formats=DeltaRuleFormats())
        return np.asarray(o)[:, : stop - start], state

    whole = call(0, 300, known.state)
    for at in (1, 63, 64, 65):
        early, state = call(0, at, known.state)
        late, state = call(at, 300, state)
        got = np.concatenate([early, late], axis=1), state
        assert_near(got, whole, F32_BUDGET, f"{implementation.name}, split at {at}")
    steps, state = [], known.state
    for t in range(300):
        o, state = implementation.recurrent(*known.tokens(t, t + 1, state))
        steps.append(np.asarray(o))
    got = np.concatenate(steps, axis=1), state
    assert_near(got, whole, F32_BUDGET, f"{implementation.name}, token by token")


@functools.cache
def _naive_unit() -> tuple[np.ndarray, np.ndarray]:
    """u: the error of bf16 operands in every dot, per family; of o its worst window."""
    known, want = _known(300, False)
    o, state = QUICK.chunked(*known, lengths=FULL, formats=DeltaRuleFormats(dot="default"))
    return (
        window_errors(o, want[0]).max(axis=(1, 2)),
        relative(state, want[1], (2, 3)).max(axis=1),
    )


def check_budget(implementation: Implementation) -> None:
    """A kernel with bf16 inside: no family further from the truth than twice the naive one."""
    known, want = _known(300, False)
    o, state = implementation.chunked(*known, lengths=FULL, formats=DeltaRuleFormats())
    unit_o, unit_state = _naive_unit()
    ratio = window_errors(o, want[0]).max(axis=(1, 2)) / unit_o
    assert ratio.max() <= 2, f"{implementation.name}: o is off by {ratio.max():.1f} u"
    ratio = relative(state, want[1], (2, 3)).max(axis=1) / unit_state
    assert ratio.max() <= 2, f"{implementation.name}: the state is off by {ratio.max():.1f} u"


@functools.cache
def _converged() -> tuple[Case, Any, float]:
    """v nearly predictable from k, so u - w S cancels; the error of rounding after it."""
    known = case(1024, ((0.3, -1e-4, False),), key_heads=1, value_heads=1)
    rng = np.random.default_rng(1)
    matrix = rng.normal(size=known.state.shape[2:])
    v = known.k @ matrix + 0.01 * rng.normal(size=known.v.shape)
    known = known._replace(v=v.astype(np.float32), state=matrix[None, None].astype(np.float32))
    want = truth(known)
    o, _ = QUICK.chunked(*known, formats=DeltaRuleFormats(v_new=BF16))
    return known, want, relative(o[:, 512:], want[0][:, 512:])


def check_converged(implementation: Implementation) -> None:
    """Where the state already predicts v, no worse than twice rounding after the subtraction."""
    known, want, unit = _converged()
    o, _ = implementation.chunked(*known)
    error = relative(np.asarray(o)[:, 512:], want[0][:, 512:])
    assert error <= 2 * unit, f"{implementation.name}: {error / unit:.1f} u"


@functools.cache
def _long() -> tuple[Case, Any]:
    known = case(2048, ((0.3, -1e-3, False),), key_heads=1, value_heads=2, key_dim=16, value_dim=8)
    return known, truth(known)


def check_long_decode(implementation: Implementation, budget: float = F32_BUDGET) -> None:
    """The last 64 of 2048 slowly decaying tokens, in steps of 8."""
    known, want = _long()
    o, state = [], known.state
    for t in range(0, 2048, 8):
        step, state = implementation.recurrent(*known.tokens(t, t + 8, state))
        o.append(np.asarray(step))
    got = np.concatenate(o, axis=1)[:, -64:], state
    assert_near(got, (want[0][:, -64:], want[1]), budget, implementation.name)

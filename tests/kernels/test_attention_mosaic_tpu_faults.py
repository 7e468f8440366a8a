"""Faults planted in the TPU attention kernel itself, one line each: its checks refuse them.

a-numbers and A-numbers as in the catalogue of accuracy bugs that inference kernels really had.
"""

from __future__ import annotations

import dataclasses
import functools

import attention_cases as cases
import jax
import ml_dtypes
import numpy as np
import pytest
from attention_cases import ROUNDINGS, Case, Implementation, check_rounding, make
from attention_faults import planted as numpy_planted
from mutants import mutant

from pallas_kernels.attention import AttentionFormats, Tiles
from pallas_kernels.attention.tiles import choose
from pallas_kernels.formats import BF16

_MODULES = ("operands", "mosaic_tpu_step", "mosaic_tpu")
_QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
# Several grid steps, blocks of rows and of keys, and an end inside of each.
SMALL = dict(B=1, T=5, S=70, lengths=(67,))


def planted(old: str, new: str, **tiles: int) -> Implementation:
    """The kernel with `old` changed to `new`, in the interpreter; `tiles` replaces some of its."""
    module = mutant("pallas_kernels.attention", _MODULES, old, new)

    @functools.cache
    def jitted(tiles: Tiles):
        call = functools.partial(module.attention, interpret=True, tiles=tiles)
        return jax.jit(call, static_argnames="formats", compiler_options=_QUICK)

    def call(case: Case) -> np.ndarray:
        usual = choose(case.q, case.k, case.formats)
        free = case.formats.is_tile_independent
        small = dict(block_k=16, block_kv=16) if free else dict(block_kv=usual.block_k)
        chosen = dataclasses.replace(usual, **(small | tiles))
        rest = {field: getattr(case, field) for field in Case._fields[3:]}
        return np.asarray(jitted(chosen)(*case[:3], **rest))

    return Implementation(f"{old} -> {new}", call, call)


# --- checks on one small call each --------------------------------------------------------------


def true(impl: Implementation, case: Case) -> None:
    cases.assert_true(impl.prefill(case), case)


def spread(impl: Implementation) -> None:
    true(impl, make(80, sigma=4.0, **SMALL))


def first_tokens(impl: Implementation) -> None:
    true(impl, make(81, B=1, T=20, S=20, N=1, G=1))


def diagonal(impl: Implementation) -> None:
    """A block whose first query is its first key's own: masked without looking at positions."""
    true(impl, make(82, B=1, T=32, S=64, N=1, G=1, H=8, Hv=8))


def ragged(impl: Implementation) -> None:
    """kv_length below the queries' positions, another for each row, and none at all."""
    case = make(83, T=5, S=70, B=3, lengths=(67, 40, 20))
    length = np.array([50, 40, 0], np.int32)
    true(impl, case._replace(kv_length=length))


def heads(impl: Implementation) -> None:
    true(impl, make(84, N=6, G=2, **SMALL))


def scales(impl: Implementation) -> None:
    """An fp8 cache with scales that are no 1, and a softmax scale that is not H**-0.5."""
    case = make(85, **SMALL)
    k, v = ((x / s).astype(ml_dtypes.float8_e4m3fn) for x, s in ((case.k, 0.25), (case.v, 0.5)))
    case = case._replace(k=k, v=v, k_scale=np.float32(0.25), v_scale=np.float32(0.5), scale=0.1)
    true(impl, case)


def split(impl: Implementation) -> None:
    true(impl, make(86, B=1, T=2, S=64, sigma=4.0))


def far(impl: Implementation) -> None:
    true(impl, make(87, B=1, T=1, S=33_100, N=1, G=1, H=4, Hv=4))


@functools.cache
def rounding(site: str):
    def check(impl: Implementation) -> None:
        check_rounding(impl, ROUNDINGS[site])

    return check


_LIMIT = "limit = jnp.minimum(first + 1 + (row & jnp.int32(tiles.block_q - 1)), length)"
_LONG = dict(block_k=512, block_kv=512)
_SUMMED = 'summed = rounded if formats.row_sum == "rounded" else p'
# fault: (line, what it becomes, check, tiles that it takes to show)
FAULTS = {
    "acc not rescaled at a new maximum (a22)": (
        "acc_ref[rows, :] * _widen(alpha, acc_ref.shape[1]) + pv",
        "acc_ref[rows, :] + pv", spread, {},
    ),
    "l not rescaled at a new maximum": (
        "l_ref[rows, :] * _widen(alpha, plan.lanes) + sum", "l_ref[rows, :] + sum", spread, {},
    ),
    "scale twice (a01)": (
        "jnp.float32(1) * scale * q_factor", "jnp.float32(1) * scale * scale * q_factor",
        spread, {},
    ),
    "last block of keys dropped": (
        "used = pl.cdiv(jnp.clip(end, 1, capacity), tiles.block_kv)",
        "used = jnp.maximum(jnp.clip(end, 1, capacity) // tiles.block_kv, 1)", spread, {},
    ),
    "unused slots of V not cleared": (
        "jnp.where(row < length - start, wide, 0)", "wide", spread, {},
    ),
    "causal sees the next (a05)": (_LIMIT, _LIMIT.replace("+ 1", "+ 2"), first_tokens, {}),
    "causal misses itself (a06)": (_LIMIT, _LIMIT.replace("+ 1", ""), first_tokens, {}),
    "diagonal sees the next": ("key <= row,", "key <= row + 1,", diagonal, dict(block_kv=32)),
    "kv_length not in the mask": (
        _LIMIT, _LIMIT.replace("jnp.minimum(", "(").replace(", length)", ")"), ragged, {},
    ),
    "first row's offset for all": ("offset_ref[b]", "offset_ref[0]", ragged, {}),
    "keyless rows divided by 0": (
        "out_refs[0][...] = acc / jnp.where(total == 0, jnp.float32(1), total)",
        "out_refs[0][...] = acc / total", ragged, {},
    ),
    "key heads interleaved": (
        "jax.lax.div(n, jnp.int32(units // groups))", "jax.lax.rem(n, jnp.int32(groups))",
        heads, dict(heads=1),
    ),
    "k_scale ignored (a02)": ("_operand(k, k_scale,", "_operand(k, 1.0,", scales, {}),
    "k_scale twice": ("q_factor * k_factor", "q_factor * k_factor * k_factor", scales, {}),
    "v_scale ignored (a03)": ("_operand(v, v_scale,", "_operand(v, 1.0,", scales, {}),
    "splits merged without their sums (a19)": (
        "weights = jnp.exp2((maxima - m) * self.log2_factor)",
        "weights = jnp.ones_like(maxima)", split, dict(splits=2),
    ),
    "positions in int16 (a15)": (
        "        last = jnp.minimum(first + self.tiles.block_q, offset + self.tokens)",
        "        offset = offset.astype(jnp.int16).astype(jnp.int32)\n"
        "        last = jnp.minimum(offset + self.tiles.block_q, offset + self.tokens)", far, _LONG,
    ),
    "row sum of the rounded P": (_SUMMED, "summed = rounded", rounding("p fp8*448"), {}),
    "P without its scale (a16)": (
        "jnp.max(s, axis=1, keepdims=True) - shift", "jnp.max(s, axis=1, keepdims=True)",
        rounding("p fp8*448"), {},
    ),
    "lazy threshold in nats": (
        "jnp.float32(formats.rescale_threshold)",
        "jnp.float32(formats.rescale_threshold * 1.4427)", rounding("lazy"), {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_refused(fault):
    old, new, check, tiles = FAULTS[fault]
    with pytest.raises(AssertionError):
        check(planted(old, new, **tiles))


_FAULTLESS = {check: (check, tiles) for _, _, check, tiles in FAULTS.values()}


@pytest.mark.parametrize(
    "check, tiles", _FAULTLESS.values(), ids=lambda x: getattr(x, "__name__", "")
)
def test_kernel_without_a_fault_passes(check, tiles):
    check(planted("_LOWEST = ", "_LOWEST = ", **tiles))


def test_rotary_in_bfloat16_is_no_fault():
    """a14: cos and sin rounded after a float32 phase move the output, but less than twice as far
    as bfloat16 scores, P and outputs do (a17, e4m3 x448: test_attention_mosaic_tpu.py)."""
    case = make(88, **SMALL)
    angle = np.arange(70)[:, None] * 1e4 ** -(np.arange(8) / 8)

    def turned(dtype) -> Case:
        cos, sin = (f(angle).astype(dtype).astype(np.float64) for f in (np.cos, np.sin))

        def turn(x, at):
            a, b, c, s = x[..., :8], x[..., 8:], cos[at][:, None], sin[at][:, None]
            return np.concatenate([a * c - b * s, a * s + b * c], -1).astype(np.float32)

        q = turn(case.q, case.q_offset[0] + np.arange(5))
        return case._replace(q=q, k=turn(case.k, np.arange(70)))

    truth = cases.dense(turned(np.float64))
    formats = AttentionFormats(q=BF16, k=BF16, v=BF16, scores=BF16, p=BF16)
    naive = numpy_planted("output in bf16").prefill(turned(np.float64)._replace(formats=formats))
    kernel = planted("_LOWEST = ", "_LOWEST = ")
    error = cases.frobenius(kernel.prefill(turned(ml_dtypes.bfloat16)), truth)
    assert 1e-4 < error <= 2 * cases.frobenius(naive, truth)

"""Faults planted in the TPU delta rule itself, one line each: its checks refuse them.

g-numbers as in the catalogue of accuracy bugs that inference kernels really had.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from delta_rule_cases import FAMILIES, QUICK_OPTIONS, Case, assert_near, case, truth
from mutants import mutant

from pallas_kernels import delta_rule
from pallas_kernels.delta_rule import DeltaRuleFormats
from pallas_kernels.delta_rule.tiles import Tiles
from pallas_kernels.formats import BF16, Format

_MODULES = ("mosaic_tpu_math", "mosaic_tpu_chunk", "mosaic_tpu")
CHUNK = 16


ONE, SHARED = (1, 1), (2, 4)  # key heads, value heads


def planted(op: str, old: str, new: str, heads: int = 1, chunk: int = CHUNK) -> Callable[..., Any]:
    """The kernel with `old` changed to `new`, so many heads and one chunk of tokens a grid step."""
    module = mutant("pallas_kernels.delta_rule", _MODULES, old, new)
    tiles = dict(tiles=Tiles(heads, chunk)) if op == "chunked" else {}
    call = functools.partial(getattr(module, op), interpret=True, scale=16**-0.5, **tiles)
    return jax.jit(call, static_argnames="formats", compiler_options=QUICK_OPTIONS)


@functools.cache
def _known(length: int, heads: tuple[int, int] = ONE) -> tuple[Case, np.ndarray, tuple]:
    """Two rows, decay slow and fast, NaN behind the shorter one; their lengths; the truth."""
    known = case(
        length, FAMILIES[1:3], key_heads=heads[0], value_heads=heads[1], key_dim=16, value_dim=16,
        seed=3,
    )  # fmt: skip
    lengths = np.array([length, length // 2 + 1], np.int32)
    padding = np.arange(length) >= lengths[:, None]
    poisoned = (
        np.where(padding.reshape(padding.shape + (1,) * (x.ndim - 2)), np.float32(np.nan), x)
        for x in known[:5]
    )
    return Case(*poisoned, known.state), lengths, truth(known, lengths)


def check_chunks(
    chunked: Callable[..., Any], heads: tuple[int, int] = ONE, chunk: int = CHUNK
) -> None:
    """Several chunks, the last not full; a row that ends inside an earlier one."""
    known, lengths, want = _known(50, heads)
    got = chunked(*known, lengths=lengths, formats=DeltaRuleFormats(chunk=chunk))
    assert_near(got, want, 2e-6, "chunks")


def check_steps(recurrent: Callable[..., Any]) -> None:
    known, lengths, want = _known(4)
    got = recurrent(*known, lengths=lengths, formats=DeltaRuleFormats())
    assert_near(got, want, 2e-6, "steps")


def check_stored_state(recurrent: Callable[..., Any]) -> None:
    """A format of few bits: every entry of the state shows whether it was rounded."""
    known, lengths, _ = _known(4)
    _, got = recurrent(
        *known, lengths=lengths, formats=DeltaRuleFormats(state=Format(mantissa_bits=4))
    )
    dropped = np.asarray(got).view(np.uint32) & np.uint32((1 << 19) - 1)
    assert (dropped == 0).all()


CHUNK_FAULTS = {
    "state not carried (g01)": ("carried = state[0]\n", "carried = state[0] * 0\n"),
    "decay mask one off (g07)": (
        "jnp.where(row >= column, columns[i]", "jnp.where(row >= column - 1, columns[i]",
    ),
    "off-diagonal blocks missing (g10)": (
        "inverse = _replace_second_halves(inverse, late - quarter, half)", "pass",
    ),
    "key heads permuted (g19)": (
        "jnp.repeat(x, groups, axis=0)", "jnp.tile(x, (groups, 1, 1))",
    ),
    "padding unmasked (g26)": (
        "jnp.where(row < real, x.astype(jnp.float32), 0)", "x.astype(jnp.float32)",
    ),
    "gates of padding unmasked (g15)": ("jnp.where(valid[..., None], x, 0)", "x"),
    "one bf16 pass a product": ("for n in range(3) for i", "for n in range(1) for i"),
    "residual rounded (g23)": ("split(rest, mode))", 'split(rest, "default"))'),
}  # fmt: skip
STEP_FAULTS = {
    "decay in bf16 (g27)": (
        "decay = round_in_kernel(decay, formats.exp_g)",
        "decay = decay.astype(jnp.bfloat16).astype(jnp.float32)", check_steps,
    ),
    "residual of the state before its decay": (
        "seen = jnp.sum(keys * new,", "seen = jnp.sum(keys * old,", check_steps,
    ),
    "output of the old state": ("jnp.sum(queries * new,", "jnp.sum(queries * old,", check_steps),
    "state stored unrounded": (
        "state[0] = round_in_kernel(new, formats.state)", "state[0] = new", check_stored_state,
    ),
}  # fmt: skip
NOTHING = ("TILE, LANES = 8, 128", "TILE, LANES = 8, 128")


@pytest.mark.parametrize("fault", CHUNK_FAULTS)
def test_fault_in_chunks_is_refused(fault):
    heads, chunk = SHARED if "heads" in fault else ONE, 32 if "blocks" in fault else CHUNK
    with pytest.raises(AssertionError):
        check_chunks(planted("chunked", *CHUNK_FAULTS[fault], heads[1], chunk), heads, chunk)


@pytest.mark.parametrize("fault", STEP_FAULTS)
def test_fault_in_steps_is_refused(fault):
    old, new, check = STEP_FAULTS[fault]
    with pytest.raises(AssertionError):
        check(planted("recurrent", old, new))


def test_kernels_without_a_fault_pass():
    check_chunks(planted("chunked", *NOTHING, SHARED[1]), SHARED)
    check_steps(planted("recurrent", *NOTHING))
    check_stored_state(planted("recurrent", *NOTHING))


@functools.cache
def _naive() -> tuple[jax.Array, jax.Array]:
    known, lengths, _ = _known(50)
    run = functools.partial(delta_rule.chunked, implementation="xla")
    formats = DeltaRuleFormats(chunk=CHUNK, dot="default")
    return jax.jit(run, static_argnames="formats", compiler_options=QUICK_OPTIONS)(
        *known, lengths=lengths, formats=formats
    )


@pytest.mark.parametrize(
    "control",
    [
        DeltaRuleFormats(chunk=CHUNK, chunk_state=BF16),  # g20, FlashKDA
        DeltaRuleFormats(chunk=CHUNK, v_new=BF16),  # g21, FLA
        DeltaRuleFormats(chunk=CHUNK, g=BF16),  # g29
        None,  # g30: q and k in bf16
    ],
    ids=["state", "v_new", "g", "q and k"],
)
def test_benign_roundings_stay_within_twice_a_bfloat16_kernel(control):
    """Formats that kernels rightly have: far from float32, and no further than bf16 operands."""
    known, lengths, want = _known(50)
    formats = DeltaRuleFormats(chunk=CHUNK)
    if control is None:
        q, k = (x.astype(jax.numpy.bfloat16) for x in (known.q, known.k))
        known = known._replace(q=q, k=k)
    got = planted("chunked", *NOTHING)(*known, lengths=lengths, formats=control or formats)
    errors = [[_far(x, y) for x, y in zip(o, want, strict=True)] for o in (got, _naive())]
    assert all(1e-5 < ours <= 2 * unit for ours, unit in zip(*errors, strict=True)), errors


def _far(x: jax.Array, want: np.ndarray) -> float:
    return float(np.linalg.norm(np.asarray(x, np.float64) - want) / np.linalg.norm(want))

"""The TPU delta rule where memory is watched, with faults planted, and lowered for an absent TPU.

The TPU interpreter fills memory that nobody wrote with NaN, raises on reads out of bounds, delays
copies until they are waited for, and finds races between the cores of a chip.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from delta_rule_cases import FAMILIES, QUICK_OPTIONS, assert_near, case, truth
from tpu_interpreter import WATCHED, races_found

from pallas_kernels import delta_rule
from pallas_kernels.arg_specs import DELTA_RULE, DeltaRuleSpec
from pallas_kernels.delta_rule import (
    DeltaRuleFormats,
    mosaic_tpu,
    mosaic_tpu_chunk,
    mosaic_tpu_math,
)
from pallas_kernels.delta_rule.tiles import Tiles, choose_chunked, choose_recurrent
from pallas_kernels.formats import BF16, E4M3_448, F16, Format

GATES = pytest.mark.parametrize("per_channel", [False, True], ids=["scalar", "channel"])
LENGTHS = np.array([20, 7], np.int32)


def _small(per_channel=False):
    families = FAMILIES[7:10:2]  # keys of cosine 0.9 and 1, slow decay
    return case(20, families, key_heads=1, value_heads=2, key_dim=16, value_dim=8,
                per_channel=per_channel)  # fmt: skip


@GATES
def test_memory_is_clean(per_channel):
    known = _small(per_channel)
    padded = np.arange(20) >= LENGTHS[:, None]
    poisoned = [
        np.where(padded.reshape(padded.shape + (1,) * (x.ndim - 2)), np.float32(np.nan), x)
        for x in known[:5]
    ]
    run = functools.partial(
        mosaic_tpu.chunked, scale=0.25, formats=DeltaRuleFormats(chunk=16), interpret=WATCHED,
        tiles=Tiles(2, 16),
    )  # fmt: skip
    run = jax.jit(run, compiler_options=QUICK_OPTIONS)
    got = jax.block_until_ready(run(*poisoned, known.state, lengths=LENGTHS))
    assert not races_found()
    assert_near(got, truth(known, LENGTHS), 2e-6, "watched")


@pytest.mark.parametrize("length", [1, 3])
def test_memory_of_steps_is_clean(length):
    known = _small().tokens(0, length)
    got = mosaic_tpu.recurrent(
        *known, lengths=None, scale=0.25, formats=DeltaRuleFormats(), interpret=WATCHED,
        tiles=Tiles(2, length),
    )  # fmt: skip
    jax.block_until_ready(got)
    assert not races_found()
    assert_near(got, truth(known), 2e-6, "watched")


def _neumann(a, mode):
    """I - a + a^2 - .. in doublings over the whole chunk."""
    power, inverse = -a, jnp.eye(a.shape[-1]) - a
    for _ in range(a.shape[-1].bit_length() - 2):
        parts = mosaic_tpu_math.split(power, mode)
        power = mosaic_tpu_math.dot(parts, parts)
        product = mosaic_tpu_math.dot(
            mosaic_tpu_math.split(inverse, mode), mosaic_tpu_math.split(power, mode)
        )
        inverse = inverse + product
    return inverse


def _one_pass(x, dot, fmt=None):
    return (x.astype(jnp.bfloat16),)


@pytest.mark.parametrize("name, fault", [("unit_lower_inverse", _neumann), ("split", _one_pass)])
def test_faults_in_the_kernel_are_refused(monkeypatch, name, fault):
    known = case(64, FAMILIES[9:10], key_heads=1, value_heads=1, key_dim=16, value_dim=8)
    monkeypatch.setattr(mosaic_tpu_chunk, name, fault)
    run = functools.partial(
        mosaic_tpu.chunked, scale=0.25, formats=DeltaRuleFormats(), interpret=True,
        tiles=Tiles(1, 64),
    )  # fmt: skip
    got = jax.jit(run, compiler_options=QUICK_OPTIONS)(*known, lengths=None)
    with pytest.raises(AssertionError, match="is off by"):
        assert_near(got, truth(known), 1e-5, name)


def test_parts_add_up_to_every_bit():
    """A pair of casts that a compiler drops would leave nothing for the second part."""
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(1, 64, 64)) * 2.0 ** rng.integers(-40, 40, (1, 64, 64))).astype("f4")
    for fmt, count in ((None, 3), (Format(mantissa_bits=15), 2), (BF16, 1), (E4M3_448, 3)):
        split = functools.partial(mosaic_tpu_math.split, dot="highest", fmt=fmt)
        parts = jax.jit(split)(x)
        assert len(parts) == count and all(part.dtype == jnp.bfloat16 for part in parts)
    total = sum(
        np.asarray(part, np.float64)
        for part in jax.jit(mosaic_tpu_math.split, static_argnums=1)(x, "highest")
    )
    np.testing.assert_array_equal(total, x.astype(np.float64))


def _lowered(run, arguments) -> str:
    return jax.jit(run).trace(*arguments).lower(lowering_platforms=("tpu",)).as_text()


FORMATS = (
    DeltaRuleFormats(),
    DeltaRuleFormats(dot="default", h=BF16),
    DeltaRuleFormats(w=BF16, u=F16, chunk_state=E4M3_448, state=Format(mantissa_bits=10),
                     exp_g=BF16, g_cumsum=BF16, v_new=F16, chunk=16),
)  # fmt: skip


def _arguments(name, tokens):
    spec = dataclasses.replace(DELTA_RULE[name], batch=1, tokens=tokens)
    return tuple(spec.arguments().values())


@pytest.mark.parametrize("name", [name for name in DELTA_RULE if "public" not in name])
def test_lowers_for_tpu(name):
    op = DELTA_RULE[name].op
    every = FORMATS if name == "demo_chunked" else FORMATS[:1] if op == "chunked" else FORMATS[2:]
    for formats in every:
        run = functools.partial(getattr(mosaic_tpu, op), scale=0.1, formats=formats, lengths=None)
        assert "tpu_custom_call" in _lowered(run, _arguments(name, 200 if op == "chunked" else 3))


@pytest.mark.parametrize("name", DELTA_RULE)
def test_tiles_fit_the_shapes(name):
    spec = DELTA_RULE[name]
    q, _, v, *_ = _arguments(name, 4096)
    share = spec.value_heads // spec.key_heads
    for chunk in (16, 32, 64, 128):
        tiles = choose_chunked(q, v, chunk)
        assert spec.value_heads % tiles.heads == tiles.heads % share == tiles.tokens % chunk == 0
        assert tiles.heads // share * spec.key_dim % 128 == 0
    assert spec.value_heads % choose_recurrent(q, v).heads == 0


def test_describes_what_would_run():
    q, k, v, g, beta, _ = _arguments("qwen3.8-27b_chunked", 4096)
    for name in ("mosaic_tpu_interpret", "xla"):
        found = delta_rule.describe("chunked", q, k, v, g, beta, implementation=name)
        assert found["implementation"] == name
        assert (found["tiles"] is None) == (name == "xla")
    q, k, v, g, beta, _ = _arguments("qwen3.8-27b_recurrent", 1)
    name = "mosaic_tpu_interpret"
    found = delta_rule.describe("recurrent", q, k, v, g, beta, implementation=name)
    assert found["tiles"]["tokens"] == 1 and 48 % found["tiles"]["heads"] == 0


@pytest.mark.parametrize("op", ["chunked", "recurrent"])
def test_refuses_what_it_cannot_run(op):
    arguments = [jnp.zeros(x.shape, x.dtype) for x in _arguments("demo_recurrent", 1)]
    run = getattr(delta_rule, op)
    with pytest.raises(NotImplementedError, match="'cpu'.*mosaic_tpu_interpret"):
        run(*arguments, implementation="mosaic_tpu")
    wide = DeltaRuleSpec("recurrent", 1, 1, 1, 1, 256, 64).arguments().values()
    with pytest.raises(NotImplementedError, match="K=256"):
        run(*(jnp.zeros(x.shape, x.dtype) for x in wide), implementation="mosaic_tpu_interpret")
    with jax.enable_x64(True):
        arguments[0] = np.zeros(arguments[0].shape)
        with pytest.raises(NotImplementedError, match="float64"):
            run(*arguments, implementation="mosaic_tpu_interpret")

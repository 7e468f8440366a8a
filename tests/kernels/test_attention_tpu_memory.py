"""The TPU attention kernel where memory is watched, and lowered for a TPU that is not here.

The TPU interpreter fills memory that nobody wrote with NaN, raises on reads out of bounds, delays
copies until they are waited for, and finds races between the cores of a chip.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import Case, assert_true, make, row_errors, tiled
from attention_tpu import run
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from tpu_interpreter import WATCHED, races_found

from pallas_kernels.attention import AttentionFormats, Tiles, mosaic_tpu
from pallas_kernels.formats import BF16, E4M3, E4M3_448, Format

BFLOAT16 = AttentionFormats(q=BF16, k=BF16, v=BF16, p=BF16, block_k=64)
CALLS = {
    "prefill": (dict(T=40, S=150, lengths=(150, 101)), Tiles(2, 32, 64, 64)),
    "no prefix, one head a step": (dict(T=130, S=130, N=1, G=1), Tiles(1, 64, 64, 128)),
    "decode": (dict(T=1, S=200, lengths=(200, 64)), Tiles(2, 1, 64, 128)),
    "decode, split": (dict(T=2, S=200, lengths=(200, 10)), Tiles(2, 2, 64, 64, splits=2)),
}


@pytest.mark.parametrize("name", CALLS)
def test_memory_is_clean(name):
    shape, tiles = CALLS[name]
    case = make(60, **shape)
    if tiles.splits == 1:
        case = case._replace(formats=BFLOAT16)
        error = row_errors(run(case, WATCHED, tiles), tiled(case))
        assert np.quantile(error, 0.7) <= 2e-6 and error.max() < 1e-2
    else:
        assert_true(run(case, WATCHED, tiles), case)
    assert not races_found()


def test_the_interpreter_sees_two_cores_writing_one_block():
    """The watch itself: two parallel steps of a kernel that write the same output."""

    def kernel(o_ref):
        o_ref[...] = jnp.full(o_ref.shape, pl.program_id(0), jnp.float32)

    call = pl.pallas_call(
        kernel,
        grid=(2,),
        out_specs=pl.BlockSpec((8, 128), lambda i: (0, 0)),
        out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=WATCHED,
    )
    assert races_found(call)


@pytest.mark.parametrize("op", ["prefill", "decode"])
@pytest.mark.parametrize("p", ["f32", "bf16", "fp8*448"])
@pytest.mark.parametrize("stored", ["bfloat16", "float8_e4m3fn"])
def test_lowers_for_tpu(op, p, stored):
    """Block shapes and primitives are what Mosaic takes; lengths and offsets stay dynamic."""
    tokens = 512 if op == "prefill" else 1
    q = jax.ShapeDtypeStruct((2, tokens, 12, 256), jnp.bfloat16)
    kv = jax.ShapeDtypeStruct((2, 3000, 2, 256), jnp.dtype(stored))
    n = jax.ShapeDtypeStruct((2,), jnp.int32)
    formats = AttentionFormats(p=Format.parse(p))

    def call(q, k, v, q_offset, kv_length):
        return mosaic_tpu.attention(
            q, k, v, q_offset=q_offset, kv_length=kv_length, k_scale=0.5, formats=formats
        )

    text = jax.jit(call).trace(q, kv, kv, n, n).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") == 1


def test_compiled_tiles_fill_registers():
    """What the interpreter takes and Mosaic does not is refused by name, before it is lowered."""
    case = make(61, B=1, T=16, S=108, N=1, G=1)
    rest = {field: getattr(case, field) for field in Case._fields[3:5]}
    with pytest.raises(NotImplementedError, match=r"block_k=36 .*multiple of 128"):
        mosaic_tpu.attention(*case[:3], **rest, tiles=Tiles(1, 16, 36, 36))


def test_fp8_formats_share_the_kernel_of_bf16():
    """x448 is a shift of the maximum: no multiplication per score beyond those of unscaled e4m3."""

    def primitives(fmt):
        case = make(62, B=1, T=16, S=128)._replace(formats=AttentionFormats(p=fmt, block_k=128))
        call = functools.partial(mosaic_tpu.attention, formats=case.formats)
        lengths = dict(q_offset=case.q_offset, kv_length=case.kv_length)
        return str(jax.make_jaxpr(call)(*case[:3], **lengths)).count(" mul ")

    assert 0 < primitives(E4M3) == primitives(E4M3_448)

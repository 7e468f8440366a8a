"""Every rounding site of the interpreted TPU kernel is where `DeltaRuleFormats` says."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from delta_rule_cases import (
    FAMILIES,
    QUICK_OPTIONS,
    Case,
    assert_like_oracle,
    assert_near,
    case,
    truth,
)

from pallas_kernels.delta_rule import DeltaRuleFormats, mosaic_tpu
from pallas_kernels.delta_rule.tiles import Tiles
from pallas_kernels.formats import BF16, F16, Format

# Small tiles: what is compiled grows with heads and chunks of a step.
_chunked = jax.jit(
    functools.partial(mosaic_tpu.chunked, lengths=None, scale=0.25, interpret=True),
    static_argnames=("formats", "tiles"),
    compiler_options=QUICK_OPTIONS,
)
FLA = dict.fromkeys(("state_operand", "h", "v_new", "inverse", "w", "u", "p"), BF16)


@functools.cache
def _case(per_channel: bool = False) -> Case:
    families = FAMILIES[1:3] + FAMILIES[6:7] + FAMILIES[8:9]
    return case(40, families, key_heads=1, value_heads=2, key_dim=16, value_dim=8,
                per_channel=per_channel)  # fmt: skip


@pytest.mark.parametrize(
    "per_channel, fields",
    [
        (False, dict.fromkeys(("inverse", "p", "beta"), BF16)),
        (False, {"w": BF16, "u": F16, "g": BF16}),
        (False, dict.fromkeys(("state_operand", "v_new"), BF16)),
        (False, {"h": BF16, "state": Format(mantissa_bits=5), "exp_g": BF16}),
        (False, {"chunk_state": BF16, "g_cumsum": BF16}),
        (False, {"chunk": 32, **FLA}),
        (False, {"chunk": 32, "dot": "default"}),
        (True, dict.fromkeys(("exp_g", "v_new", "p"), BF16)),
        (True, {"chunk": 32, "dot": "default", "g_cumsum": BF16, **FLA}),
    ],
    ids=str,
)
def test_sites_agree_with_the_oracle(per_channel, fields):
    formats = DeltaRuleFormats(**{"chunk": 16, **fields})
    known = _case(per_channel)
    got = _chunked(*known, formats=formats, tiles=Tiles(2, formats.chunk))
    assert_like_oracle(got, known, formats)


@pytest.mark.parametrize("chunk, per_channel", [(32, False), (128, False), (32, True)])
def test_chunk_lengths_and_shared_key_heads(chunk, per_channel):
    known = case(
        chunk + 9, FAMILIES[6:8], key_heads=2, value_heads=4, key_dim=8, value_dim=16,
        per_channel=per_channel, seed=3,
    )  # fmt: skip
    formats = DeltaRuleFormats(chunk=chunk)
    o, state = _chunked(*known, formats=formats, tiles=Tiles(2, chunk))
    factor = 0.25 * 8**0.5  # the truth is scaled by K**-0.5
    assert_near((np.asarray(o) / factor, state), truth(known), 2e-6, f"chunk {chunk}")


def test_bfloat16_inputs_need_no_parts():
    known = case(40, FAMILIES[6:8], key_heads=1, value_heads=2, key_dim=16, value_dim=8)
    known = Case(*(x.astype(jax.numpy.bfloat16) for x in known[:3]), *known[3:])
    exact = Case(*(x.astype(np.float32) for x in known))
    got = _chunked(*known, formats=DeltaRuleFormats(chunk=16), tiles=Tiles(2, 32))
    assert_near(got, truth(exact), 2e-6, "bf16 inputs")


def test_tiles_do_not_change_a_bit():
    known = case(40, FAMILIES[5:8], key_heads=2, value_heads=4, key_dim=16, value_dim=8)
    formats = DeltaRuleFormats(chunk=16)
    first = _chunked(*known, formats=formats, tiles=Tiles(2, 16))
    second = _chunked(*known, formats=formats, tiles=Tiles(4, 32))
    for x, y in zip(first, second, strict=True):
        np.testing.assert_array_equal(x, y)

"""The delta rule for TPU, as contenders of kernels.py: float32 grade, and one bfloat16 pass.

Shapes are cut to 16 value heads and 512 tokens: cycles scale with both. No public kernel stands
beside ours: tokamax's fused one finds its tiles at run time, and the compiler's cycle estimate
follows no branch or loop that depends on data.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from pallas_kernels.arg_specs import DeltaRuleSpec
from pallas_kernels.delta_rule import DeltaRuleFormats, mosaic_tpu

CASES: dict[str, DeltaRuleSpec] = {
    "chunked gdn 1:4": DeltaRuleSpec("chunked", 1, 512, 4, 16, 128, 128),
    "chunked gdn 1:3": DeltaRuleSpec("chunked", 1, 512, 4, 12, 128, 128),
    "chunked kda": DeltaRuleSpec("chunked", 1, 512, 8, 8, 128, 128, per_channel=True),
    "recurrent gdn 1:4": DeltaRuleSpec("recurrent", 8, 1, 4, 16, 128, 128),
    "recurrent kda": DeltaRuleSpec("recurrent", 8, 1, 16, 16, 128, 128, per_channel=True),
}
_OURS = {
    "ours": DeltaRuleFormats(),
    "ours chunk=128": DeltaRuleFormats(chunk=128),
    "ours dot=default": DeltaRuleFormats(dot="default"),
}


def contenders(case: str) -> tuple[str, ...]:
    """Ours first: the last ones are what they are compared with."""
    return tuple(_OURS) if CASES[case].op == "chunked" else ("ours",)


def public(contender: str) -> bool:
    return contender not in _OURS


def work(case: str) -> tuple[float, float]:
    """(floating-point operations, bytes of HBM traffic at the least) of one call.

    Operations are those of the chunk form at 64 tokens, one pass each (see `xla.py`), or those of
    a step.
    """
    spec = CASES[case]
    heads, keys, values, chunk = spec.value_heads, spec.key_dim, spec.value_dim, 64
    steps = spec.batch * spec.tokens
    if spec.op == "chunked":
        shared = spec.value_heads if spec.per_channel else spec.key_heads
        flops = steps * 2 * chunk * (2 * shared * keys + heads * (2 * values + chunk / 6))
        flops += steps * heads * 6 * keys * values
    else:
        flops = steps * heads * 7 * keys * values
    moved = sum(x.size * x.dtype.itemsize for x in spec.arguments().values())
    moved += 4 * spec.batch * heads * values * (spec.tokens + keys)  # o and the state that leaves
    return flops, moved


def build(
    case: str, contender: str, device_kind: str
) -> tuple[Callable[..., jax.Array], tuple[Any, ...]]:
    """(function, argument shapes) to compile: the same for every TPU."""
    spec = CASES[case]
    function = functools.partial(
        getattr(mosaic_tpu, spec.op), lengths=None, scale=spec.key_dim**-0.5,
        formats=_OURS[contender],
    )  # fmt: skip
    return function, tuple(spec.arguments().values())

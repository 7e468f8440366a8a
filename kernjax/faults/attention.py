"""Attention with one fault each: accuracy bugs that inference kernels really had.

Each function stands in for `attention.prefill` and for `attention.decode`:

    python -m kernjax.check --kernel attention.prefill=kernjax.faults.attention:scale_twice

`**call` are the op's keywords (q_offset, kv_length, scale, k_scale, v_scale, formats); most faults
change one of them, or an operand, and call the healthy op. `catalogue.py` says where each bug was.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from kernjax.faults.attention_form import (
    Sees,
    online_softmax,
    rotated_otherwise,
    softmax_scale,
)
from pallas_kernels.attention import prefill as healthy
from pallas_kernels.formats import BF16, E4M3, E4M3_256, E4M3_448, F16, round_to

_Array = jax.Array


# Scales.


def scale_twice(q: _Array, k: _Array, v: _Array, **call: Any) -> _Array:
    """The softmax scale is in the projection and in the kernel."""
    return healthy(q, k, v, **call | {"scale": softmax_scale(q, call["scale"]) ** 2})


def mscale_missing(q: _Array, k: _Array, v: _Array, **call: Any) -> _Array:
    """A factor of 1.59 on the scores is forgotten; position 0 sees one key and stays exact."""
    return healthy(q, k, v, **call | {"scale": softmax_scale(q, call["scale"]) / 1.59})


def k_scale_ignored(q: _Array, k: _Array, v: _Array, **call: Any) -> _Array:
    """The scale of the stored keys is not applied."""
    return healthy(q, k, v, **call | {"k_scale": 1.0})


def v_scale_ignored(q: _Array, k: _Array, v: _Array, **call: Any) -> _Array:
    """The scale of the stored values is not applied."""
    return healthy(q, k, v, **call | {"v_scale": 1.0})


def k_scale_for_v(q: _Array, k: _Array, v: _Array, **call: Any) -> _Array:
    """The values are read with the keys' scale."""
    return healthy(q, k, v, **call | {"v_scale": call["k_scale"]})


def k_scale_twice(q: _Array, k: _Array, v: _Array, **call: Any) -> _Array:
    """The keys' scale is applied to the cache, and to the scores again."""
    return healthy(q, k, v, **call | {"k_scale": call["k_scale"] ** 2})


# Masks and positions.


def sees_next(q: _Array, k: _Array, v: _Array, **call: Any) -> _Array:
    """The causal mask lets a query see the token after its own."""
    return healthy(q, k, v, **call | {"q_offset": call["q_offset"] + 1})


def misses_itself(q: _Array, k: _Array, v: _Array, **call: Any) -> _Array:
    """The causal mask hides a query's own token."""
    return healthy(q, k, v, **call | {"q_offset": call["q_offset"] - 1})


def window_1023(q: _Array, k: _Array, v: _Array, **call: Any) -> _Array:
    """A layer that sees everything gets the sliding window of its neighbours, 1023 tokens."""
    return _masked(lambda key, position: (key <= position) & (key > position - 1023), q, k, v, call)


def positions_int16(q: _Array, k: _Array, v: _Array, **call: Any) -> _Array:
    """Positions are compared as 16-bit integers; nothing is wrong below 32,768 tokens."""
    return _masked(
        lambda key, position: key.astype(jnp.int16) <= position.astype(jnp.int16), q, k, v, call
    )


def positions_wrap_1024(q: _Array, k: _Array, v: _Array, **call: Any) -> _Array:
    """`positions_int16` in small: positions wrap to negative ones at 1,024 tokens."""

    def wrapped(x: _Array) -> _Array:
        return (x + 1024) % 2048 - 1024

    return _masked(lambda key, position: wrapped(key) <= wrapped(position), q, k, v, call)


def newest_key_lost(q: _Array, k: _Array, v: _Array, **call: Any) -> _Array:
    """The length of the cache is one short: read before the step's own key was counted."""
    return healthy(q, k, v, **call | {"kv_length": call["kv_length"] - 1})


def pads_attended(q: _Array, k: _Array, v: _Array, **call: Any) -> _Array:
    """The 64 slots after the last token count as tokens: a prompt padded to a compiled length."""
    room = k.shape[1]
    length = jnp.minimum(call["kv_length"] + 64, room)
    return healthy(q, k, v, **call | {"kv_length": length, "q_offset": call["q_offset"] + 64})


def first_page_lost(q: _Array, k: _Array, v: _Array, **call: Any) -> _Array:
    """The first 16 keys are never read: the first entry of a block table is skipped."""
    moved = {name: call[name] - 16 for name in ("q_offset", "kv_length")}
    return healthy(q, k[:, 16:], v[:, 16:], **call | moved)


def partial_tile_lost(q: _Array, k: _Array, v: _Array, **call: Any) -> _Array:
    """Only whole tiles of 64 keys are read: the loop's bound is rounded down."""
    length = jnp.maximum(call["kv_length"] // 64 * 64, 1)
    return healthy(q, k, v, **call | {"kv_length": length})


def key_heads_interleaved(q: _Array, k: _Array, v: _Array, **call: Any) -> _Array:
    """Query head n reads key head n % G; right is n // (N // G)."""
    heads, groups = q.shape[2], k.shape[2]
    share = heads // groups
    order = [n % groups * share + n // groups for n in range(heads)]
    # Put query n where the healthy op reads head n % G, and its output back where it belongs.
    moved = jnp.zeros_like(q).at[:, :, jnp.array(order)].set(q)
    return healthy(moved, k, v, **call)[:, :, jnp.array(order)]


# The softmax.


def acc_not_rescaled(q: _Array, k: _Array, v: _Array, **call: Any) -> _Array:
    """A new running maximum shrinks the row sum, but not what was accumulated."""
    return online_softmax(q, k, v, **call, rescales=False)


def split_without_lse(q: _Array, k: _Array, v: _Array, **call: Any) -> _Array:
    """Two halves of the keys are merged by their mean instead of by their weights."""
    half = k.shape[1] // 2
    second = {name: call[name] - half for name in ("q_offset", "kv_length")}
    left = healthy(q, k[:, :half], v[:, :half], **call)
    right = healthy(q, k[:, half:], v[:, half:], **call | second)
    position = call["q_offset"][:, None] + jnp.arange(q.shape[1])
    both = (position >= half)[:, :, None, None]
    return jnp.where(both, (left + right) / 2, left)


def p_e4m3(q: _Array, k: _Array, v: _Array, **call: Any) -> _Array:
    """P is cast to e4m3 without a scale: what is below 2**-10 of the largest is lost."""
    return _rounded(q, k, v, call, p=E4M3)


def p_e4m3_448(q: _Array, k: _Array, v: _Array, **call: Any) -> _Array:
    """P in e4m3 as engines scale it now: e4m3(448 P) / 448."""
    return _rounded(q, k, v, call, p=E4M3_448)


def p_e4m3_lazy_rescale(q: _Array, k: _Array, v: _Array, **call: Any) -> _Array:
    """P * 256 in e4m3 while the running maximum may lag by 2**4: P * 256 passes 448 and clamps."""
    return _rounded(q, k, v, call, p=E4M3_256, rescale_threshold=4.0)


def p_e4m3_tiles_of_192(q: _Array, k: _Array, v: _Array, **call: Any) -> _Array:
    """`p_e4m3` with prefill's tile: with decode's 96 the two phases round differently."""
    return _rounded(q, k, v, call, p=E4M3, block_k=192)


def p_e4m3_tiles_of_96(q: _Array, k: _Array, v: _Array, **call: Any) -> _Array:
    """`p_e4m3` with decode's tile; see `p_e4m3_tiles_of_192`."""
    return _rounded(q, k, v, call, p=E4M3, block_k=96)


def sums_in_bf16(q: _Array, k: _Array, v: _Array, **call: Any) -> _Array:
    """Running maximum, row sum and accumulator are kept in bfloat16."""
    return _rounded(q, k, v, call, m=BF16, l=BF16, acc=BF16, block_k=512)


def acc_in_f16(q: _Array, k: _Array, v: _Array, **call: Any) -> _Array:
    """The accumulator is float16: precise enough, but infinite from 65,504 on."""
    return _rounded(q, k, v, call, acc=F16)


# Rotary positions. The op sees q and k after their rotation and knows neither base nor width:
# these two are the demo's, for other models the rotation is wrong in a similar way.
_THETA, _ROTARY_SHARE = 1000.0, 4


def rope_frequencies_bf16(q: _Array, k: _Array, v: _Array, **call: Any) -> _Array:
    """The inverse frequencies are rounded to bfloat16 before they meet the position."""
    return _rotated(lambda at, f: _cos_sin(at, round_to(f, BF16)), q, k, v, call)


def rope_positions_bf16(q: _Array, k: _Array, v: _Array, **call: Any) -> _Array:
    """Positions are rounded to bfloat16, which counts in steps of 2 from 256 tokens on."""
    return _rotated(lambda at, f: _cos_sin(round_to(at, BF16), f), q, k, v, call)


# Controls: right, and not to be flagged.


def control_rope_tables_bf16(q: _Array, k: _Array, v: _Array, **call: Any) -> _Array:
    """cos and sin in bfloat16, of float32 phases: what the vendor's own model does."""
    return _rotated(lambda at, f: tuple(round_to(x, BF16) for x in _cos_sin(at, f)), q, k, v, call)


def control_online_softmax(q: _Array, k: _Array, v: _Array, **call: Any) -> _Array:
    """The form that the faults inside the loop are planted in, without any."""
    return online_softmax(q, k, v, **call)


def _masked(sees: Sees, q: _Array, k: _Array, v: _Array, call: dict[str, Any]) -> _Array:
    return online_softmax(q, k, v, **call, sees=sees)


def _rounded(q: _Array, k: _Array, v: _Array, call: dict[str, Any], /, **formats: Any) -> _Array:
    return healthy(q, k, v, **call | {"formats": dataclasses.replace(call["formats"], **formats)})


def _rotated(wrong: Any, q: _Array, k: _Array, v: _Array, call: dict[str, Any]) -> _Array:
    rotary_dim = q.shape[-1] // _ROTARY_SHARE

    def angles(position: _Array, dim: int, cos_sin: Any = _cos_sin) -> tuple[_Array, _Array]:
        exponent = jnp.arange(0, dim, 2, dtype=jnp.float32) / dim
        at = position.astype(jnp.float32)[..., None]
        return cos_sin(at, 1.0 / jnp.float32(_THETA) ** exponent)

    turn = functools.partial(
        rotated_otherwise,
        rotary_dim=rotary_dim,
        angles=angles,
        wrong=functools.partial(angles, cos_sin=wrong),
    )
    positions = call["q_offset"][:, None] + jnp.arange(q.shape[1])
    return healthy(turn(q, positions), turn(k, jnp.arange(k.shape[1])[None]), v, **call)


def _cos_sin(position: _Array, frequency: _Array) -> tuple[_Array, _Array]:
    phase = position * frequency
    return jnp.cos(phase), jnp.sin(phase)

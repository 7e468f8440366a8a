"""The delta rule as Pallas kernels for TPU: chunks for prefill, single steps for decode.

`chunked`: the grid walks rows, groups of heads and, innermost, chunks. The state of a group stays
in VMEM from its first chunk to its last, in the block that becomes the final state.
`recurrent`: one grid step per row and group of heads; the state passes through VMEM once.

`interpret` runs the same kernels without a TPU: True in the plain interpreter, a
`pltpu.InterpretParams` in the TPU interpreter, which knows races and memory that nobody wrote.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.delta_rule.formats import DeltaRuleFormats
from pallas_kernels.delta_rule.mosaic_tpu_chunk import (
    advance,
    channel_gates,
    prepare,
    scalar_gates,
)
from pallas_kernels.delta_rule.mosaic_tpu_math import spread_columns
from pallas_kernels.delta_rule.tiles import LANES, Tiles, choose_chunked, choose_recurrent
from pallas_kernels.formats import round_to
from pallas_kernels.kernel_rounding import round_to as round_in_kernel

WIDTHS = (64, 128)
_VMEM = 40 * 2**20  # of the 64 MiB and more that a core has; the compiler's own limit is 16
_DTYPES = ("float32", "bfloat16", "float16")


def chunked(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    initial_state: jax.Array,
    *,
    lengths: jax.Array | None,
    scale: float,
    formats: DeltaRuleFormats,
    interpret: Any = False,
    tiles: Tiles | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Outputs [B, T, Hv, V] and final state [B, Hv, K, V], float32; as the public `chunked`.

    NotImplementedError for float64, and, compiled, for widths other than 64 and 128.
    """
    _refuse((q, k, v, g, beta, initial_state), q.shape[3], v.shape[3], interpret)
    batch, length, key_heads, key_dim = q.shape
    value_heads, value_dim = v.shape[2:]
    chunk = formats.chunk
    per_channel = g.ndim == 4
    tiles = choose_chunked(q, v, chunk) if tiles is None else tiles
    together = tiles.tokens // chunk  # chunks of one grid step
    groups = value_heads // tiles.heads
    steps = -(-length // tiles.tokens)
    count = steps * together
    prefetched = [] if lengths is None else [lengths]

    def rows(x: jax.Array) -> jax.Array:  # [B, T, H, D] -> [B, T, H * D]
        return x.reshape(batch, length, -1)

    def tokens(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, tiles.tokens, width), lambda b, h, n, *_: (b, n, h))

    gates = _by_chunk(beta, lengths, count, chunk, lambda x: (round_to(x, formats.beta),))
    specs, arguments = [], []
    if per_channel:
        specs, arguments = [tokens(tiles.heads * key_dim)], [rows(g)]
    else:
        sums = functools.partial(_gate_sums, formats=formats)
        gates = jnp.concatenate([_by_chunk(g, lengths, count, chunk, sums), gates], axis=2)
    # [B, N, summands, Hv, C] -> [B, N, groups, summands * heads, C]
    kinds = gates.shape[2]
    gates = gates.reshape(batch, count, kinds, groups, tiles.heads, chunk).swapaxes(2, 3)
    gates = gates.reshape(batch, count, groups, kinds * tiles.heads, chunk)
    state = pl.BlockSpec((1, tiles.heads, key_dim, value_dim), lambda b, h, n, *_: (b, h, 0, 0))
    keys = tokens(tiles.heads * key_heads // value_heads * key_dim)
    o, state = pl.pallas_call(
        functools.partial(
            _chunked_kernel,
            length=None if prefetched else length,
            scale=scale,
            formats=formats,
            per_channel=per_channel,
        ),  # fmt: skip
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetched),
            grid=(batch, groups, steps),
            in_specs=[
                keys,
                keys,
                tokens(tiles.heads * value_dim),
                pl.BlockSpec(
                    (1, together, 1, kinds * tiles.heads, chunk),
                    lambda b, h, n, *_: (b, n, h, 0, 0),
                ),
                *specs,
                state,
            ],
            out_specs=[tokens(tiles.heads * value_dim), state],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((batch, length, value_heads * value_dim), jnp.float32),
            jax.ShapeDtypeStruct((batch, value_heads, key_dim, value_dim), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=_VMEM
        ),
        interpret=interpret,
        name="delta_rule_chunked",
    )(*prefetched, rows(q), rows(k), rows(v), gates, *arguments, initial_state.astype(jnp.float32))
    return o.reshape(batch, length, value_heads, value_dim), state


def _by_chunk(x, lengths, count, chunk, summands) -> jax.Array:
    """`summands` of x [B, T, H], zero where not real: [B, N, summands, H, C]."""
    batch, length, heads = x.shape
    x = x.astype(jnp.float32)
    if lengths is not None:
        valid = jnp.arange(length, dtype=jnp.int32) < lengths[:, None]
        x = jnp.where(valid[..., None], x, 0)
    x = jnp.pad(x, ((0, 0), (0, count * chunk - length), (0, 0)))
    x = jnp.swapaxes(x.reshape(batch, count, chunk, heads), 2, 3)
    return jnp.stack(summands(x), axis=2)


def _gate_sums(g: jax.Array, formats: DeltaRuleFormats) -> tuple[jax.Array, jax.Array]:
    """G = cumsum(g) along the last axis, as a coarse part and a small remainder.

    Next to G = -300 float32 steps by 3e-5, which would be the error of every exp(G_i - G_j).
    Multiples of 2^-10 add up exactly down to -16384, and sums of the remainders stay below 1/16.
    A rounded g_cumsum has no remainder.
    """
    g = round_to(g, formats.g)
    coarse = jnp.round(g * jnp.float32(1024)) / jnp.float32(1024)
    upper = jnp.triu(jnp.ones((g.shape[-1],) * 2, jnp.float32))
    coarse, remainder = (
        jnp.matmul(x, upper, precision=jax.lax.Precision.HIGHEST) for x in (coarse, g - coarse)
    )
    if formats.g_cumsum.is_exact:
        return coarse, remainder
    return round_to(coarse + remainder, formats.g_cumsum), jnp.zeros_like(remainder)


def _chunked_kernel(*refs, length, scale, formats, per_channel):
    if length is None:
        lengths, *refs = refs
        length = lengths[pl.program_id(0)]
    q, k, v, gates, *channel, initial, o, state = refs
    step, steps = pl.program_id(2), pl.num_programs(2)
    heads, key_dim, value_dim = state.shape[1:]
    tokens, chunk = o.shape[1], formats.chunk
    together = tokens // chunk
    real = length - step * tokens

    @pl.when(step == 0)
    def _enter():
        state[0] = round_in_kernel(initial[0], formats.chunk_state)

    @pl.when(real <= 0)
    def _nothing():
        o[0] = jnp.zeros_like(o[0])

    # Arrays are [together * heads, ..], the heads of the first chunk first.
    @pl.when(real > 0)
    def _compute():
        def by_head(ref: Any, width: int) -> jax.Array:  # [tokens, H * D] -> [.. * H, C, D]
            x = ref[0]
            # Padding may hold anything, NaN included. Float32, because masks have its tiles.
            row = lax.broadcasted_iota(jnp.int32, x.shape, 0)
            x = jnp.where(row < real, x.astype(jnp.float32), 0).astype(x.dtype)
            chunks = [x[i : i + chunk] for i in range(0, tokens, chunk)]
            starts = range(0, x.shape[1], width)
            return jnp.stack([x[:, s : s + width] for x in chunks for s in starts])

        def row(kind: int) -> jax.Array:  # [.. * H, 1, C]
            rows = [gates[0, i, 0][kind * heads : (kind + 1) * heads] for i in range(together)]
            return jnp.concatenate(rows)[:, None, :]

        spread = [spread_columns(gates[0, i, 0]) for i in range(together)]

        def column(kind: int) -> jax.Array:  # [.. * H, C, 128], each lane the same
            starts = [(kind * heads + h) * LANES for h in range(heads)]
            return jnp.stack([x[:, s : s + LANES] for x in spread for s in starts])

        queries, keys = by_head(q, key_dim), by_head(k, key_dim)
        values = by_head(v, value_dim).astype(jnp.float32)
        if per_channel:
            repeats = together * heads // queries.shape[0]
            queries, keys = (jnp.repeat(x, repeats, axis=0) for x in (queries, keys))
            decays = by_head(channel[0], key_dim).astype(jnp.float32)
            decays = channel_gates(queries, keys, round_in_kernel(decays, formats.g), formats)
            beta = column(0)
        else:
            sums = [(row(i), column(i)) for i in range(2)]
            decays = scalar_gates(queries, keys, *zip(*sums, strict=True), formats)
            beta = column(2)
        chunks = prepare(decays, values, beta, formats)
        carried = state[0]
        for i in range(together):
            one = jax.tree.map(lambda x: x[i * heads : (i + 1) * heads], chunks)  # noqa: B023
            carried, out = advance(carried, one, formats)
            out = out * jnp.float32(scale)
            out = jnp.concatenate([out[h] for h in range(heads)], axis=1)
            o[0, i * chunk : (i + 1) * chunk] = out
        state[0] = carried

    if not formats.state.is_exact:

        @pl.when(step == steps - 1)
        def _store():
            state[0] = round_in_kernel(state[0], formats.state)


def recurrent(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    *,
    lengths: jax.Array | None,
    scale: float,
    formats: DeltaRuleFormats,
    interpret: Any = False,
    tiles: Tiles | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Outputs [B, T, Hv, V] and the state after T tokens, float32; as the public `recurrent`.

    All on the vector unit in float32, whatever `formats.dot` says: a step moves the state once
    and multiplies each entry a few times, which is less than moving it costs.
    """
    _refuse((q, k, v, g, beta, state), q.shape[3], v.shape[3], interpret)
    batch, length, key_heads, key_dim = q.shape
    value_heads, value_dim = v.shape[2:]
    tiles = choose_recurrent(q, v) if tiles is None else tiles
    groups = value_heads // tiles.heads
    prefetched = [] if lengths is None else [lengths]

    def by_group(x: jax.Array) -> jax.Array:  # [B, T, H, D] -> [B, T, groups, H / groups, D]
        return x.reshape(batch, length, groups, -1, x.shape[-1])

    inputs = [by_group(x) for x in (q, k, v, g if g.ndim == 4 else g[..., None], beta[..., None])]

    def tokens(x: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec((1, length, 1, *x.shape[3:]), lambda b, h, *_: (b, 0, h, 0, 0))

    states = pl.BlockSpec((1, tiles.heads, key_dim, value_dim), lambda b, h, *_: (b, h, 0, 0))
    o = jax.ShapeDtypeStruct((batch, length, groups, tiles.heads, value_dim), jnp.float32)
    o, state = pl.pallas_call(
        functools.partial(_recurrent_kernel, scale=scale, formats=formats),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetched),
            grid=(batch, groups),
            in_specs=[*map(tokens, inputs), states],
            out_specs=[tokens(o), states],
        ),
        out_shape=[o, jax.ShapeDtypeStruct(state.shape, jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        interpret=interpret,
        name="delta_rule_recurrent",
    )(*prefetched, *inputs, state.astype(jnp.float32))
    return o.reshape(batch, length, value_heads, value_dim), state


def _recurrent_kernel(*refs, scale, formats):
    *lengths, q, k, v, g, beta, entering, o, state = refs
    length, heads = o.shape[1], state.shape[1]
    real = jnp.minimum(lengths[0][pl.program_id(0)], length) if lengths else length

    def columns(x: jax.Array) -> jax.Array:  # [H, K] -> [Hv, K, 1]
        x, repeats = jnp.swapaxes(x, 0, 1), heads // x.shape[0]
        return jnp.stack([x[:, h // repeats : h // repeats + 1] for h in range(heads)])

    def step(t: Any, old: jax.Array) -> None:
        decay = jnp.exp(round_in_kernel(g[0, t, 0].astype(jnp.float32), formats.g))
        decay = round_in_kernel(decay, formats.exp_g)
        decay = columns(decay) if decay.shape[1] > 1 else decay[:, :, None]
        size = round_in_kernel(beta[0, t, 0].astype(jnp.float32), formats.beta)[:, :, None]
        keys = columns(k[0, t, 0].astype(jnp.float32))
        new = decay * old
        seen = jnp.sum(keys * new, axis=1, keepdims=True)
        new = new + keys * ((v[0, t, 0].astype(jnp.float32)[:, None, :] - seen) * size)
        queries = columns(q[0, t, 0].astype(jnp.float32))
        o[0, t, 0] = jnp.sum(queries * new, axis=1) * jnp.float32(scale)
        state[0] = round_in_kernel(new, formats.state)

    # A row past its length keeps its state as it is, not even rounded, and gives 0.
    if length > 1:
        o[0] = jnp.zeros_like(o[0])
        state[0] = entering[0]

        @pl.loop(0, real)
        def _steps(t):
            step(t, state[0])

        return

    @pl.when(real <= 0)
    def _keep():
        o[0] = jnp.zeros_like(o[0])
        state[0] = entering[0]

    @pl.when(real > 0)
    def _step():
        step(0, entering[0])


def _refuse(arrays: tuple[jax.Array, ...], key_dim: int, value_dim: int, interpret: Any) -> None:
    for x in arrays:
        if x.dtype.name not in _DTYPES:
            raise NotImplementedError(
                f"mosaic_tpu delta rule: dtype {x.dtype}; it computes in float32 and takes"
                f" {_DTYPES}; use 'reference' for float64."
            )
    for name, width in (("K", key_dim), ("V", value_dim)):
        if width > LANES or (interpret is False and width not in WIDTHS):
            raise NotImplementedError(
                f"mosaic_tpu delta rule: {name}={width}; it takes {WIDTHS}, the interpreter any"
                f" up to {LANES}."
            )

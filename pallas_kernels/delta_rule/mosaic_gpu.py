"""The delta rule as a Pallas kernel for Hopper and newer GPUs (Mosaic GPU): token by token.

A block of 128 threads has one head of one row. Its state lies in shared memory, and thread v owns
the state's column v: sums over key channels are then a thread's own, and no thread waits for
another. The tensor copy engine brings the state in and takes it out; queries and keys are the same
for every thread, and come as scalars.

`recurrent` is a decode step, bound by moving the state. `chunked` walks a prompt the same way: it
is the recurrence, exact in float32, and has none of the formats that only chunks have.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.delta_rule.formats import DeltaRuleFormats
from pallas_kernels.delta_rule.reference import RECURRENCE_SITES
from pallas_kernels.formats import Format, round_to
from pallas_kernels.kernel_rounding import round_to as round_in_kernel

WIDTH = 128  # value channels: one for each thread of a warpgroup
UNROLL = 8  # key channels a turn of the loop takes
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
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Outputs [B, T, Hv, V] and final state [B, Hv, K, V], float32; as the public `chunked`.

    NotImplementedError for a rounded format that only chunks have, for dot="default", for V above
    128, K not a multiple of 8, and float64.
    """
    for name in DeltaRuleFormats.__dataclass_fields__:
        fmt = getattr(formats, name)
        if isinstance(fmt, Format) and not fmt.is_exact and name not in RECURRENCE_SITES:
            raise NotImplementedError(
                f"mosaic_gpu delta rule: formats.{name}={fmt}; it walks token by token and has no"
                f" chunks. It rounds {', '.join(RECURRENCE_SITES)}."
            )
    if formats.dot != "highest":
        raise NotImplementedError(
            f"mosaic_gpu delta rule: formats.dot={formats.dot!r}; it multiplies in float32."
        )
    o, state = _call(q, k, v, g, beta, initial_state, lengths, scale, formats, False, interpret)
    return o, round_to(state, formats.state)


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
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Outputs [B, T, Hv, V] and the state after T tokens, float32; as the public `recurrent`.

    NotImplementedError as `chunked`, less the formats: those of chunks do not apply.
    """
    return _call(q, k, v, g, beta, state, lengths, scale, formats, True, interpret)


def _call(q, k, v, g, beta, state, lengths, scale, formats, every_step, interpret):
    batch, length, key_heads, key_dim = q.shape
    value_heads, value_dim = v.shape[2:]
    for x in (q, k, v, g, beta, state):
        if x.dtype.name not in _DTYPES:
            raise NotImplementedError(
                f"mosaic_gpu delta rule: dtype {x.dtype}; it computes in float32 and takes"
                f" {_DTYPES}; use 'reference' for float64."
            )
    if value_dim > WIDTH:
        raise NotImplementedError(
            f"mosaic_gpu delta rule: V={value_dim}; it takes up to {WIDTH}, a thread for each."
        )
    if key_dim % UNROLL:
        raise NotImplementedError(
            f"mosaic_gpu delta rule: K={key_dim}; it takes multiples of {UNROLL}."
        )
    if lengths is None:
        lengths = jnp.full((batch,), length, jnp.int32)
    # Small beside the state: rounded and raised to exp here, where XLA has every format.
    decay = round_to(jnp.exp(round_to(g, formats.g)), formats.exp_g)
    beta = round_to(beta, formats.beta)
    # Threads without a value channel carry zeros: narrow heads take as long as wide ones.
    idle = ((0, 0),) * 3 + ((0, WIDTH - value_dim),)
    v, state = jnp.pad(v, idle), jnp.pad(state.astype(jnp.float32), idle)
    options = {} if interpret is None else {"interpret": interpret}
    body = functools.partial(
        _kernel,
        groups=value_heads // key_heads,
        scale=scale,
        stored=formats.state if every_step else Format(),
    )
    o, state = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct(v.shape, jnp.float32),
            jax.ShapeDtypeStruct(state.shape, jnp.float32),
        ),
        grid=(batch, value_heads),
        grid_names=("batch", "head"),
        scratch_types=[plgpu.SMEM((key_dim, WIDTH), jnp.float32), plgpu.Barrier()],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        **options,
    )(lengths, q, k, v, decay, beta, state)
    return o[..., :value_dim], state[..., :value_dim]


def _kernel(
    lengths, q, k, v, decay, beta, entering, o, leaving, state, arrived, *, groups, scale, stored
):
    b, h = lax.axis_index("batch"), lax.axis_index("head")
    j = lax.div(h, jnp.int32(groups))
    length, (key_dim, value_dim) = v.shape[1], state.shape
    per_channel = len(decay.shape) == 4
    plgpu.copy_gmem_to_smem(entering.at[b, h], state, arrived)
    plgpu.barrier_wait(arrived)
    # One number a thread; a plain zero would be laid out as no loaded row is.
    rows = plgpu.Layout.WG_STRIDED((value_dim,), vec_size=1)
    zero = plgpu.layout_cast(jnp.zeros((value_dim,), jnp.float32), rows)
    real = jnp.minimum(lengths[b], jnp.int32(length))

    def over_keys(function: Any, carry: Any) -> Any:
        def some(turn: jax.Array, carry: Any) -> Any:
            for i in range(UNROLL):
                carry = function(turn * jnp.int32(UNROLL) + jnp.int32(i), carry)
            return carry

        return lax.fori_loop(0, key_dim // UNROLL, some, carry)

    def scalar(x: jax.Array) -> jax.Array:
        return x.astype(jnp.float32)

    def token(t: jax.Array, _: None) -> None:
        def factor(i: jax.Array) -> jax.Array:
            return decay[b, t, h, i] if per_channel else decay[b, t, h]

        def read(i: jax.Array, sums: Any) -> Any:
            seen, out, qk = sums
            row = state[i] * factor(i)
            key, query = scalar(k[b, t, j, i]), scalar(q[b, t, j, i])
            return seen + key * row, out + query * row, qk + query * key

        seen, out, qk = over_keys(read, (zero, zero, jnp.float32(0)))
        delta = (v[b, t, h].astype(jnp.float32) - seen) * beta[b, t, h]
        o[b, t, h] = (out + qk * delta) * jnp.float32(scale)

        def write(i: jax.Array, _: None) -> None:
            row = state[i] * factor(i) + scalar(k[b, t, j, i]) * delta
            state[i] = round_in_kernel(row, stored)

        over_keys(write, None)

    def padding(t: jax.Array, _: None) -> None:
        o[b, t, h] = zero

    lax.fori_loop(0, real, token, None)
    lax.fori_loop(real, length, padding, None)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(state, leaving.at[b, h])
    plgpu.wait_smem_to_gmem(0)

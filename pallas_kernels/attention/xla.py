"""Blockwise attention in plain XLA: O(context) memory on any platform, and the CPU's own path.

Queries are cut into tiles that share one loop over tiles of `block_k` keys (the online softmax of
`AttentionFormats`). The trip count is traced: a query tile stops at its last visible key, so tiles
above the causal diagonal and slots past kv_length cost nothing. Tiles that every query sees whole
go through a loop without masks; only the edge tiles pay for them.

The N // G query heads of a key head are rows of one dot with it, so K and V are never repeated.
Operands whose values fit bfloat16 exactly (bf16 formats, e4m3 P, bf16 or fp8 caches) are multiplied
as bfloat16 with float32 sums: the same products, at a multiple of the float32 rate.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.attention.formats import AttentionFormats
from pallas_kernels.formats import E4M3, Format, as_bits, from_bits, round_to

# Rows of scores per tile over the whole batch: 2048 x 512 float32 is 4 MB, about the second-level
# cache of two cores; larger tiles spill, smaller ones lose GEMM rate.
_ROWS = 2048
_LEAST_QUERIES, _MOST_QUERIES = 64, 512
_LOG2_E = math.log2(math.e)


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    q_offset: jax.Array,
    kv_length: jax.Array,
    scale: float,
    k_scale: float | jax.Array = 1.0,
    v_scale: float | jax.Array = 1.0,
    layer: jax.Array | None = None,
    formats: AttentionFormats = AttentionFormats(),  # noqa: B008 - frozen
    return_lse: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention outputs [B, T, N, Hv] float32; arguments as `pallas_kernels.attention.prefill`.

    Tiles are sliced straight from a stack of caches, no layer is copied.

    NotImplementedError for float64: the reference has it.
    """
    if jnp.float64 in (q.dtype, k.dtype, v.dtype):
        raise NotImplementedError("xla attention computes in float32; use 'reference' for float64.")
    batch, tokens, heads, width = q.shape
    if layer is None:
        k, v, layer = k[None], v[None], jnp.int32(0)
    if batch > 1 and tokens > _LEAST_QUERIES:
        # One by one, the tiles of scores stay in the cache, and a short row does not wait.
        k, v = (x.reshape(-1, 1, *x.shape[2:]) for x in (k, v))

        def one_row(i: jax.Array) -> Any:
            one, offset, length = (
                jax.lax.dynamic_slice_in_dim(x, i, 1) for x in (q, q_offset, kv_length)
            )
            out = attention(
                one, k, v, q_offset=offset, kv_length=length, scale=scale, k_scale=k_scale,
                v_scale=v_scale, layer=layer * batch + i, formats=formats, return_lse=return_lse,
            )  # fmt: skip
            return jax.tree.map(lambda x: x[0], out)

        return jax.lax.map(one_row, jnp.arange(batch, dtype=jnp.int32))
    queries = min(max(_ROWS // (batch * heads), _LEAST_QUERIES), _MOST_QUERIES)
    block_k = min(formats.block_k, k.shape[2])
    args = (k, v, layer, kv_length, scale, k_scale, v_scale, formats, block_k, return_lse)
    if tokens <= queries:
        return _query_tile(q, q_offset, q_offset + tokens, *args)
    tiles = -(-tokens // queries)
    q = jnp.pad(q, ((0, 0), (0, tiles * queries - tokens), (0, 0), (0, 0)))

    def one_tile(i: jax.Array) -> Any:
        q_tile = jax.lax.dynamic_slice_in_dim(q, i * queries, queries, axis=1)
        return _query_tile(q_tile, q_offset + i * queries, q_offset + tokens, *args)

    def joined(x: jax.Array) -> jax.Array:
        """[tiles, B, queries, ...] -> [B, T, ...]"""
        return jnp.moveaxis(x, 0, 1).reshape(batch, tiles * queries, *x.shape[3:])[:, :tokens]

    return jax.tree.map(joined, jax.lax.map(one_tile, jnp.arange(tiles, dtype=jnp.int32)))


def _query_tile(
    q: jax.Array,
    q_offset: jax.Array,
    q_end: jax.Array,
    k: jax.Array,
    v: jax.Array,
    layer: jax.Array,
    kv_length: jax.Array,
    scale: float,
    k_scale: float | jax.Array,
    v_scale: float | jax.Array,
    formats: AttentionFormats,
    block_k: int,
    return_lse: bool,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """[B, Tq, N, Hv] for one tile of queries; those at positions q_end [B] and above are padding.

    k and v are stacks [L, B, S, G, H] of which `layer` is read. With `return_lse` also [B, Tq, N].
    """
    batch, tokens, heads, width = q.shape
    capacity, groups = k.shape[2:4]
    share = heads // groups
    rows = share * tokens
    q = q.reshape(batch, tokens, groups, share, width).transpose(0, 2, 3, 1, 4)
    q, q_factor = _operand(q.reshape(batch, groups, rows, width), 1.0, formats.q)
    position = q_offset[:, None] + jnp.arange(tokens, dtype=jnp.int32)[None, :]  # [B, Tq]
    position = jnp.tile(position, (1, share))[:, None, :, None]  # [B, 1, R, 1]

    k_bits, v_bits = as_bits(k), as_bits(v)

    def update(i: jax.Array, carry: tuple[jax.Array, ...], *, masked: bool):
        m, total, acc = carry
        start = i * block_k
        # A slice cannot reach past S, so the last one starts early: its first keys are done.
        first = jnp.minimum(start, capacity - block_k)
        k_tile = _tile(k_bits, layer, first, block_k, k.dtype)
        v_tile = _tile(v_bits, layer, first, block_k, v.dtype)
        key = (first + jnp.arange(block_k, dtype=jnp.int32))[None, None, None, :]
        length = kv_length[:, None, None, None]
        if masked:
            # 0 * NaN is NaN: unused slots are cleared, not only masked in the scores.
            used = (key < length).reshape(batch, 1, block_k, 1)
            k_tile = jnp.where(used, k_tile, jnp.zeros((), k.dtype))
            v_tile = jnp.where(used, v_tile, jnp.zeros((), v.dtype))
        k_tile, k_factor = _operand(k_tile, k_scale, formats.k)
        v_tile, v_factor = _operand(v_tile, v_scale, formats.v)

        s = _dot("xrh,xsh->xrs", q, k_tile, formats.dot)
        if masked:
            visible = (key <= position) & (key < length) & (key >= start)
            s = jnp.where(visible, s, -jnp.inf)
        # Scaling and rounding are monotone: the maximum of the raw scores spares a pass over them.
        to_score = scale * q_factor * k_factor
        m_tile = round_to(jnp.max(s, axis=-1, keepdims=True) * to_score, formats.scores)
        s = round_to(s * to_score, formats.scores)
        m_new = round_to(jnp.maximum(m, m_tile), formats.m)
        if formats.rescale_threshold > 0:
            rise = (_finite(m_new) - m) * _LOG2_E
            m_new = jnp.where(rise > formats.rescale_threshold, m_new, m)
        pivot = _finite(m_new) if masked else m_new
        p = jnp.exp(s - pivot)
        alpha = jnp.exp(m - pivot)
        p_rounded, p_factor = _probabilities(p, v_tile.dtype, formats.p)
        if formats.row_sum == "rounded":
            mass = jnp.sum(p_rounded.astype(jnp.float32), axis=-1, keepdims=True) * p_factor
        else:
            mass = jnp.sum(p, axis=-1, keepdims=True)
        pv = _dot("xrs,xsh->xrh", p_rounded, v_tile, formats.dot) * (p_factor * v_factor)
        total = round_to(total * alpha + mass, formats.l)
        acc = round_to(acc * alpha + pv, formats.acc)
        return m_new, total, acc

    # Every query sees all keys below `seen`; none sees a key at `end` or above.
    seen = jnp.clip(jnp.min(jnp.minimum(q_offset + 1, kv_length)), 0, capacity)
    end = jnp.minimum(jnp.minimum(q_offset + tokens, q_end), kv_length)
    end = jnp.clip(jnp.max(end), 0, capacity)
    whole = seen // block_k
    carry = (
        jnp.full((batch, groups, rows, 1), -jnp.inf, jnp.float32),
        jnp.zeros((batch, groups, rows, 1), jnp.float32),
        jnp.zeros((batch, groups, rows, v.shape[-1]), jnp.float32),
    )
    carry = jax.lax.fori_loop(0, whole, lambda i, c: update(i, c, masked=False), carry)
    edge = (end + block_k - 1) // block_k
    m, total, acc = jax.lax.fori_loop(whole, edge, lambda i, c: update(i, c, masked=True), carry)

    def by_token(x: jax.Array) -> jax.Array:
        """[B, G, R, H] -> [B, Tq, N, H]"""
        x = x.reshape(batch, groups, share, tokens, x.shape[-1]).transpose(0, 3, 1, 2, 4)
        return x.reshape(batch, tokens, heads, x.shape[-1])

    out = by_token(acc / jnp.where(total == 0, 1, total))
    return (out, by_token(m + jnp.log(total))[..., 0]) if return_lse else out


def _tile(
    bits: jax.Array, layer: jax.Array, first: jax.Array, block_k: int, dtype: jnp.dtype
) -> jax.Array:
    """[B, G, block_k, H] of caches [L, B, S, G, H] (from `as_bits`), keys from `first` on."""
    _, batch, _, groups, width = bits.shape
    tile = jax.lax.dynamic_slice(bits, (layer, 0, first, 0, 0), (1, batch, block_k, groups, width))
    tile = tile[0].transpose(0, 2, 1, 3)
    # Without the barrier this copy of whole rows becomes an element by element transposition to
    # [B, G, H, block_k], an order of magnitude slower.
    return from_bits(jax.lax.optimization_barrier(tile), dtype)


def _finite(m: jax.Array) -> jax.Array:
    """m, with 0 for the rows that have seen no key: -inf - -inf is NaN."""
    return jnp.where(m == -jnp.inf, 0, m)


def _dot(spec: str, x: jax.Array, y: jax.Array, dot: str) -> jax.Array:
    """float32 einsum of [B, G, ...] operands, `spec` with one letter for both of these axes.

    bfloat16 operands multiply exactly, so only float32 ones need HIGHEST.
    """
    if x.dtype != y.dtype:
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    exact = jax.lax.Precision.HIGHEST if dot == "highest" else None
    # With two batch axes XLA:CPU takes bfloat16 operands to float32 instead of multiplying them.
    out = jnp.einsum(
        spec, x.reshape(-1, *x.shape[2:]), y.reshape(-1, *y.shape[2:]),
        preferred_element_type=jnp.float32, precision=exact if x.dtype == jnp.float32 else None,
    )  # fmt: skip
    return out.reshape(*x.shape[:2], *out.shape[1:])


def _operand(
    x: jax.Array, factor: float | jax.Array, fmt: Format
) -> tuple[jax.Array, float | jax.Array]:
    """(y, rest): y * rest is round_to(x * factor, fmt), y is bfloat16 where that is exact."""
    if fmt.is_exact:
        narrow = x.dtype in (jnp.bfloat16, jnp.float8_e4m3fn)
        return x.astype(jnp.bfloat16 if narrow else jnp.float32), factor
    x = x.astype(jnp.float32)
    if not (isinstance(factor, float) and factor == 1.0):
        x = x * factor
    x = round_to(x, fmt)
    return x.astype(jnp.bfloat16) if _fits_bfloat16(fmt) else x, 1.0


def _probabilities(p: jax.Array, v_dtype: jnp.dtype, fmt: Format) -> tuple[jax.Array, float]:
    """(y, rest): y * rest is round_to(p, fmt), y is bfloat16 where that is exact and V is too."""
    if v_dtype == jnp.bfloat16 and fmt.dtype == E4M3.dtype:
        # e4m3(p * scale) itself fits bfloat16; divided by 448 it would not.
        return round_to(p * fmt.scale, E4M3).astype(jnp.bfloat16), 1 / fmt.scale
    p = round_to(p, fmt)
    return p.astype(v_dtype) if _fits_bfloat16(fmt) else p, 1.0


def _fits_bfloat16(fmt: Format) -> bool:
    """Whether every value on the format's grid is a bfloat16 (powers of two only shift it)."""
    if fmt.mantissa_bits is not None:
        return fmt.mantissa_bits <= 7
    return fmt.dtype in ("bfloat16", "float8_e4m3fn") and math.frexp(fmt.scale)[0] == 0.5

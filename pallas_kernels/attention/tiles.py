"""Tile configurations of the attention kernels."""

from __future__ import annotations

import dataclasses
import math

import jax

from pallas_kernels.attention.formats import AttentionFormats
from pallas_kernels.kernel_rounding import fits_bfloat16

# Score rows of one grid step: more rows reuse K and V longer, fewer fit the vector memory.
_PREFILL_ROWS = 1024
_SCORES = 512 * 1024  # most float32 scores of one softmax step (2 MiB)
_MOST_KEYS = 512  # keys of one softmax step, where the formats leave the choice
_LOADED_KEYS = 1024  # keys of one grid step
# Rows of a matrix unit's product, by the compute capability of the GPUs that mosaic_gpu is for.
GPU_ROWS = {"9.0": 64, "10.0": 128}
GPU_SCORES = 64 * 128  # of one softmax step: 64 in each thread's registers
_FP8_CAST = ("TPU7", "TPU7x")  # device kinds that convert float32 to e4m3 by themselves


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How a Mosaic kernel cuts one attention call.

    - heads: query heads of one key head that share a grid step.
    - block_q: query tokens of a grid step, a power of two; heads * block_q score rows.
    - block_k: keys of one softmax step. Formats whose bits depend on it fix it.
    - block_kv: keys a grid step loads, a multiple of block_k.
    - splits: parts of the keys with a softmax of their own, merged by their log-sum-exp.
    - fp8_dot: multiply e4m3 P with an e4m3 cache as float8 instead of bfloat16: quicker where the
      chip has float8 units, with their accumulator.
    - fp8_cast: round e4m3 P by the chip's own conversion, the same bits: quicker where it has one
      (TPU7x), much slower where the compiler has to spell it out.
    """

    heads: int
    block_q: int
    block_k: int
    block_kv: int
    splits: int = 1
    fp8_dot: bool = False
    fp8_cast: bool = False

    def __post_init__(self) -> None:
        for name in ("heads", "block_q", "block_k", "block_kv", "splits"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"Tiles: {name}={value!r} must be an int >= 1.")
        if self.block_q & (self.block_q - 1):
            raise ValueError(f"Tiles: block_q={self.block_q} must be a power of two.")
        if self.block_kv % self.block_k:
            raise ValueError(
                f"Tiles: block_kv={self.block_kv} must be a multiple of block_k={self.block_k}."
            )

    @property
    def rows(self) -> int:
        """Score rows of a grid step, filled up to whole registers."""
        return round_up(self.heads * self.block_q, 16)


def choose(q: jax.Array, k: jax.Array, formats: AttentionFormats) -> Tiles:
    """The tiles of a call with q [B, T, N, H] and k [B, S, G, H]: arrays or their shapes.

    Fixed by shapes and formats alone, so that the same call has the same bits everywhere.
    """
    tokens, heads = q.shape[1:3]
    capacity, groups = k.shape[1:3]
    share = heads // groups
    most = formats.block_k if not formats.is_tile_independent else _MOST_KEYS
    # One tile of all keys is the same softmax step as a larger one.
    block_k = min(most, round_up(capacity, 128))
    loaded = max(_LOADED_KEYS // block_k, 1) * block_k
    block_kv = min(loaded, round_up(capacity, block_k))
    rows = max(min(_PREFILL_ROWS, _SCORES // block_k), 16)
    block_q = min(next_power(tokens), max(128, last_power(rows // share)))
    block_q = min(block_q, last_power(rows))
    per_step = max(d for d in range(1, share + 1) if share % d == 0 and d * block_q <= rows)
    return Tiles(per_step, block_q, block_k, block_kv)


def choose_tpu(
    q: jax.Array, k: jax.Array, formats: AttentionFormats, device_kind: str | None = None
) -> Tiles:
    """`choose` for the TPU of this process, or one of that kind: the same bits, more quickly."""
    kind = jax.devices()[0].device_kind if device_kind is None else device_kind
    casts = formats.p.dtype == "float8_e4m3fn" and kind in _FP8_CAST
    return dataclasses.replace(choose(q, k, formats), fp8_cast=casts)


def choose_gpu(q: jax.Array, k: jax.Array, formats: AttentionFormats, rows: int) -> Tiles:
    """`choose` for mosaic_gpu: `rows` of one warpgroup, and as many keys as registers hold."""
    tokens, heads = q.shape[1:3]
    share = heads // k.shape[2]
    most = GPU_SCORES // rows
    # P in several pieces takes registers that 128 scores of a row do not leave.
    widest = 128 if fits_bfloat16(formats.p) else 64
    block_k = 64 if q.shape[3] > widest else most
    if not formats.is_tile_independent and formats.block_k in (64, most):
        block_k = formats.block_k
    block_q = min(next_power(tokens), rows)
    per_block = max(d for d in range(1, share + 1) if share % d == 0 and d * block_q <= rows)
    return Tiles(per_block, block_q, block_k, block_k)


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def next_power(value: int) -> int:
    """The least power of two that is not below value >= 1."""
    return 1 << (value - 1).bit_length()


def last_power(value: int) -> int:
    """The largest power of two that is not above value, at least 1."""
    return 1 << int(math.log2(max(value, 1)))

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
_GPU_PROCESSORS = {"9.0": 132, "10.0": 148}  # multiprocessors of H100 and H200, of B200
GPU_SCORES = 64 * 128  # of one softmax step: 64 in each thread's registers
# Columns of V that a GPU block takes at most (more accumulators fit neither generation): the others
# of a row are other blocks', which compute the same scores.
_GPU_COLUMNS = 128
_SPLIT_KEYS = 512  # at least, of a full cache
_SPLIT_STEPS = 4  # softmax steps that a block could have made before its first, after its last
_FP8_CAST = ("TPU7", "TPU7x")  # device kinds that convert float32 to e4m3 by themselves


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How a Mosaic kernel cuts one attention call.

    - heads: query heads of one key head that share a grid step.
    - block_q: query tokens of a grid step, a power of two; heads * block_q score rows.
    - block_k: keys of one softmax step. Formats whose bits depend on it fix it.
    - block_kv: keys a grid step loads, a multiple of block_k.
    - splits: parts of the keys with a softmax of their own, merged by their log-sum-exp. Rounded P
      has other bits then: every part rounds against its own maximum. It is the keys in use that are
      cut evenly, so the cuts move with the context.
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


def choose_gpu(
    q: jax.Array, k: jax.Array, v: jax.Array, formats: AttentionFormats, capability: str
) -> Tiles:
    """`choose` for mosaic_gpu on GPUs of that capability, with as many keys as registers hold.

    Keys are split where one block holds all queries of its heads, as in decode: there are few
    blocks then, and a long context would keep as few multiprocessors busy.
    """
    batch, tokens, heads = q.shape[:3]
    capacity, groups = k.shape[1:3]
    share, rows = heads // groups, GPU_ROWS[capability]
    most = GPU_SCORES // rows
    # P in several pieces takes registers that 128 scores of a row do not leave.
    widest = 128 if fits_bfloat16(formats.p) else 64
    block_k = 64 if q.shape[3] > widest else most
    if not formats.is_tile_independent and formats.block_k in (64, most):
        block_k = formats.block_k
    block_q = min(next_power(tokens), rows)
    per_block = max(d for d in range(1, share + 1) if share % d == 0 and d * block_q <= rows)
    blocks = batch * (heads // per_block) * (v.shape[3] // gpu_columns(v.shape[3]))
    splits = _splits(blocks, capacity, block_k, capability) if tokens <= block_q else 1
    return Tiles(per_block, block_q, block_k, block_k, splits)


def _splits(blocks: int, capacity: int, block_k: int, capability: str) -> int:
    """1 where there is a block for every multiprocessor; else the fewest parts of the keys with
    which the last of them is done soonest, one block at a time on each, if the cache is full."""
    processors = _GPU_PROCESSORS[capability]
    if blocks >= processors:
        return 1

    def steps(splits: int) -> int:
        turns = -(-blocks * splits // processors)
        return turns * (-(-capacity // (splits * block_k)) + _SPLIT_STEPS)

    return min(range(1, max(capacity // _SPLIT_KEYS, 1) + 1), key=steps)


def gpu_columns(v_width: int) -> int:
    """Columns of V that a block of mosaic_gpu takes."""
    return math.gcd(v_width, _GPU_COLUMNS)


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def next_power(value: int) -> int:
    """The least power of two that is not below value >= 1."""
    return 1 << (value - 1).bit_length()


def last_power(value: int) -> int:
    """The largest power of two that is not above value, at least 1."""
    return 1 << int(math.log2(max(value, 1)))

"""How the delta rule is cut into grid steps: chosen from the shapes, reported with every call."""

from __future__ import annotations

import dataclasses

import jax

LANES = 128


@dataclasses.dataclass(frozen=True)
class Tiles:
    """One grid step: so many value heads, and so many tokens of them.

    `tokens` is a multiple of the chunk, or in a recurrent call all that there are.
    """

    heads: int
    tokens: int


def choose_chunked(q: jax.Array, v: jax.Array, chunk: int) -> Tiles:
    """Enough heads to keep the units busy while each head waits for itself, few enough for VMEM.

    q [B, T, Hk, K] and v [B, T, Hv, V]: arrays or their shapes. Heads never change a bit.
    """
    most = {16: 16, 32: 12, 64: 8, 128: 4}[chunk]
    heads = _heads(q, v, most, packed=True)
    # Two chunks a step keep the units busier still; 128 tokens are enough work for a program.
    together = 2 if chunk < 128 and q.shape[1] > chunk else 1
    return Tiles(heads, together * chunk)


def choose_recurrent(q: jax.Array, v: jax.Array) -> Tiles:
    """Blocks of whole heads; the float32 states of 16 are 1 MiB, in and out twice."""
    return Tiles(_heads(q, v, 16, packed=False), q.shape[1])


def _heads(q: jax.Array, v: jax.Array, most: int, packed: bool) -> int:
    """Value heads per step: divides them all, keeps a key head's together, at best `most`.

    `packed` heads lie side by side: they must fill whole registers of 128 lanes, or be all there
    are.
    """
    key_heads, key_dim = q.shape[2:]
    value_heads, value_dim = v.shape[2:]
    groups = value_heads // key_heads
    fitting = [
        n * groups
        for n in range(1, key_heads + 1)
        if key_heads % n == 0
        and not (packed and (n * key_dim % LANES or n * groups * value_dim % LANES))
    ]
    small = [n for n in fitting if n <= most]
    return max(small) if small else min(fitting, default=value_heads)

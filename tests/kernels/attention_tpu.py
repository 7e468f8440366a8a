"""The TPU attention kernel as an `Implementation` of attention_cases.py, interpreted."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from attention_cases import Case, Implementation

from pallas_kernels.attention import Tiles, mosaic_tpu
from pallas_kernels.attention.tiles import choose


@functools.cache
def _jitted(interpret: Any, tiles: Tiles | None) -> Callable[..., jax.Array]:
    call = functools.partial(mosaic_tpu.attention, interpret=interpret, tiles=tiles)
    return jax.jit(call, static_argnames="formats")


def run(case: Case, interpret: Any = True, tiles: Tiles | None = None) -> np.ndarray:
    """Outputs [B, T, N, Hv] of the kernel with these tiles (the usual ones by default)."""
    rest = {field: getattr(case, field) for field in Case._fields[3:]}
    return np.asarray(_jitted(interpret, tiles)(*case[:3], **rest))


def interpreted() -> Implementation:
    """In grid steps of one softmax step each: the shortest program to compile."""

    def call(case: Case) -> np.ndarray:
        tiles = choose(case.q, case.k, case.formats)
        return run(case, tiles=dataclasses.replace(tiles, block_kv=tiles.block_k))

    return Implementation("mosaic_tpu", call, call)

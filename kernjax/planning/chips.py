"""TPU generations and slices, and hosts of GPUs, by their published numbers.

TPUs: cloud.google.com/tpu/docs, per chip. GPUs: NVIDIA's data sheets (SXM, dense).
"""

from __future__ import annotations

import dataclasses
import math
import re

from kernjax.base.errors import UserError

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """One chip: HBM in bytes, bandwidth in bytes/s, bfloat16 FLOP/s; jax devices it shows as.

    `axes`: of the grid that chips come in.
    """

    name: str
    hbm: int
    bandwidth: float
    flops: float
    devices: int = 1
    platform: str = "tpu"
    axes: int = 3


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v5e", 16 * GIB, 819e9, 197e12, axes=2),
        Chip("v5p", 95 * GIB, 2765e9, 459e12),
        Chip("v6e", 32 * GIB, 1640e9, 918e12, axes=2),
        Chip("tpu7x", 192 * GIB, 7380e9, 2307e12, devices=2),
        Chip("h100", 80 * GIB, 3350e9, 989e12, platform="cuda", axes=1),
    )
}


@dataclasses.dataclass(frozen=True)
class Topology:
    """A slice: its chips in a grid; of GPUs, one host's. `text` is what libtpu calls it."""

    chip: Chip
    grid: tuple[int, ...]

    @property
    def text(self) -> str:
        return f"{self.chip.name}:{'x'.join(map(str, self.grid))}"

    @property
    def chips(self) -> int:
        return math.prod(self.grid)

    @property
    def devices(self) -> int:
        return self.chips * self.chip.devices

    @property
    def device_hbm(self) -> int:
        """Bytes a jax device has."""
        return self.chip.hbm // self.chip.devices

    @property
    def device_bandwidth(self) -> float:
        return self.chip.bandwidth / self.chip.devices

    @property
    def device_flops(self) -> float:
        return self.chip.flops / self.chip.devices


def parse_topology(text: str) -> Topology:
    """`v5e:2x4`, `v5p:2x2x1`, `h100:8`: a generation and its grid; UserError for anything else."""
    name, _, grid = text.partition(":")
    if name not in CHIPS:
        raise UserError(
            f"--topology={text}: unknown generation {name!r}.",
            f"Expected GENERATION:GRID with one of {', '.join(CHIPS)}.",
        )
    chip = CHIPS[name]
    if not re.fullmatch("x".join([r"[1-9]\d*"] * chip.axes), grid):
        example = {1: "8", 2: "2x4", 3: "2x2x1"}[chip.axes]
        numbers = "a number" if chip.axes == 1 else f"{chip.axes} numbers"
        raise UserError(
            f"--topology={text}: grid {grid!r}.",
            f"Expected {numbers} of chips for {name}, as {name}:{example}.",
        )
    return Topology(chip, tuple(int(size) for size in grid.split("x")))

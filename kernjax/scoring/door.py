"""A plug-in seen alone: the f32 model, with the op's inputs and outputs cast at its door.

A kernel made for bf16 takes bf16 operands. Against the plain f32 ground truth it would be charged
for these casts; so the oracle is the op's own f32 implementation behind the same door, and what is
left between the two is the kernel's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from kernjax.plugins import Kernel
from pallas_kernels.formats import Format, round_to, store
from pallas_kernels.ops import OPS


@dataclasses.dataclass(frozen=True)
class Door:
    """`function` with q, k, v stored in `fmt`, and its first result rounded to it."""

    function: Callable[..., Any]
    fmt: Format

    def __call__(self, q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> Any:
        out = self.function(*(store(x, self.fmt) for x in (q, k, v)), *args, **kwargs)
        if isinstance(out, tuple):
            return round_to(out[0], self.fmt), *out[1:]
        return round_to(out, self.fmt)


def behind_door(
    kernels: Mapping[str, Kernel], fmt: Format
) -> tuple[dict[str, Kernel], dict[str, Kernel]]:
    """The kernels behind the door of `fmt`, and the oracles for the same ops behind it."""
    candidates, oracles = {}, {}
    for op, kernel in kernels.items():
        label = f"{kernel.name} behind {fmt}"
        candidates[op] = dataclasses.replace(kernel, name=label, function=Door(kernel, fmt))
        oracles[op] = dataclasses.replace(
            kernel, name=f"pallas_kernels behind {fmt}", function=Door(OPS[op], fmt)
        )
    return candidates, oracles

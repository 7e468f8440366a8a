"""The public functions by op name: what a plug-in may replace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pallas_kernels import attention, delta_rule

OPS: dict[str, Callable[..., Any]] = {
    "attention.prefill": attention.prefill,
    "attention.decode": attention.decode,
    "delta_rule.chunked": delta_rule.chunked,
    "delta_rule.recurrent": delta_rule.recurrent,
}

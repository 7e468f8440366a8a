"""The TPU interpreter with every watch on, on old and new jax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.pallas import tpu as pltpu

# Two cores: parallel grid steps run beside each other. Reads out of bounds raise and memory nobody
# wrote is NaN by default.
WATCHED = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2)


def races_found(call: Callable[[], Any] | None = None) -> bool:
    """Whether `call`, or the last interpreted kernel, raced: jax 0.12 raises, older jax notes it"""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    try:
        if call is not None:
            jax.block_until_ready(call())
    except Exception as error:
        if "race" not in str(error).lower():
            raise
        pltpu.reset_tpu_interpret_mode_state()
        return True
    races = getattr(interpret_pallas_call, "races", None)
    return bool(races is not None and races.races_found)

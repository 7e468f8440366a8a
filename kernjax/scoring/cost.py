"""What runs of a model took beside time: seconds of compilation, and memory at its peak."""

from __future__ import annotations

import sys
import threading
from typing import Any

import jax

try:
    import resource
except ImportError:  # a system without it
    resource = None  # type: ignore[assignment]

_COMPILING = "/jax/core/compile/"  # jax's own measurements: tracing, lowering, the compiler


class Cost:
    """Counts from when it is made: the compilations of this process, in every thread.

    Programs compile ahead, two at a time and beside others that run, so that their seconds are no
    part of the wall time that could be taken away from it.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._lock = threading.Lock()
        jax.monitoring.register_event_duration_secs_listener(self._count)

    def _count(self, event: str, seconds: float, **about: Any) -> None:
        if event.startswith(_COMPILING):
            with self._lock:
                self._seconds += seconds

    def to_dict(self) -> dict[str, Any]:
        """`compile_s`; the peaks of this process and of its fullest device, bytes, None: unknown.

        A device that keeps its arrays in the process's own memory (a CPU) counts none.
        """
        stats = [device.memory_stats() or {} for device in jax.local_devices()]
        peaks = [one["peak_bytes_in_use"] for one in stats if "peak_bytes_in_use" in one]
        return {
            "compile_s": self._seconds,
            "peak_memory_bytes": _peak_of_process(),
            "peak_device_bytes": max(peaks, default=None),
        }


def _peak_of_process() -> int | None:
    if resource is None:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kilobytes, but for macOS

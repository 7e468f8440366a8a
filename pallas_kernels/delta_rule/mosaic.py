"""Entries of the tables for the Pallas kernels: which machine runs them, imported when called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax


def tpu(op: str) -> Callable[..., Any]:
    """`mosaic_tpu.OP` compiled: NotImplementedError where the process has no TPU."""

    def run(*args: Any, **kwargs: Any) -> Any:
        backend = jax.default_backend()
        if backend != "tpu":
            raise NotImplementedError(
                f"mosaic_tpu delta rule: compiled for TPU, and this process runs on {backend!r};"
                " mosaic_tpu_interpret runs the same kernel anywhere, slowly."
            )
        return _tpu(op, *args, **kwargs)

    return run


def tpu_interpret(op: str) -> Callable[..., Any]:
    """`mosaic_tpu.OP` in the plain Pallas interpreter."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return _tpu(op, *args, interpret=True, **kwargs)

    return run


def _tpu(op: str, *args: Any, **kwargs: Any) -> Any:
    from pallas_kernels.delta_rule import mosaic_tpu

    return getattr(mosaic_tpu, op)(*args, **kwargs)

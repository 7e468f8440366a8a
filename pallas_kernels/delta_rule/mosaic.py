"""Entries of the tables for the Pallas kernels: which machine runs them, imported when called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax


def tpu(op: str) -> Callable[..., Any]:
    """`mosaic_tpu.OP` compiled: NotImplementedError where the process has no TPU."""

    def run(*args: Any, **kwargs: Any) -> Any:
        _refuse_elsewhere("tpu")
        from pallas_kernels.delta_rule import mosaic_tpu

        return getattr(mosaic_tpu, op)(*args, **kwargs)

    return run


def tpu_interpret(op: str) -> Callable[..., Any]:
    """`mosaic_tpu.OP` in the plain Pallas interpreter."""

    def run(*args: Any, **kwargs: Any) -> Any:
        from pallas_kernels.delta_rule import mosaic_tpu

        return getattr(mosaic_tpu, op)(*args, interpret=True, **kwargs)

    return run


def gpu(op: str) -> Callable[..., Any]:
    """`mosaic_gpu.OP` compiled: NotImplementedError where the process has no such GPU."""

    def run(*args: Any, **kwargs: Any) -> Any:
        _refuse_elsewhere("gpu")
        capability = getattr(jax.devices()[0], "compute_capability", "0.0")
        if float(capability) < 9.0:
            raise NotImplementedError(
                f"mosaic_gpu delta rule: compute capability {capability}; it copies as Hopper (9.0)"
                " and newer GPUs do."
            )
        from pallas_kernels.delta_rule import mosaic_gpu

        return getattr(mosaic_gpu, op)(*args, **kwargs)

    return run


def gpu_interpret(op: str) -> Callable[..., Any]:
    """`mosaic_gpu.OP` in the GPU interpreter: NotImplementedError before jax 0.12, which has it."""

    def run(*args: Any, **kwargs: Any) -> Any:
        from jax.experimental.pallas import mosaic_gpu as plgpu

        if not hasattr(plgpu, "InterpretGPUParams"):
            raise NotImplementedError(
                f"mosaic_gpu delta rule: jax {jax.__version__} does not interpret GPU kernels; jax"
                " 0.12 does."
            )
        from pallas_kernels.delta_rule import mosaic_gpu

        interpret = plgpu.InterpretGPUParams()
        return getattr(mosaic_gpu, op)(*args, interpret=interpret, **kwargs)

    return run


def _refuse_elsewhere(platform: str) -> None:
    backend = jax.default_backend()
    if backend != platform:
        raise NotImplementedError(
            f"mosaic_{platform} delta rule: compiled for {platform.upper()}, and this process runs"
            f" on {backend!r}; mosaic_{platform}_interpret runs the same kernel anywhere, slowly."
        )

"""The real compilers, on a machine without a TPU (libtpu, extra `tpu`) or a GPU."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kernjax.base.errors import UserError
from kernjax.planning.chips import Topology
from kernjax.planning.gpus import target

if TYPE_CHECKING:
    import jax

    from kernjax.planning.programs import Program

_CUDA = ("jax_cuda13_plugin", "jax_cuda12_plugin")  # either will do
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"([\d.]+)([KMGT]?)i?B?"


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes per device of a compiled program.

    `peak` is what has to be free at once: arguments, results that overwrite none, temporaries.
    """

    arguments: int
    outputs: int
    temporaries: int
    peak: int
    code: int


@dataclasses.dataclass(frozen=True)
class TooLarge:
    """The compiler refused: bytes per device it needs and has (None: not in its message)."""

    needed: int | None
    available: int | None
    message: str


def prepare(topologies: Sequence[Topology] = ()) -> None:
    """Must run before jax is imported: jax itself stays on the CPU, libtpu stays quiet.

    UserError where there is no compiler for one of the topologies, naming what brings it.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"
    platforms = {topology.chip.platform for topology in topologies} or {"tpu"}
    if "cuda" in platforms and not any(map(importlib.util.find_spec, _CUDA)):
        raise UserError(
            f"The GPU compiler is not here: neither {' nor '.join(_CUDA)} is installed.",
            "jax's CUDA plugin and NVIDIA's assembler bring it; it needs no GPU.",
            "pip install --no-deps jax-cuda13-plugin jax-cuda13-pjrt nvidia-cuda-nvcc nvidia-nvvm.",
        )
    if "tpu" not in platforms:
        return
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(
            "The TPU compiler is not here: the package libtpu is not installed.",
            "It comes with the extra `tpu`, and needs no TPU.",
            "pip install 'kernjax[tpu]'.",
        )
    # Without these libtpu asks a metadata server, refuses a second process, and logs gigabytes.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    os.environ.setdefault("TPU_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-8")


def devices_of(topology: Topology) -> list[jax.Device]:
    """The slice's devices, to compile for; UserError where the compiler does not know the slice."""
    from jax.experimental import topologies

    chip, options = topology.chip, {}
    name = topology.text
    if chip.platform == "cuda":
        name = f"1x1x{topology.chips}"  # partitions, hosts, devices of one
        options = {"target_config": target(chip.name), "topology": name}
    elif topology.chips == 1:
        # jax 0.10 takes a host to have four chips, and a slice of one chip for less than a host.
        options = {"chips_per_host_bounds": [1, 1, 1]}
    try:
        found = topologies.get_topology_desc(
            platform=chip.platform, topology_name=name, **options
        ).devices
    except Exception as error:  # whatever the compiler has against it
        raise UserError(
            f"--topology={topology.text}: the compiler does not take it"
            f" ({' '.join(str(error).split())}).",
            "Expected a slice that is offered, as v5e:2x4, v5p:2x2x1, v6e:2x4, tpu7x:2x2x1,"
            " h100:8.",
        ) from None
    return list(found)


def compile_program(program: Program) -> tuple[Memory | TooLarge, float]:
    """What the program takes on every device, and the processor's seconds that compiling took.

    Tracing included. Not the clock's: those depend on what else the machine does.
    """
    import jax

    start = time.process_time()
    jitted = jax.jit(
        program.function, donate_argnums=program.donated, out_shardings=program.out_shardings
    )
    try:
        compiled = jitted.lower(*program.arguments).compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return too_large(str(error)), time.process_time() - start
    return _memory(compiled.memory_analysis()), time.process_time() - start


def too_large(message: str) -> TooLarge:
    """The compiler's refusal, with the two sizes that its message compares where it has them.

    >>> too_large("... required for HLO temporaries (64.00G) exceeds available HBM (15.75G).")
    """
    first_line = " ".join(message.split())
    match = re.search(rf"{_SIZE}\)? exceed\w* .*?{_SIZE}(?![\w.])", first_line)
    if match is None:
        match = re.search(rf"Used {_SIZE} of {_SIZE} hbm", first_line)
    if match is None:
        return TooLarge(None, None, first_line)
    needed, available = (
        int(float(number) * _UNITS[unit])
        for number, unit in ((match[1], match[2]), (match[3], match[4]))
    )
    return TooLarge(needed, available, first_line)


def _memory(stats: Any) -> Memory:
    arguments, outputs = stats.argument_size_in_bytes, stats.output_size_in_bytes
    temporaries = stats.temp_size_in_bytes
    # The runtime allocates the temporaries as one block: the compiler's own count of what lives at
    # once (peak_memory_in_bytes) leaves out its gaps. Results that overwrite arguments count once.
    together = arguments + outputs - stats.alias_size_in_bytes + temporaries
    peak = max(getattr(stats, "peak_memory_in_bytes", 0), together)
    return Memory(arguments, outputs, temporaries, peak, stats.generated_code_size_in_bytes)

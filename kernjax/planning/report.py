"""A plan's results as text, as a Markdown table and as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from kernjax.planning.bounds import Bound
from kernjax.planning.chips import GIB, Topology
from kernjax.planning.compiler import Memory, TooLarge


@dataclasses.dataclass(frozen=True)
class Phase:
    """One compiled program."""

    name: str
    memory: Memory | TooLarge
    compile_seconds: float  # the processor's
    bound: Bound


@dataclasses.dataclass(frozen=True)
class Plan:
    """A model on a slice: what its two programs take of every device."""

    model: str
    topology: Topology
    mesh: str
    context: int
    batch: int
    policy: str
    phases: tuple[Phase, ...]
    prefill_seconds: float  # at least, of the whole context

    @property
    def fits(self) -> bool:
        return all(
            isinstance(phase.memory, Memory) and phase.memory.peak <= self.topology.device_hbm
            for phase in self.phases
        )

    def verdict(self) -> str:
        """`fits: ...` or `does not fit: ...`, with the numbers."""
        has = f"{self.topology.device_hbm / GIB:.0f} GiB"
        refused = [phase for phase in self.phases if isinstance(phase.memory, TooLarge)]
        if refused:
            memory, name = refused[0].memory, refused[0].name
            if memory.needed is None:
                return f"does not fit {has} a device: {name}: {memory.message}"
            return (
                f"does not fit: {name} needs {memory.needed / GIB:.2f} GiB a device, of which"
                f" {memory.available / GIB:.2f} are free of the {has}"
            )
        worst = max(self.phases, key=lambda phase: phase.memory.peak)
        peak = worst.memory.peak
        return (
            f"{'fits' if self.fits else 'does not fit'}: {worst.name} peaks at"
            f" {peak / GIB:.2f} of {has} a device ({peak / self.topology.device_hbm:.0%})"
        )


COLUMNS = ("phase", "arguments", "temporaries", "peak", "code", "of HBM", "CPU s", "at least")


def cells(plan: Plan, phase: Phase) -> tuple[str, ...]:
    """One row of the table; GiB per device, code in MiB."""
    bound = f"{phase.bound.seconds * 1e3:.2f} ms ({phase.bound.limited_by})"
    seconds = f"{phase.compile_seconds:.0f}"
    memory = phase.memory
    if isinstance(memory, TooLarge):
        needed = "too much" if memory.needed is None else f"> {memory.needed / GIB:.2f}"
        return (phase.name, "-", "-", needed, "-", "too large", seconds, bound)
    sizes = (memory.arguments, memory.temporaries, memory.peak)
    return (
        phase.name,
        *(f"{size / GIB:.2f}" for size in sizes),
        f"{memory.code / 2**20:.1f}" if memory.code else "-",  # not told of GPUs
        f"{memory.peak / plan.topology.device_hbm:.0%}",
        seconds,
        bound,
    )


def title(plan: Plan) -> str:
    """What was planned, in a line."""
    topology = plan.topology
    devices = "" if topology.devices == topology.chips else f", {topology.devices} devices"
    return (
        f"{plan.model} on {topology.text} ({topology.chips} chips{devices}), mesh {plan.mesh},"
        f" context {plan.context}, batch {plan.batch}, policy {plan.policy}"
    )


def text(plan: Plan) -> str:
    """Title, table and verdict for a terminal."""
    rows = [COLUMNS, *(cells(plan, phase) for phase in plan.phases)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [title(plan), "  per device, GiB (code: MiB)"]
    for row in rows:
        first, *rest = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        lines.append("  ".join(["", row[0].ljust(len(first)), *rest]))
    lines.append(f"  {plan.verdict()}; prefill of the whole context takes at least"
                 f" {plan.prefill_seconds:.2f} s")  # fmt: skip
    return "\n".join(lines)


def markdown(plans: Sequence[Plan]) -> str:
    """One table over all plans."""
    head = ("slice", "mesh", "policy", *COLUMNS, "verdict")
    lines = [_row(head), _row(["---"] * len(head))]
    for plan in plans:
        for number, phase in enumerate(plan.phases):
            where = f"{plan.topology.text} ({plan.topology.chips} chips)"
            first = (where, plan.mesh, plan.policy) if number == 0 else ("", "", "")
            verdict = plan.verdict() if number == 0 else ""
            lines.append(_row((*first, *cells(plan, phase), verdict)))
    return "\n".join(lines)


def _row(row: Sequence[str]) -> str:
    return f"| {' | '.join(row)} |"


def data(plan: Plan) -> dict[str, Any]:
    """For the JSON line: bytes and seconds."""
    return {
        "model": plan.model,
        "topology": plan.topology.text,
        "chips": plan.topology.chips,
        "devices": plan.topology.devices,
        "mesh": plan.mesh,
        "context": plan.context,
        "batch": plan.batch,
        "policy": plan.policy,
        "fits": plan.fits,
        "hbm_per_device": plan.topology.device_hbm,
        "prefill_seconds_at_least": plan.prefill_seconds,
        "phases": [
            {
                "name": phase.name,
                **dataclasses.asdict(phase.memory),
                "compile_seconds": phase.compile_seconds,
                "bytes_moved": phase.bound.bytes,
                "flops": phase.bound.flops,
                "seconds_at_least": phase.bound.seconds,
                "limited_by": phase.bound.limited_by,
            }
            for phase in plan.phases
        ],
    }

"""Tries the instrument on rows of the catalogue: what each comes to, and whether that is right.

A fault is looked at on a few segments first, which is enough for most; what is not red there is
run on the whole corpus. There it is red, or below the floor: in every gate's every row the 95 %
upper bound lies below the smallest effect that the row fails with 95 % power. Neither is at the
floor: INCONCLUSIVE. A fault that cannot act on the corpus is judged at its op, on inputs that make
it act.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path

from kernjax.faults.capture import LAYERS, capture, with_scales
from kernjax.faults.catalogue import Fault
from kernjax.faults.inputs import Call
from kernjax.faults.measure import RED_AT_OP, Size, ratio_at_op, size_of
from kernjax.judge import Band, Gate, Outcome, Verdict, compare, judge
from kernjax.judge.gates import TESTED
from kernjax.model import ModelConfig
from kernjax.plugins import load_kernels
from kernjax.precision import Policy, parse_policy
from kernjax.recording import Recording, load_recording
from kernjax.scoring.recorder import Progress
from kernjax.scoring.session import Session

RED, QUIET = "red", "not red"
BELOW, AT = "below the floor", "at the floor"
MISSED, FALSE_ALARM = "MISSED", "FALSE ALARM"


@dataclasses.dataclass(frozen=True)
class Result:
    """What one row came to.

    `errors`: relative errors of output and state at the op, on the model's own inputs; on
    synthetic ones where `at_op` says how many times those of an equally right kernel they are.
    `ratios`: by kind, the geometric R over all depths and its one-sided 95 % bounds.
    """

    id: str
    ops: tuple[str, ...]
    what: str
    source: str
    expected: str
    status: str
    verdict: str  # the judge's outcome; "" where it was judged at the op
    gates: tuple[str, ...] = ()  # those that failed
    caught_by: str = ""  # the clearest of their rows
    errors: Size | None = None
    at_op: float | None = None
    ratios: dict[str, tuple[float, float, float]] = dataclasses.field(default_factory=dict)
    segments: int = 0
    seconds: float = 0.0
    note: str = ""

    @property
    def is_right(self) -> bool:
        """Whether it came to what the catalogue says."""
        if self.expected == "green":
            return self.status == QUIET
        return self.status == RED or (self.expected == "floor" and self.status in (BELOW, AT))


@dataclasses.dataclass(frozen=True)
class Trials:
    """One session, one band, and how thoroughly to look.

    `first_look`: segments of each kind and depth. `is_short`: controls get no more than that, and
    nothing is measured on the model's own inputs.
    """

    session: Session
    band: Band
    production: Policy
    folder: Path
    first_look: int = 4
    is_short: bool = False
    announce: Callable[[str], Callable[[Progress], None]] = lambda title: lambda progress: None

    def fault(self, fault: Fault) -> Result:
        """Tries one row of the catalogue."""
        began = time.monotonic()
        result = self._at_op(fault, fault.needs) if fault.at_op else self._in_model(fault)
        return dataclasses.replace(result, seconds=time.monotonic() - began)

    def fitting(self, faults: Iterable[Fault]) -> list[Fault]:
        """Those whose ops this model has."""
        types = ModelConfig.from_directory(self.session.model).layer_types
        return [
            fault
            for fault in faults
            if all(LAYERS[op.partition(".")[0]] in types for op, _ in fault.kernels)
        ]

    def normal(self, name: str, recorded: Path | None = None) -> Result:
        """Tries an equally right producer: a policy, or the recording of one."""
        began = time.monotonic()
        if recorded is None:
            recording = self._record(parse_policy(name), f"normal-{name}", (), None)
        else:
            recording = load_recording(recorded)
        row = Fault(name, (), "equally right producer, against the others", "normal", "green")
        result = self._result(row, self._judge(recording))
        return dataclasses.replace(result, seconds=time.monotonic() - began)

    def _in_model(self, fault: Fault) -> Result:
        policy = self._policy(fault)
        errors = None
        if not self.is_short:
            errors = size_of(fault, with_scales(self._calls, policy))
        for look in self._looks(fault):
            name = f"{fault.id}-{look or 'all'}"
            verdict = self._judge(self._record(policy, name, fault.specs, look))
            result = dataclasses.replace(self._result(fault, verdict), errors=errors)
            if verdict.outcome is Outcome.FAIL:
                return result
        if fault.expected != "green" and errors is not None and not errors.acts:
            return self._at_op(fault, f"does not act on this corpus; needs {fault.needs}")
        return result

    def _at_op(self, fault: Fault, needs: str) -> Result:
        errors, ratio = ratio_at_op(fault)
        return Result(
            fault.id,
            tuple(op for op, _ in fault.kernels),
            fault.what,
            fault.source,
            fault.expected,
            RED if ratio > RED_AT_OP else MISSED,
            "",
            caught_by=f"at the op: {ratio:.3g} times an equally right kernel's error",
            errors=errors,
            at_op=ratio,
            note=needs,
        )

    def _result(self, fault: Fault, verdict: Verdict) -> Result:
        failed = [gate for gate in verdict.gates if gate.outcome is Outcome.FAIL]
        return Result(
            fault.id,
            tuple(op for op, _ in fault.kernels),
            fault.what,
            fault.source,
            fault.expected,
            self._status(fault, verdict),
            str(verdict.outcome),
            gates=tuple(dict.fromkeys(gate.name for gate in failed)),
            caught_by=_clearest(failed),
            ratios={
                str(gate.kind): (gate.observed, gate.low, gate.high)
                for gate in verdict.gates
                if gate.name == "level" and gate.mean == "geometric"
                if gate.context_len is None and gate.observed
            },
            segments=verdict.segments,
        )

    def _status(self, fault: Fault, verdict: Verdict) -> str:
        is_red = verdict.outcome is Outcome.FAIL
        if fault.expected == "green":
            return FALSE_ALARM if is_red else QUIET
        if is_red:
            return RED
        if verdict.segments == len(self.band.segments):
            if is_below_floor(verdict.gates):
                return BELOW
            # A PASS is below the floor; what is not is INCONCLUSIVE, and would not be merged.
            if fault.expected == "floor":
                return AT
        return MISSED

    def _looks(self, fault: Fault) -> list[int | None]:
        """Segments of each kind and depth to try, one look after another; None: all."""
        cells = Counter((s.kind, s.context_len) for s in self.band.segments)
        if self.first_look >= max(cells.values()):
            return [None]
        if fault.expected == "green":
            return [self.first_look if self.is_short else None]
        # What hardly shows needs the whole corpus in any case.
        return [self.first_look, None] if fault.expected == "red" else [None]

    def _policy(self, fault: Fault) -> Policy:
        return parse_policy(",".join(filter(None, (str(self.production), fault.settings))))

    def _record(
        self, policy: Policy, name: str, specs: Iterable[str], limit: int | None
    ) -> Recording:
        return self.session.record(
            policy,
            self.folder / name,
            load_kernels(specs),
            limit=limit,
            on_progress=self.announce(name),
        )

    def _judge(self, recording: Recording) -> Verdict:
        return judge(compare(self.session.reference, recording), self.band)

    @cached_property
    def _calls(self) -> dict[str, list[Call]]:
        return capture(self.session, self.production)


def is_below_floor(gates: Iterable[Gate]) -> bool:
    """Whether every tested row's upper bound is below what the row detects with 95 % power."""
    for gate in gates:
        if gate.name not in TESTED or gate.high is None or gate.low is None:
            continue
        high = max(abs(gate.low), abs(gate.high)) if gate.quantity == "mass" else gate.high
        if gate.detectable is None or not high < gate.detectable:
            return False
    return True


def _clearest(failed: list[Gate]) -> str:
    """The failed row that says most: the smallest p, then the largest excess."""
    if not failed:
        return ""

    def rank(gate: Gate) -> tuple[float, float]:
        p = 1.0 if gate.p_value is None else gate.p_value
        excess = abs(gate.observed or 0.0) / gate.allowed if gate.allowed else 0.0
        return (-1.0 if gate.name == "nonfinite" else p, -excess)

    gate = min(failed, key=rank)
    observed = math.nan if gate.observed is None else gate.observed
    return f"{gate.name}: {gate.stratum}, {observed:.3g} of {gate.allowed:.3g}"

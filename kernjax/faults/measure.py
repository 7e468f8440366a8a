"""How large a fault is at its op: relative errors on real or synthetic calls."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from kernjax.faults.catalogue import Fault
from kernjax.faults.inputs import Call, example
from kernjax.plugins import Kernel, load_kernels
from pallas_kernels.formats import BF16
from pallas_kernels.ops import OPS

NORMAL_FORMATS: dict[str, dict[str, Any]] = {
    "attention": {"p": BF16, "block_k": 128},
    "delta_rule": {"v_new": BF16, "h": BF16, "chunk": 32},
}
"""What equally right kernels round: the yardstick at the op."""

RED_AT_OP = 4.0
"""An error of so many times the yardstick is red at the op; sixteen times its KL."""


@dataclasses.dataclass(frozen=True)
class Size:
    """Relative Frobenius errors of an op's outputs and, for the delta rule, of the state it
    leaves; inf where a value is not finite."""

    output: float
    state: float = 0.0

    @property
    def largest(self) -> float:
        return max(self.output, self.state)


def size_on(function: Callable[..., Any], op: str, calls: Sequence[Call]) -> Size:
    """The error of `function` against the healthy op on these calls, pooled."""
    if not calls:
        return Size(0.0)
    ours, theirs = (_compiled(f, calls[0]) for f in (function, OPS[op]))
    return _pooled((ours(call), theirs(call)) for call in calls)


def size_of(fault: Fault, calls: Mapping[str, Sequence[Call]]) -> Size:
    """The largest error over the ops that the fault replaces."""
    sizes = [size_on(k, op, calls.get(op, ())) for op, k in load_kernels(fault.specs).items()]
    return Size(max(s.output for s in sizes), max(s.state for s in sizes))


def ratio_at_op(fault: Fault) -> tuple[Size, float]:
    """The error on the fault's own synthetic inputs, and over the yardstick's on the same."""
    size, ratio = Size(0.0), 0.0
    for op, kernel in load_kernels(fault.specs).items():
        call, truth, normal = _yardstick(op, fault.inputs)
        here = _pooled([(_compiled(kernel, call)(call), truth)])
        size = Size(max(size.output, here.output), max(size.state, here.state))
        ratio = max(ratio, here.largest / normal)
    return size, ratio


@functools.cache
def _yardstick(op: str, family: str) -> tuple[Call, Any, float]:
    """A synthetic call, the healthy op's result, and the error of an equally right kernel there."""
    call = example(op, family)
    truth = _compiled(OPS[op], call)(call)
    normal = _pooled([(_compiled(_normal(op), call)(call), truth)])
    # A single decode step of an equally right kernel may round nothing.
    return call, truth, max(normal.largest, 1e-6)


def _pooled(pairs: Iterable[tuple[Any, Any]]) -> Size:
    """The error of the first of each pair against the second, over all of them."""
    squares = np.zeros((2, 2))  # error and truth, of output and state
    for ours, truth in pairs:
        for i, (a, b) in enumerate(zip(_arrays(ours), _arrays(truth), strict=True)):
            squares[i] += np.sum((a - b) ** 2), np.sum(b**2)
    return Size(*(_root(error, truth) for error, truth in squares))


def _normal(op: str) -> Callable[..., Any]:
    def equally_right(*arguments: jax.Array, formats: Any, **keywords: Any) -> Any:
        changed = dataclasses.replace(formats, **NORMAL_FORMATS[op.partition(".")[0]])
        return OPS[op](*arguments, formats=changed, **keywords)

    return equally_right


def _compiled(function: Callable[..., Any] | Kernel, like: Call) -> Callable[[Call], Any]:
    """`function` jitted for calls whose numbers and formats are those of `like`."""
    fixed = {k: v for k, v in like.keywords.items() if not hasattr(v, "shape")}
    run = jax.jit(lambda arguments, arrays: function(*arguments, **arrays, **fixed))

    def on(call: Call) -> Any:
        arrays = {k: v for k, v in call.keywords.items() if hasattr(v, "shape")}
        return run(call.arguments, arrays)

    return on


def _arrays(result: Any) -> list[np.ndarray]:
    parts = result if isinstance(result, tuple) else (result,)
    return [np.asarray(part, np.float64) for part in parts]


def _root(error: float, truth: float) -> float:
    if not math.isfinite(error):
        return math.inf
    return math.sqrt(error / truth) if truth else 0.0

"""The order of a model's layers, run in loops: what is compiled does not grow with depth.

A run is a few layers of one stack, one after another. Either the runs are cut into a unit that
repeats and what lies before and after it, each run of them a scan; or, where that leaves more to
compile, into what lies before and a cycle of stacks, whose runs have any length: loops that are
told how many layers they go over. Of Kimi K3 (one dense layer, two, then 22 times three mixtures
and an attention layer, and one more of these) the first takes five runs, the second three.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kernjax.model.config import STACKS
from kernjax.model.moe import Routes
from kernjax.model.residual import Stream


class Captured(NamedTuple):
    """What a call shows of its layers at some columns R; None: not asked for.

    hidden float32 [layers, B, R, D], the residual stream after every layer (of attention residuals
    the running block's, `Stream.x`); routes [mixtures of
    experts, B, R, ...] of every layer that has one.
    """

    hidden: jax.Array | None = None
    routes: Routes | None = None


Carry = tuple[Stream, jax.Array, jax.Array, jax.Array, jax.Array]
# (stack, index in it, carry) -> (carry, captured)
Step = Callable[[str, jax.Array, Carry], tuple[Carry, Captured]]


def run_pattern(layers: tuple[str, ...], step: Step, carry: Carry) -> tuple[Carry, Captured]:
    """Runs every layer, named by its stack, in order; captured values come back in layer order."""
    pattern, cycle = repeating_unit(layers), cycle_of(layers)
    if cycle is not None and cycle.written_out < pattern.written_out:
        return _run_cycle(layers, cycle, step, carry)
    return _run_unit(layers, pattern, step, carry)


def _run_unit(
    layers: tuple[str, ...], pattern: Pattern, step: Step, carry: Carry
) -> tuple[Carry, Captured]:
    seen: list[Captured] = []
    if pattern.head:
        carry, out = _run_part(pattern.head, dict.fromkeys(STACKS, 0), step, carry)
        seen.append(out)
    before, per_unit = _count(pattern.head), _count(pattern.unit)

    def run_unit(carry: Carry, repeat: jax.Array):
        positions = {name: repeat * per_unit[name] + before[name] for name in STACKS}
        return _run_part(pattern.unit, positions, step, carry)

    carry, out = jax.lax.scan(run_unit, carry, jnp.arange(pattern.repeats, dtype=jnp.int32))
    seen.append(jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), out))
    if pattern.tail:
        done = _count(layers[: len(layers) - len(pattern.tail)])
        carry, out = _run_part(pattern.tail, done, step, carry)
        seen.append(out)
    return carry, _joined(seen)


def _run_cycle(
    layers: tuple[str, ...], cycle: Cycle, step: Step, carry: Carry
) -> tuple[Carry, Captured]:
    seen: list[Captured] = []
    before = _count(cycle.head)
    if cycle.head:
        carry, out = _run_part(cycle.head, dict.fromkeys(STACKS, 0), step, carry)
        seen.append(out)

    # What the layers show goes to its place in arrays of the whole: a loop of a length that is not
    # known has no results of its own.
    rest, lengths = layers[len(cycle.head) :], np.asarray(cycle.lengths, np.int32)
    shown = {
        name: jax.eval_shape(functools.partial(step, name), jnp.int32(0), carry)[1]
        for name in cycle.stacks
    }
    with_routes = [name for name in cycle.stacks if shown[name].routes is not None]
    of_all = [name for name in rest if name in with_routes]
    room = Captured(
        _room(shown[cycle.stacks[0]].hidden, len(rest)),
        _room(shown[with_routes[0]].routes, len(of_all)) if with_routes else None,
    )

    def place(which: np.ndarray) -> np.ndarray:
        """int32 [rounds, stacks]: layers of `which` (bool [stacks]) stacks before each run."""
        counted = lengths * which
        return (np.cumsum(counted) - counted.ravel()).reshape(lengths.shape).astype(np.int32)

    columns = np.asarray(cycle.stacks)
    firsts = [place(columns == name)[:, at] + before[name] for at, name in enumerate(columns)]
    hidden_at = place(np.ones(len(columns), bool))
    routes_at = place(np.isin(columns, with_routes))

    def one_round(state, numbers):
        for at, name in enumerate(cycle.stacks):
            length, first, hidden, routes = (column[at] for column in numbers)

            def one(offset, state, name=name, first=first, hidden=hidden, routes=routes):
                carry, room = state
                carry, out = step(name, first + offset, carry)
                return carry, Captured(
                    _put(room.hidden, out.hidden, hidden + offset),
                    room.routes
                    if out.routes is None
                    else _put(room.routes, out.routes, routes + offset),
                )

            state = jax.lax.fori_loop(jnp.int32(0), length, one, state)
        return state, None

    numbers = (lengths, np.stack(firsts, axis=1).astype(np.int32), hidden_at, routes_at)
    (carry, room), _ = jax.lax.scan(one_round, (carry, room), tuple(map(jnp.asarray, numbers)))
    return carry, _joined([*seen, room])


def _run_part(
    part: tuple[str, ...], before: Mapping[str, Any], step: Step, carry: Carry
) -> tuple[Carry, Captured]:
    """`part` of the layers, with `before` layers of each stack before it, a scan a run."""
    seen, position = [], dict(before)
    for name, group in itertools.groupby(part):
        length, first = len(list(group)), position[name]
        carry, out = jax.lax.scan(
            lambda carry, offset, name=name, first=first: step(name, first + offset, carry),
            carry,
            jnp.arange(length, dtype=jnp.int32),
        )
        position[name] = first + length
        seen.append(out)
    return carry, _joined(seen)


def _count(part: tuple[str, ...]) -> dict[str, int]:
    return {name: part.count(name) for name in STACKS}


def _room(one: Any, count: int) -> Any:
    """Zeros for what `count` layers show, each as `one`."""
    return jax.tree.map(lambda leaf: jnp.zeros((count, *leaf.shape), leaf.dtype), one)


def _put(room: Any, new: Any, at: jax.Array) -> Any:
    return jax.tree.map(
        lambda leaf, value: jax.lax.dynamic_update_index_in_dim(leaf, value, at, 0), room, new
    )


def _joined(seen: Sequence[Captured]) -> Captured:
    """What consecutive layers show, one after another; not all of them are mixtures of experts."""
    hidden = [one.hidden for one in seen if one.hidden is not None]
    routes = [one.routes for one in seen if one.routes is not None]
    return Captured(
        jnp.concatenate(hidden) if hidden else None,
        jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *routes) if routes else None,
    )


class Pattern(NamedTuple):
    """layers = head + unit * repeats + tail."""

    head: tuple[str, ...]
    unit: tuple[str, ...]
    repeats: int
    tail: tuple[str, ...]

    @property
    def written_out(self) -> int:
        """Runs that are compiled, each by itself."""
        return sum(map(_runs, (self.head, self.unit, self.tail)))


class Cycle(NamedTuple):
    """layers = head, then round by round `lengths[round][i]` layers (none, too) of `stacks[i]`."""

    head: tuple[str, ...]
    stacks: tuple[str, ...]
    lengths: tuple[tuple[int, ...], ...]

    @property
    def written_out(self) -> int:
        return _runs(self.head) + len(self.stacks)


def _runs(part: tuple[str, ...]) -> int:
    return len(list(itertools.groupby(part)))


@functools.cache
def repeating_unit(layers: tuple[str, ...]) -> Pattern:
    """The cut of `layers` that leaves the fewest runs of one stack to write out.

    A pattern that never repeats is one unit, once.
    """

    def cut(start: int, size: int) -> Pattern:
        unit, stop = layers[start : start + size], start + size
        while layers[stop : stop + size] == unit:
            stop += size
        return Pattern(layers[:start], unit, (stop - start) // size, layers[stop:])

    total = len(layers)
    cuts = (cut(start, size) for start in range(total) for size in range(1, total - start + 1))
    return min(cuts, key=lambda p: (p.written_out, len(p.head), len(p.tail), len(p.unit)))


@functools.cache
def cycle_of(layers: tuple[str, ...]) -> Cycle:
    """The cut of `layers` whose runs follow one another in a cycle, with the fewest written out."""
    runs = [(name, len(list(group))) for name, group in itertools.groupby(layers)]

    def cut(start: int, size: int) -> Cycle | None:
        rest = runs[start:]
        stacks = tuple(name for name, _ in rest[:size])
        if any(name != stacks[at % size] for at, (name, _) in enumerate(rest)):
            return None
        lengths = [length for _, length in rest]
        lengths += [0] * (-len(lengths) % size)
        rounds = tuple(tuple(lengths[at : at + size]) for at in range(0, len(lengths), size))
        head = tuple(itertools.chain(*([name] * length for name, length in runs[:start])))
        return Cycle(head, stacks, rounds)

    starts = range(len(runs))
    cuts = (cut(start, size) for start in starts for size in range(1, len(runs) - start + 1))
    return min(
        (found for found in cuts if found is not None),
        key=lambda c: (c.written_out, len(c.head), len(c.stacks)),
    )

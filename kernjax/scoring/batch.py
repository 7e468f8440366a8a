"""Scores a batch of segments of one depth: prefill windows, then a compiled scan over decode.

Nothing of size [context, vocab] exists at any time: logits are made for the scored positions of
one window, or for one decode step.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from kernjax.model import Cache, Decoder, Execution, capacity_for, forward, init_cache, logits
from kernjax.scoring.placement import Placement
from kernjax.scoring.positions import DECODE, PREFILL, RESCORE
from kernjax.scoring.programs import Program
from kernjax.scoring.routes import TOKEN_ROUTE_IDS, route_rows
from kernjax.scoring.rows import TOP_K, score_rows
from kernjax.scoring.sketch import sketch

# Depths below share the programs for decode and rescoring; an unused slot costs memory only.
_LEAST_CAPACITY = 2560


@dataclasses.dataclass(frozen=True)
class RowPlan:
    """What to score in one segment, and at which ids.

    `prefill` int32 [P]: prompt positions. `rescore`: whether the decoded tokens are scored again
    by one prefill call. `top_ids` int32 [rows, 20] in row order (prefill, decode, rescore), or
    None where the segment's own top 20 are taken (a reference). `experts` [context_len + score_len,
    mixtures of experts, k]: those that every token is sent to, or None where routers choose.
    """

    prefill: np.ndarray
    rescore: bool = False
    top_ids: np.ndarray | None = None
    experts: np.ndarray | None = None


class Scorer:
    """A model, an execution and the compiled functions that score batches with them.

    The decoder may hold shapes alone: then `prepare` works, and `score` does after `hold`.

    `hidden=True` adds per-layer sketches of the residual stream to every row, `full=True` the
    log-probabilities of the whole vocabulary, `routes` ("rows" or "all") the experts that every row
    went to, or those of every token too. With `variants`, other executions with the same `top`,
    each call of `score` chooses which one a layer runs, by the same compiled programs. With a
    `mesh` (that of the decoder's weights) batches and caches are sharded over it, on however many
    hosts it lies: all of them call the same, and get all rows.
    """

    def __init__(
        self,
        decoder: Decoder,
        execution: Execution,
        window: int,
        *,
        hidden: bool = False,
        full: bool = False,
        routes: str | None = None,
        variants: Sequence[Execution] = (),
        mesh: Mesh | None = None,
    ) -> None:
        self.config, self.execution, self.window = decoder.config, execution, window
        self.hidden = hidden
        plans = tuple(plan for one in (execution, *variants) for plan in one.layers)
        # A cache holds what any variant stores.
        self._stored = dataclasses.replace(execution, layers=plans)
        self._placement = Placement(decoder.config, self._stored, mesh)
        self._which = np.zeros(len(execution.layers), np.int32) if variants else None
        graph, self._params = nnx.split(decoder)
        keep = _Keep(hidden, full, routes)
        chosen = (graph, execution, tuple(variants), keep)
        place, rows = self._placement, self._placement.rows
        prefill = place.by_parts(
            functools.partial(_prefill_window, *chosen), takes="wwbcbbbb", gives="cb"
        )
        decode = place.by_parts(functools.partial(_decode_scan, *chosen), takes="wwbcbb", gives="b")
        self._prefill = Program(prefill, donate=(3,), out_shardings=(place.cache, rows))
        self._decode = Program(decode, out_shardings=rows)

    def hold(self, decoder: Decoder) -> None:
        """Takes the weights of `decoder`, of the same config and dtypes, from now on."""
        self._params = nnx.split(decoder)[1]

    def choose(self, which: np.ndarray) -> None:
        """From now on layer i runs variant `which[i]` (0: the execution, k: `variants[k - 1]`)."""
        self._which = np.asarray(which, np.int32)

    def score(
        self,
        tokens: np.ndarray,
        context_len: int,
        plans: list[RowPlan],
        progress: Callable[[int], None] = lambda done: None,
    ) -> list[dict[str, np.ndarray]]:
        """Rows of every segment of a batch, as `kernjax.recording` stores them.

        tokens int32 [B, context_len + score_len + 1]; one plan a segment. `progress` is told how
        many tokens a row of the batch has advanced.
        """
        batch, score_len = len(tokens), tokens.shape[1] - 1 - context_len
        # What the mesh's `data` axis lacks is filled with repetitions, which nobody looks at.
        filled = np.arange(self._placement.filled(batch)) % batch
        tokens, plans = tokens[filled], [plans[row] for row in filled]
        cache = self._placement.empty_cache(len(tokens), _capacity(context_len + score_len))
        parts: list[_Part] = []
        for start in range(0, context_len, self.window):
            stop = min(start + self.window, context_len)
            cache, part = self._score_window(tokens, start, stop, cache, plans)
            parts.append(part)
            progress(stop - start)
        prefix = jax.tree.map(jnp.copy, cache) if any(p.rescore for p in plans) else None
        parts.append(self._score_decode(tokens, context_len, score_len, cache, plans))
        progress(score_len)
        if prefix is not None:
            parts.append(self._rescore(tokens, context_len, score_len, prefix, plans))
        return [_collect(parts, row) for row in range(batch)]

    def prepare(
        self,
        pool: ThreadPoolExecutor,
        batch: int,
        context_len: int,
        score_len: int,
        plans: list[RowPlan],
    ) -> None:
        """Starts to compile what `score` will call for such a batch.

        For weights on one device: what is sharded compiles when it is called.
        """
        shape = functools.partial(jax.ShapeDtypeStruct, dtype=np.int32)
        cache = jax.eval_shape(
            lambda: init_cache(self.config, self._stored, batch, _capacity(context_len + score_len))
        )

        def ids(*rows: int) -> Any:
            return None if plans[0].top_ids is None else shape((batch, *rows, TOP_K))

        def experts(time: int) -> Any:
            forced = plans[0].experts
            return None if forced is None else shape((batch, time, *forced.shape[1:]))

        def window(start: int, stop: int, width: int) -> None:
            rows = shape((batch, width))
            self._prefill.prepare(
                pool, self._params, self._which, shape((batch, stop - start)), cache, rows, rows,
                ids(width), experts(stop - start),
            )  # fmt: skip

        starts = range(0, context_len, self.window)
        for start in starts:
            stop = min(start + self.window, context_len)
            inside = max(int(_inside(plan.prefill, start, stop).sum()) for plan in plans)
            window(start, stop, _width(inside))
            if start == 0:
                # Needed last, but shared by all depths; a deep context has time for its own later.
                steps = shape((batch, score_len + 1))
                self._decode.prepare(
                    pool, self._params, self._which, steps, cache, ids(score_len),
                    experts(score_len),
                )  # fmt: skip
        if any(plan.rescore for plan in plans):
            window(context_len, context_len + score_len, score_len)

    def _score_window(
        self, tokens: np.ndarray, start: int, stop: int, cache: Cache, plans: list[RowPlan]
    ) -> tuple[Cache, _Part]:
        inside = [_inside(plan.prefill, start, stop) for plan in plans]
        rows = [
            np.arange(len(plan.prefill))[where] for plan, where in zip(plans, inside, strict=True)
        ]
        columns = [plan.prefill[where] - start for plan, where in zip(plans, inside, strict=True)]
        width = _width(max(map(len, columns)))
        return self._run_window(tokens, start, stop, cache, plans, columns, rows, width, PREFILL)

    def _rescore(
        self,
        tokens: np.ndarray,
        context_len: int,
        score_len: int,
        cache: Cache,
        plans: list[RowPlan],
    ) -> _Part:
        columns = [np.arange(score_len if plan.rescore else 0, dtype=np.int32) for plan in plans]
        rows = [
            len(plan.prefill) + score_len + np.arange(len(c))
            for plan, c in zip(plans, columns, strict=True)
        ]
        _, part = self._run_window(
            tokens,
            context_len,
            context_len + score_len,
            cache,
            plans,
            columns,
            rows,
            score_len,
            RESCORE,
        )
        return part

    def _run_window(
        self, tokens, start, stop, cache, plans, columns, rows, width, phase
    ) -> tuple[Cache, _Part]:
        padded = np.stack([np.pad(c, (0, width - len(c))).astype(np.int32) for c in columns])
        targets = np.take_along_axis(tokens[:, start + 1 : stop + 1], padded, axis=1)
        ids = _ids([(plan.top_ids, r) for plan, r in zip(plans, rows, strict=True)], width)
        cache, scored = self._prefill(
            self._params,
            self._which,
            self._placement.put(tokens[:, start:stop]),
            cache,
            self._placement.put(padded),
            self._placement.put(targets),
            self._placement.put(ids),
            self._placement.put(_experts(plans, start, stop)),
        )
        positions = [c + start for c in columns]
        return cache, _Part(phase, positions, jax.device_get(scored))

    def _score_decode(
        self,
        tokens: np.ndarray,
        context_len: int,
        score_len: int,
        cache: Cache,
        plans: list[RowPlan],
    ) -> _Part:
        rows = [len(plan.prefill) + np.arange(score_len) for plan in plans]
        ids = _ids([(plan.top_ids, r) for plan, r in zip(plans, rows, strict=True)], score_len)
        scored = self._decode(
            self._params,
            self._which,
            self._placement.put(tokens[:, context_len:]),
            cache,
            self._placement.put(ids),
            self._placement.put(_experts(plans, context_len, context_len + score_len)),
        )
        position = np.arange(context_len, context_len + score_len, dtype=np.int32)
        return _Part(DECODE, [position] * len(plans), jax.device_get(scored))


@dataclasses.dataclass(frozen=True)
class _Part:
    """Scored rows of one call: per segment its positions; arrays [B, width, ...], width padded."""

    phase: int
    positions: list[np.ndarray]
    scored: Mapping[str, np.ndarray]


class _Keep(NamedTuple):
    """What of a row is kept beside its scores."""

    hidden: bool
    full: bool
    routes: str | None


def _forward(graph, execution, variants, keep, params, which, tokens, cache, experts, decode):
    """`forward` with what is kept captured at every column; experts [B, T, layers, k] or None."""
    columns = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    decoder = nnx.merge(graph, params)
    states, cache, captured = forward(
        decoder,
        tokens,
        cache,
        execution,
        decode=decode,
        capture=columns if keep.hidden else None,
        routes=columns if keep.routes else None,
        forced=None if experts is None else jnp.moveaxis(experts, 2, 0),
        variants=variants,
        which=which,
    )
    return decoder, states, cache, captured


def _prefill_window(
    graph, execution, variants, keep, params, which, tokens, cache, columns, targets, ids, experts
):
    decoder, states, cache, captured = _forward(
        graph, execution, variants, keep, params, which, tokens, cache, experts, False
    )
    chosen = jnp.take_along_axis(states, columns[:, :, None], axis=1)
    scored = score_rows(logits(decoder, chosen, execution), targets, ids, full=keep.full)
    if keep.hidden:
        at_columns = jnp.take_along_axis(captured.hidden, columns[None, :, :, None], axis=2)
        scored["hidden_sketch"] = sketch(at_columns)
    if keep.routes:
        scored |= route_rows(captured.routes, columns, decoder.config, keep.routes)
    return cache, scored


def _decode_scan(graph, execution, variants, keep, params, which, tokens, cache, ids, experts):
    """tokens [B, steps + 1] -> rows [B, steps, ...]; the scan is over steps."""

    def step(cache, inputs):
        token, target, at, experts = inputs
        experts = None if experts is None else experts[:, None]
        decoder, states, cache, captured = _forward(
            graph, execution, variants, keep, params, which, token[:, None], cache, experts, True
        )
        scored = score_rows(logits(decoder, states[:, 0], execution), target, at, full=keep.full)
        if keep.hidden:
            scored["hidden_sketch"] = sketch(captured.hidden[:, :, 0])
        if keep.routes:
            column = jnp.zeros((len(token), 1), jnp.int32)
            routes = route_rows(captured.routes, column, decoder.config, keep.routes)
            scored |= {name: values[:, 0] for name, values in routes.items()}
        return cache, scored

    by_step = jnp.swapaxes(tokens, 0, 1)
    ids, experts = (None if x is None else jnp.swapaxes(x, 0, 1) for x in (ids, experts))
    _, scored = jax.lax.scan(step, cache, (by_step[:-1], by_step[1:], ids, experts))
    return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), scored)


def _capacity(tokens: int) -> int:
    """Cache slots for so many tokens."""
    return max(capacity_for(tokens), _LEAST_CAPACITY)


def _width(columns: int) -> int:
    """Scored columns of a window, padded so that windows of unequal counts share a program."""
    return 1 << max(columns - 1, 0).bit_length()


def _inside(positions: np.ndarray, start: int, stop: int) -> np.ndarray:
    return (positions >= start) & (positions < stop)


def _ids(chosen: list[tuple[np.ndarray | None, np.ndarray]], width: int) -> np.ndarray | None:
    """The reference's ids of the chosen rows, [B, width, 20]; padding repeats ids 0..19."""
    if chosen[0][0] is None:
        return None
    ids = np.tile(np.arange(TOP_K, dtype=np.int32), (len(chosen), width, 1))
    for batch, (top_ids, rows) in enumerate(chosen):
        ids[batch, : len(rows)] = top_ids[rows]
    return ids


def _experts(plans: list[RowPlan], start: int, stop: int) -> np.ndarray | None:
    """int32 [B, stop - start, layers, k]: where tokens are sent; None: where routers choose."""
    if plans[0].experts is None:
        return None
    return np.stack([plan.experts[start:stop] for plan in plans]).astype(np.int32)


def _collect(parts: list[_Part], row: int) -> dict[str, np.ndarray]:
    """One segment's rows, by phase and then position, without the padding."""
    pieces: dict[str, list[np.ndarray]] = {}
    for part in parts:
        count = len(part.positions[row])
        pieces.setdefault("pos", []).append(part.positions[row].astype(np.int32))
        pieces.setdefault("phase", []).append(np.full(count, part.phase, np.uint8))
        for name, values in part.scored.items():
            if name != TOKEN_ROUTE_IDS:
                pieces.setdefault(name, []).append(values[row, :count])
            elif part.phase != RESCORE:  # tokens that were read before
                pieces.setdefault(name, []).append(values[row])
    return {name: np.concatenate(values) for name, values in pieces.items()}

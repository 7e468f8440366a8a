"""Recordings in place of the demo model: commands run as they are, and nothing is compiled.

What is left out is the arithmetic of the model, which tests of scoring, locate, sweep, selftest
and the experiments run on a tiny checkpoint. Flags, policies, kernels (which are traced), plans,
files, judgement and reports are the commands' own.
"""

from __future__ import annotations

import contextlib
import functools
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tiny_band import variant

from kernjax.experiments.attention import Effect
from kernjax.experiments.drift import TAIL, Drift
from kernjax.experiments.state import Decoded
from kernjax.faults.measure import Size
from kernjax.model import plan_execution
from kernjax.precision import parse_policy
from kernjax.recording import Recording, load_recording
from kernjax.recording.layout import COLUMNS
from kernjax.scoring.local_error import LocalError
from kernjax.texts import Segment, load_corpus

RECORDINGS = Path(__file__).resolve().parent.parent / "kernjax" / "demo" / "recordings"
BAD = {"bf16,delta_rule.state=m4": 2.0, "fp8_lazy_rescale": 2.0}
"""Policies that are wrong, and how many times as far from the truth as production."""


@functools.cache
def _segments(name: str) -> dict[bytes, str]:
    corpus = load_corpus(name)
    return {segment.tokens.tobytes(): segment.id for segment in corpus.segments}


@functools.cache
def _recording(corpus: str, policy: str) -> Recording:
    """The bundled one; of other policies chunk32's errors, with signs of the policy's own."""
    bundled = RECORDINGS / f"{corpus}.{policy}.zip"
    if bundled.is_file():
        return load_recording(bundled)
    truth, other = (_recording(corpus, name) for name in ("f32", "chunk32"))
    rng = np.random.default_rng(zlib.crc32(policy.encode()))
    # Other signs than chunk32's in most rows, or it would be a near duplicate of it.
    signs = np.where(rng.random(len(truth)) < 0.8, -1.0, 1.0)
    return variant(truth, other, signs * BAD.get(policy, 1.0), policy)


def rows(tokens: np.ndarray, plans: list, policy: str) -> list[dict[str, np.ndarray]]:
    """What `Scorer.score` returns of segments of a bundled corpus."""
    found = []
    for row, plan in zip(np.asarray(tokens, np.int32), plans, strict=True):
        corpus = next(n for n in ("demo", "demo-deep") if row.tobytes() in _segments(n))
        recording = _recording(corpus, policy)
        where = recording.rows_of(_segments(corpus)[row.tobytes()])
        decoded = int((recording.phase[where] == 1).sum())
        count = len(plan.prefill) + decoded * (1 + plan.rescore)
        found.append({name: getattr(recording, name)[where][:count] for name in COLUMNS})
    return found


def _trace(kernel) -> None:
    """The plug-in is called, as in a model, with arguments of the demo's shapes."""

    def f32(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    step = 1 if kernel.op in ("attention.decode", "delta_rule.recurrent") else 64
    if kernel.op.startswith("attention."):
        arrays = [f32(2, step, 4, 64), f32(2, 128, 2, 64), f32(2, 128, 2, 64)]
        at = jax.ShapeDtypeStruct((2,), jnp.int32)
        jax.eval_shape(
            lambda q, k, v, start, length: kernel(q, k, v, q_offset=start, kv_length=length),
            *arrays, at, at,
        )  # fmt: skip
    else:
        arrays = [f32(2, step, 2, 64), f32(2, step, 2, 64), f32(2, step, 4, 64)]
        arrays += [f32(2, step, 4), f32(2, step, 4), f32(2, 4, 64, 64)]
        jax.eval_shape(kernel, *arrays)


def stand_in(monkeypatch) -> list[str]:
    """Puts the recordings in place; the titles of the runs come into the list that it returns."""
    titles: list[str] = []

    def of_producer(self, tokens, context_len, plans, progress=lambda done: None):
        for kernel in self.kernels.values():
            _trace(kernel)
        progress(tokens.shape[1] - 1)
        return rows(tokens, plans, str(self.policy))

    def of_scorer(self, tokens, context_len, plans, progress=lambda done: None):
        truth = plan_execution(parse_policy("f32"), len(self.execution.layers))
        for plan in self.variants_seen:
            for _, kernel in plan.kernels:
                _trace(kernel)
        is_truth = self.execution == truth and not (self._which is not None and self._which.any())
        return rows(tokens, plans, "f32" if is_truth else "chunk32")

    from kernjax.scoring.batch import Scorer
    from kernjax.scoring.producer import Checkpoint, JaxProducer

    built = Scorer.__init__

    def init(self, decoder, execution, window, **keywords):
        built(self, decoder, execution, window, **keywords)
        every = (execution, *keywords.get("variants", ()))
        self.variants_seen = {plan for one in every for plan in one.layers}

    read = Checkpoint.params

    def params(self, dtype, packed=False):
        key = self.directory.resolve(), dtype, packed
        if key not in _WEIGHTS:
            _WEIGHTS[key] = read(self, dtype, packed)
        return _WEIGHTS[key]

    monkeypatch.setattr(Checkpoint, "params", params)
    monkeypatch.setattr(Scorer, "__init__", init)
    monkeypatch.setattr(Scorer, "score", of_scorer)
    monkeypatch.setattr(JaxProducer, "score", of_producer)
    monkeypatch.setattr(JaxProducer, "compiling", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr("kernjax.scoring.probe.Probe.after_one_step", _after_one_step)
    monkeypatch.setattr("kernjax.scoring.local_error.LayerBench", _Bench)
    monkeypatch.setattr("kernjax.faults.trials.Trials._calls", {})
    monkeypatch.setattr("kernjax.faults.trials.with_scales", lambda calls, policy: calls)
    monkeypatch.setattr("kernjax.faults.trials.size_of", lambda fault, calls: Size(0.01))
    monkeypatch.setattr("kernjax.scoring.sampling.sample_segments", _sampled)
    monkeypatch.setattr("kernjax.experiments.state.decode", _decoded)
    monkeypatch.setattr("kernjax.experiments.attention.measure", _effect)
    monkeypatch.setattr("kernjax.experiments.drift.measure", _drift)
    monkeypatch.setattr("kernjax.experiments.article.measured", lambda *_: dict.fromkeys(
        ("first_layer", "state", "greedy")))  # fmt: skip

    from kernjax.base import progress

    class Meter(progress.Meter):
        def __init__(self, title, unit):
            super().__init__(title, unit)
            titles.append(title)

    monkeypatch.setattr(progress, "Meter", Meter)
    return titles


_WEIGHTS: dict = {}  # read once for all the commands: most are of the same few megabytes
_RNG = np.random.default_rng(0)


def _after_one_step(self, tokens, context_len):
    layers, batch = self.config.num_layers, len(tokens)
    recurrent = self.config.layer_types.count("linear_attention")
    return {
        "stream": _RNG.normal(size=(layers, batch, 8)).astype(np.float32),
        "state": _RNG.normal(size=(recurrent, batch, 2, 4, 4)).astype(np.float32),
    }


class _Bench:
    def __init__(self, base, execution, tokens, context_len):
        self._shape = context_len, len(tokens) - 1 - context_len

    def error(self, layer, plan):
        return LocalError(*(_RNG.uniform(1e-4, 1e-2, size) for size in self._shape))


def _sampled(model, prompts, *, context_len, score_len, **_):
    size = context_len + score_len + 1
    return [
        Segment(p.id, p.kind, context_len, score_len, _RNG.integers(1, 384, size).astype(np.int32))
        for p in prompts
    ]


def _decoded(checkpoint, lanes, tokens, context_len, progress=lambda steps: None):
    shape = len(lanes) - 1, len(tokens), tokens.shape[1] - context_len
    progress(shape[2])
    kl = _RNG.uniform(1e-6, 1e-4, shape)
    return Decoded(tuple(lanes[1:]), kl, kl > 9e-5, _RNG.uniform(0, 1, (shape[0], 9, *shape[1:])))


def _effect(checkpoint, policy, formats, tokens, window):
    depths = tuple(range(window, tokens.shape[1] + 1, window))
    shape = len(formats), 3, len(depths), len(tokens)
    parts = [_RNG.uniform(1e-3, 1e-2, shape) for _ in range(4)]
    return Effect(tuple(formats), (3, 7, 11), depths, *parts)


def _drift(checkpoint, formats, tokens, window, announce=lambda name, kl: None):
    depths = tuple(range(window, tokens.shape[1] + 1, window))
    kl = _RNG.uniform(1e-6, 1e-4, (len(formats), len(tokens), len(depths), TAIL))
    return Drift(tuple(formats), depths, kl)

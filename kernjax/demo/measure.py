"""Measures the demo checkpoint on held-out text: loss, confidence, mass outside the top 20.

    python -m kernjax.demo.measure --model=DIRECTORY --tokens=RUN/tokens --out=measured.json

The model runs as `kernjax.record` runs it, under the f32 policy, in prefill windows over the first
`--context` held-out tokens of each kind (fewer where the text is shorter); rows are averages over
bins of positions. The last line of standard output is one JSON object. Exit codes: 0 measured,
3 could not.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from kernjax.base import command
from kernjax.base.errors import UserError

FLAGS = command.Flags("demo.measure", __doc__)
_MODEL = FLAGS.string("model", None, "HF directory of the model.", required=True)
_TOKENS = FLAGS.string("tokens", None, "Token streams of a training run.", required=True)
_OUT = FLAGS.string("out", None, "JSON file to write.")
_CONTEXT = FLAGS.integer("context", 32768, "Longest context.", lower_bound=64)
_SEQUENCES = FLAGS.integer("sequences", 2, "Stretches of text of each kind.", lower_bound=1)
_WINDOW = FLAGS.integer("window", 1024, "Tokens of a prefill window.", lower_bound=16)

BINS = (0, 64, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
TOP = 20


def main(words: list[str]) -> int:
    if words:
        raise UserError(f"Unexpected arguments {words}.", "Expected flags only.")
    from kernjax.demo.data import KINDS
    from kernjax.weights import load_model

    decoder = load_model(_MODEL.value)
    rows = []
    for kind in KINDS:
        path = Path(_TOKENS.value) / f"held_out.{kind}.npy"
        if not path.exists():
            raise UserError(f"{path} does not exist.", "Expected a training run's tokens.")
        tokens = cut(np.load(path).astype(np.int32), _CONTEXT.value, _SEQUENCES.value)
        values = position_statistics(decoder, tokens, _WINDOW.value)
        rows += [{"kind": kind, **row} for row in binned(values)]
    measured = {"sequences": _SEQUENCES.value, "rows": rows}
    if _OUT.value:
        Path(_OUT.value).write_text(json.dumps(measured, indent=1) + "\n")
    command.print_json(measured)
    return command.EXIT_PASS


def cut(tokens: np.ndarray, context: int, count: int) -> np.ndarray:
    """int32 [count, length + 1]: stretches spread evenly over the stream, which may overlap."""
    length = min(context, len(tokens) - 1)
    starts = np.linspace(0, len(tokens) - length - 1, count).astype(int)
    return np.stack([tokens[start : start + length + 1] for start in starts])


def position_statistics(decoder: Any, tokens: np.ndarray, window: int) -> dict[str, np.ndarray]:
    """loss, tail (mass outside the top 20), top1 (its probability): float32 [rows, length]."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from kernjax.model import forward, init_cache, logits, plan_execution
    from kernjax.precision import parse_policy

    count, length = tokens.shape[0], tokens.shape[1] - 1
    execution = plan_execution(parse_policy("f32"), decoder.config.num_layers)
    graph, params = nnx.split(decoder)

    @jax.jit
    def step(params: Any, cache: Any, inputs: jax.Array, targets: jax.Array, real: jax.Array):
        model = nnx.merge(graph, params)
        hidden, cache, _ = forward(model, inputs, cache, execution, count=real)
        logprobs = jax.nn.log_softmax(logits(model, hidden, execution), axis=-1)
        top = jnp.exp(jax.lax.top_k(logprobs, min(TOP, logprobs.shape[-1]))[0])
        loss = -jnp.take_along_axis(logprobs, targets[..., None], axis=-1)[..., 0]
        return cache, {"loss": loss, "tail": 1.0 - jnp.sum(top, axis=-1), "top1": top[..., 0]}

    windows = -(-length // window)
    cache = init_cache(decoder.config, execution, count, windows * window)
    padded = np.pad(tokens, ((0, 0), (0, windows * window - length)))
    parts: list[dict[str, np.ndarray]] = []
    for start in range(0, length, window):
        real = min(window, length - start)
        inputs, targets = (padded[:, start + i : start + i + window] for i in (0, 1))
        cache, part = step(params, cache, inputs, targets, np.int32(real))
        parts.append({name: np.asarray(value)[:, :real] for name, value in part.items()})
    return {name: np.concatenate([p[name] for p in parts], axis=1) for name in parts[0]}


def binned(values: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """Averages (of top1 the median) over the bins of positions that the text reaches."""
    length = values["loss"].shape[1]
    rows = []
    for start, stop in zip(BINS, BINS[1:], strict=False):
        if start >= length:
            break
        at = slice(start, min(stop, length))
        rows.append(
            {
                "from": start,
                "to": min(stop, length),
                "loss": round(float(values["loss"][:, at].mean()), 4),
                "tail": round(float(values["tail"][:, at].mean()), 4),
                "top1": round(float(np.median(values["top1"][:, at])), 4),
            }
        )
    return rows


if __name__ == "__main__":
    command.run(main, FLAGS)

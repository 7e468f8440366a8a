"""Trains the demo checkpoint on a CPU, resumably.

    python -m kernjax.demo.train --books=DIR --workdir=DIR --steps=4000
    python -m kernjax.demo.train --books=DIR --workdir=DIR --stop_at=2026-01-31T18:30
    python -m kernjax.demo.export --workdir=DIR --out=DIR        at any time

The same command resumes an interrupted run from its last checkpoint. The length of the run is
given in steps, which makes the result reproducible bit by bit on the same machine, or as a time
(UTC) to be ready by; a file `stop_at` in the working directory moves that time while the run goes
on. Either way the learning rate warms up, stays, and falls to zero over the last part, and the
sequences grow longer.

--devices splits the batch over that many CPU devices of one thread each (default: one per core).
In --workdir: tokens/ (tokenizer, token ids, data card), checkpoint.npz, config.json, log.jsonl.
The last line of standard output is one JSON object. Exit codes: 0 trained, 3 could not.
"""

from __future__ import annotations

import os
from pathlib import Path

from kernjax.base import command
from kernjax.base.errors import UserError

FLAGS = command.Flags("demo.train", __doc__)
_BOOKS = FLAGS.string("books", None, "Directory of plain-text books.", required=True)
_WORKDIR = FLAGS.string("workdir", None, "Where the run lives.", required=True)
_STEPS = FLAGS.integer("steps", None, "Length of the run in steps.", lower_bound=1)
_STOP_AT = FLAGS.string("stop_at", None, "UTC time to be ready by, YYYY-MM-DDTHH:MM.")
FLAGS.heading("Training")
_BATCH_TOKENS = FLAGS.integer("batch_tokens", 2048, "Tokens in a step.", lower_bound=1)
_LENGTHS = FLAGS.comma_list("lengths", ["512", "2048", "4096"], "Sequence lengths, in order.")
_FROM = FLAGS.comma_list("lengths_from", ["0", "0.6", "0.85"], "Shares of the run they start at.")
_DECAY = FLAGS.number("decay_fraction", 0.3, "Share of the run in which the rate falls.")
_SEED = FLAGS.integer("seed", 0, "Of the parameters and the tokenizer's sample.", lower_bound=0)
_DEVICES = FLAGS.integer("devices", None, "CPU devices to split the batch over.", lower_bound=1)
FLAGS.heading("The model")
_VOCAB = FLAGS.integer("vocab_size", 384, "Tokens in the vocabulary.", lower_bound=258)
_GROUPS = FLAGS.integer("groups", 3, "Groups of 3 delta net and 1 attention.", lower_bound=1)
_HIDDEN = FLAGS.integer("hidden", 128, "Width of the residual stream.", lower_bound=1)
_MLP = FLAGS.integer("mlp", 384, "Width of the MLP.", lower_bound=1)
_HEAD_DIM = FLAGS.integer("head_dim", 64, "Width of every head.", lower_bound=8)
FLAGS.heading("Watching")
_CHECKPOINT_S = FLAGS.number("checkpoint_s", 180.0, "Seconds between checkpoints.")
_EVAL_STEPS = FLAGS.integer("eval_steps", 200, "Steps between held-out losses.", lower_bound=0)
_EVAL_LENGTH = FLAGS.integer("eval_length", 2048, "Context of the held-out losses.", lower_bound=1)
_EVAL_WINDOWS = FLAGS.integer("eval_windows", 8, "Held-out windows of a kind.", lower_bound=1)


def main(words: list[str]) -> int:
    if words:
        raise UserError(f"Unexpected arguments {words}.", "Expected flags only.")
    devices = _DEVICES.value or os.cpu_count() or 1
    use_cpu_devices(devices)
    from kernjax.demo.architecture import hf_config
    from kernjax.demo.data import prepare
    from kernjax.demo.loop import Settings, train

    settings = Settings(
        steps=_STEPS.value,
        stop_at=_STOP_AT.value,
        batch_tokens=_BATCH_TOKENS.value,
        lengths=tuple(_numbers(_LENGTHS.value, int)),
        lengths_from=tuple(_numbers(_FROM.value, float)),
        decay_fraction=_DECAY.value,
        seed=_SEED.value,
        devices=devices,
        checkpoint_s=_CHECKPOINT_S.value,
        eval_steps=_EVAL_STEPS.value,
        eval_length=_EVAL_LENGTH.value,
        eval_windows=_EVAL_WINDOWS.value,
    )
    for length in settings.lengths:
        settings.windows_of(length)
    workdir = Path(_WORKDIR.value)
    workdir.mkdir(parents=True, exist_ok=True)
    texts = prepare(
        Path(_BOOKS.value), workdir / "tokens", seed=_SEED.value, vocab_size=_VOCAB.value
    )
    config = hf_config(
        _VOCAB.value,
        groups=_GROUPS.value,
        hidden=_HIDDEN.value,
        mlp=_MLP.value,
        head_dim=_HEAD_DIM.value,
    )
    command.print_json(train(config, texts, workdir, settings))
    return command.EXIT_PASS


def use_cpu_devices(count: int) -> None:
    """`count` CPU devices of one thread each: a batch split by hand keeps all cores busier than
    threads inside ops do. To be called before jax starts."""
    import pallas_kernels  # noqa: F401  sets XLA's flags

    if count > 1:
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_multi_thread_eigen=false".strip()
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)


def _numbers(words: list[str], kind: type) -> list:
    try:
        return [kind(word) for word in words]
    except ValueError:
        raise UserError(f"{','.join(words)!r} are not numbers.", f"Expected {kind}s.") from None


if __name__ == "__main__":
    command.run(main, FLAGS)

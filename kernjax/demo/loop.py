"""The training loop: batches, schedule, checkpoints, held-out loss, log."""

from __future__ import annotations

import dataclasses
import datetime
import json
import logging
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from kernjax.base.errors import UserError
from kernjax.demo import checkpoint, net
from kernjax.demo.checkpoint import Progress
from kernjax.demo.data import KINDS, TokenData, sample_windows
from kernjax.demo.optimiser import make_optimiser, rate
from kernjax.demo.step import arrange, make_evaluate, make_train_step, replicate
from kernjax.model import ModelConfig

log = logging.getLogger("kernjax")
STOP_FILE = "stop_at"
_SAY_EVERY_S = 5.0


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a run does; exactly one of `steps` and `stop_at` (UTC, ISO 8601) is given."""

    steps: int | None = None
    stop_at: str | None = None
    batch_tokens: int = 2048
    lengths: tuple[int, ...] = (512, 2048, 4096)
    lengths_from: tuple[float, ...] = (0.0, 0.6, 0.85)  # shares of the run
    decay_fraction: float = 0.3
    seed: int = 0
    devices: int = 1
    checkpoint_s: float = 180.0
    eval_steps: int = 200
    eval_length: int = 2048
    eval_windows: int = 8

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.stop_at is None):
            raise UserError(
                f"steps={self.steps} and stop_at={self.stop_at}.", "Expected one of the two."
            )
        if self.stop_at is not None:
            utc(self.stop_at)
        starts = self.lengths_from
        rising = bool(starts) and starts[0] == 0 and list(starts) == sorted(starts)
        if not rising or len(starts) != len(self.lengths):
            raise UserError(
                f"lengths={self.lengths} from {starts}.",
                "Expected as many starts as lengths, rising from 0.",
            )

    def length_at(self, progress: float) -> int:
        return self.lengths[sum(progress >= start for start in self.lengths_from) - 1]

    def windows_of(self, length: int) -> int:
        """Windows of each kind in a step: at least one, and on every device equally many rows."""
        share = self.batch_tokens // (len(KINDS) * length)
        while share > 1 and share * len(KINDS) % self.devices:
            share -= 1
        if max(share, 1) * len(KINDS) % self.devices:
            raise UserError(
                f"{len(KINDS)} windows of {length} tokens cannot be split over "
                f"{self.devices} devices.",
                "",
                "Raise --batch_tokens or lower --devices.",
            )
        return max(share, 1)


def train(
    raw_config: dict[str, Any], texts: TokenData, workdir: Path, settings: Settings
) -> dict[str, Any]:
    """Trains from the last checkpoint in `workdir`, or from the start, to the end; a summary.

    Writes checkpoint.npz, config.json (the HF one) and log.jsonl (a line a step) there.
    """
    config = ModelConfig.from_dict(raw_config)
    mesh = Mesh(np.array(jax.devices()[: settings.devices]), ("data",))
    optimiser = make_optimiser("data", settings.devices)
    params = net.init_params(config, settings.seed)
    opt_state = optimiser.init(params)
    state = Progress(started=time.time())
    if checkpoint.exists(workdir):
        params, opt_state, state = checkpoint.load(workdir, params, opt_state)
        log.info("resumed at step %d", state.step)
    (workdir / "config.json").write_text(json.dumps(raw_config, indent=2) + "\n")
    params, opt_state = replicate(mesh, params), replicate(mesh, opt_state)
    train_step = make_train_step(config, optimiser, mesh)
    evaluate = make_evaluate(
        config, mesh, texts.held_out, settings.eval_length, settings.eval_windows
    )
    journal = _Journal(workdir)
    saved = time.time()

    while (progress := share_done(settings, state, workdir)) < 1.0:
        begin = time.time()
        state.progress = progress
        length = settings.length_at(progress)
        count = settings.windows_of(length)
        first = state.windows
        windows = [sample_windows(texts.train[kind], first, count, length) for kind in KINDS]
        rows, kinds = arrange(np.stack(windows), settings.devices)
        scale = rate(state.step, progress, settings.decay_fraction)
        params, opt_state, losses, norm = train_step(
            params, opt_state, rows, kinds, np.float32(scale)
        )
        losses = np.asarray(losses)  # waits for the step
        state.step += 1
        state.windows += count
        state.tokens += len(KINDS) * count * length
        seconds = time.time() - begin
        state.seconds += seconds
        row = {
            "step": state.step,
            "progress": round(progress, 4),
            "length": length,
            "rate": round(scale, 4),
            **{kind: round(float(x), 4) for kind, x in zip(KINDS, losses, strict=True)},
            "norm": round(float(norm), 3),
            "tokens": state.tokens,
            "tokens_per_s": round(len(KINDS) * count * length / seconds),
        }
        if settings.eval_steps and state.step % settings.eval_steps == 0:
            row["held_out"] = evaluate(params)
        journal.write(row, _seconds_left(settings, state, workdir))
        if time.time() - saved > settings.checkpoint_s:
            checkpoint.save(workdir, params, opt_state, state)
            saved = time.time()

    state.progress = 1.0
    checkpoint.save(workdir, params, opt_state, state)
    held_out = evaluate(params) if settings.eval_steps else None
    journal.write({"step": state.step, "held_out": held_out}, 0.0)
    return {
        "steps": state.step,
        "tokens": state.tokens,
        "seconds": round(state.seconds, 1),
        "held_out": held_out,
    }


def share_done(settings: Settings, state: Progress, workdir: Path) -> float:
    """Which share of the run is done, in [0, 1]: of its steps, or of its time."""
    if settings.steps is not None:
        return min(1.0, state.step / settings.steps)
    stop = _stop_time(settings, workdir)
    return min(1.0, max(0.0, (time.time() - state.started) / max(1.0, stop - state.started)))


def _seconds_left(settings: Settings, state: Progress, workdir: Path) -> float:
    if settings.steps is None:
        return max(0.0, _stop_time(settings, workdir) - time.time())
    return state.seconds / max(state.step, 1) * (settings.steps - state.step)


def _stop_time(settings: Settings, workdir: Path) -> float:
    override = workdir / STOP_FILE
    return utc(override.read_text() if override.exists() else settings.stop_at or "")


def utc(text: str) -> float:
    """Unix time of an ISO 8601 time, UTC unless it names a zone."""
    try:
        moment = datetime.datetime.fromisoformat(text.strip())
    except ValueError:
        raise UserError(f"stop_at={text!r} is no time.", "Expected YYYY-MM-DDTHH:MM.") from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.UTC)
    return moment.timestamp()


class _Journal:
    """log.jsonl holds every step; a person hears of one every few seconds."""

    def __init__(self, workdir: Path) -> None:
        self._path, self._said = workdir / "log.jsonl", 0.0

    def write(self, row: dict[str, Any], seconds_left: float) -> None:
        with open(self._path, "a") as file:
            file.write(json.dumps(row) + "\n")
        if time.time() - self._said > _SAY_EVERY_S or "held_out" in row:
            said = ", ".join(f"{name} {value}" for name, value in row.items())
            log.info("%s, %.0f s left", said, seconds_left)
            self._said = time.time()

"""Progress: a bar on a terminal, a line a batch elsewhere, and what the work came to."""

from __future__ import annotations

import dataclasses
import io
import sys

import pytest

from kernjax.base.progress import Meter


@dataclasses.dataclass
class Progress:
    tokens: int
    seconds: float
    batch: int = 0
    segment: str | None = None
    total_tokens: int = 400
    batches: int = 2


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


STEPS = (Progress(100, 1.0), Progress(200, 2.0, 1, "code-1"), Progress(400, 5.0, 2, "prose-1"))


def test_a_line_a_batch_with_the_time_left(caplog):
    meter = Meter("candidate bf16", "tok")
    with caplog.at_level("INFO", "kernjax"):
        for step in STEPS:
            meter(step)
    first, second = caplog.messages
    assert first == "candidate bf16: batch 1/2 (from code-1), 100 tok/s, 2 s left"
    assert second.endswith("80 tok/s, 0 s left")
    assert (meter.tokens, meter.seconds) == (400, 5.0)


@pytest.mark.parametrize("columns, widest", [("60", 60), ("300", 100)])
def test_a_bar_that_fits(monkeypatch, columns, widest):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("NO_COLOR", "1")
    meter = Meter("candidate bf16", "tok")
    for step in STEPS:
        meter(step)
    shown = terminal.getvalue()
    assert "candidate bf16" in shown and "400/400" in shown
    assert max(map(len, shown.replace("\n", "\r").split("\r"))) <= widest
    assert "\x1b[3" not in shown and "\x1b[9" not in shown  # no colours

"""Progress: a bar on a terminal, a line a batch elsewhere, and what the work came to."""

from __future__ import annotations

import dataclasses
import io
import sys

import pytest

from kernjax.base import progress as module
from kernjax.base.progress import Meter, Work


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


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass when a test says so."""
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def test_work_ends_in_one_line(caplog, clock):
    with caplog.at_level("INFO", "kernjax"):
        with Work("compiling", "program", 3) as work:
            work.advance()
            clock[0] += 41.0
            work.advance(2)
            clock[0] += 50.0  # it was over before
        with Work("reading weights", "B", 3 * 2**30) as work:
            work.advance(3 * 2**29)
            clock[0] += 7.0
    assert caplog.messages == [
        "compiling: 3 programs in 41 s",
        "reading weights: 1.50 GiB in 7 s",
    ]


@pytest.mark.parametrize("seconds, shown", [(1.0, True), (60.0, False)])
def test_short_work_says_nothing(caplog, clock, seconds, shown):
    with caplog.at_level("INFO", "kernjax"), Work("compiling", "program", 1, shown) as work:
        clock[0] += seconds
        work.advance()
    assert not caplog.messages


def test_a_bar_of_work_goes_away(monkeypatch, caplog):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(module, "_QUIET_S", 0.0)
    monkeypatch.setenv("COLUMNS", "60")
    with caplog.at_level("INFO", "kernjax"), Work("compiling", "program", 4) as work:
        work.advance()
        work.advance(3)
    shown = terminal.getvalue()
    assert "compiling" in shown and "/4" in shown and not caplog.messages
    assert shown.rsplit("\r", 1)[1].strip() == ""

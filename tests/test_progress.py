"""Progress: a bar on a terminal, a line a batch elsewhere, and what the work came to."""

from __future__ import annotations

import dataclasses
import functools
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


# The first batch compiles: 100 tokens in 90 s, the others in 5 s each.
STEPS = (
    Progress(60, 80.0, batches=4),
    Progress(100, 90.0, 1, "code-1", batches=4),
    Progress(160, 93.0, 1, batches=4),
    Progress(200, 95.0, 2, "code-2", batches=4),
    Progress(300, 100.0, 3, "prose-1", batches=4),
    Progress(400, 105.0, 4, "prose-2", batches=4),
)


def shown(caplog, steps) -> list[str]:
    meter = Meter("candidate bf16", "tok")
    with caplog.at_level("INFO", "kernjax"):
        for step in steps:
            meter(step)
    assert (meter.tokens, meter.seconds) == (steps[-1].tokens, steps[-1].seconds)
    return caplog.messages


def test_a_line_a_batch_with_the_time_left_once_it_is_known(caplog):
    """From the second batch on, and without what was compiled before."""
    assert shown(caplog, STEPS) == [
        "candidate bf16: batch 1/4 (from code-1) after 90 s",
        "candidate bf16: batch 2/4 (from code-2) after 95 s, 20 tok/s, 10 s left",
        "candidate bf16: batch 3/4 (from prose-1) after 100 s, 20 tok/s, 5 s left",
        "candidate bf16: batch 4/4 (from prose-2) after 105 s",
    ]


def test_one_long_batch_tells_it_after_a_while(caplog):
    steps = [Progress(n, s, 0, f"step {n}", batches=1) for n, s in ((1, 60.0), (11, 80.0))]
    steps += [Progress(101, 260.0, 0, "step 101", batches=1)]
    steps += [Progress(400, 7900.0, 1, "step 400", batches=1)]
    assert [message.partition(") after ")[2] for message in shown(caplog, steps)] == [
        "60 s",
        "80 s",
        "4 min, 0.5 tok/s, 10 min left",
        "2.2 h",
    ]


@pytest.mark.parametrize("columns, widest", [("60", 60), ("300", 100)])
def test_a_bar_that_fits(monkeypatch, columns, widest):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(module, "tqdm", functools.partial(module.tqdm, mininterval=0.0, miniters=1))
    meter = Meter("candidate bf16", "tok")
    for step in STEPS:
        meter(step)
    shown = terminal.getvalue()
    assert "candidate bf16" in shown and "400/400" in shown
    before, _, after = shown.partition("200/400")
    assert "left" not in before and "20 tok/s, 10 s left]" in after
    assert max(map(len, shown.replace("\n", "\r").split("\r"))) <= widest
    assert "\x1b[3" not in shown and "\x1b[9" not in shown  # no colours


def test_a_long_title_leaves_room_for_the_time_left(monkeypatch):
    """The bar's; a line of a log holds the whole of it."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(module, "tqdm", functools.partial(module.tqdm, mininterval=0.0, miniters=1))
    title = f"candidate {'a.module.far.down.' * 4}softmax:attention on bf16"
    meter = Meter(title, "tok")
    for step in STEPS:
        meter(step)
    shown = terminal.getvalue()
    assert "\rcandidate a.modu....down.softmax:attention on bf16:" in shown
    assert "20 tok/s, 10 s left]" in shown and meter.title == title


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

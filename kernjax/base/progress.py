"""Progress of long work: a bar on a terminal, otherwise a line a batch, or one at the end."""

from __future__ import annotations

import logging
import shutil
import sys
import threading
import time
from typing import Any

from tqdm import tqdm

log = logging.getLogger("kernjax")

_QUIET_S = 2.0  # work that takes no longer says nothing
_LONG_S = 30.0  # from here on a part of a batch tells how fast the rest will be
# tqdm's own estimate takes what was compiled and read before the first value for the pace of all.
_BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"


def _columns() -> int:
    """As wide as the report at most: a wider bar is no easier to read."""
    return min(100, shutil.get_terminal_size().columns)


def _ends(text: str, width: int) -> str:
    """At most `width` characters, both ends kept: a kernel's name is long, its end tells it."""
    if len(text) <= width:
        return text
    tail = (width - 3) * 2 // 3
    return f"{text[: width - 3 - tail]}...{text[-tail:]}"


def _clock(seconds: float) -> str:
    """A time as people say it: `41 s`, `12 min`, `3.5 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


class Meter:
    """Shows `Progress` values (tokens, total_tokens, batch, batches, seconds, segment) it is given.

    The bar closes itself with the last batch. `tokens` and `seconds` are those of the last value:
    what the work came to, compilation included. The time left is told once it can be known: what is
    read and compiled lies in the first batch, which says nothing of the pace of the others.
    """

    def __init__(self, title: str, unit: str) -> None:
        self.title, self._unit = title, unit
        self.tokens, self.seconds = 0, 0.0
        self._bar: tqdm | None = None
        self._terminal = sys.stderr.isatty()
        self._first: Any = None

    def __call__(self, progress: Any) -> None:
        self.tokens, self.seconds = progress.tokens, progress.seconds
        pace = self._pace(progress)
        if self._terminal:
            self._show_bar(progress, pace)
        elif progress.segment is not None:
            log.info(
                "%s: batch %d/%d (from %s) after %s%s",
                self.title,
                progress.batch,
                progress.batches,
                progress.segment,
                _clock(progress.seconds),
                f", {pace}" if pace else "",
            )

    def _pace(self, progress: Any) -> str:
        """`230 tok/s, 40 s left`; empty before that can be known, and at the end.

        Counted from the end of the first batch, or from the first value where there is one batch.
        """
        if self._first is None:
            if progress.batch or progress.batches == 1:
                self._first = progress
            return ""
        seconds = progress.seconds - self._first.seconds
        rate = (progress.tokens - self._first.tokens) / max(seconds, 1e-9)
        is_known = progress.batch > self._first.batch or seconds > _LONG_S
        if not is_known or rate <= 0 or progress.batch == progress.batches:
            return ""
        left = (progress.total_tokens - progress.tokens) / rate
        return f"{rate:,.{0 if rate >= 10 else 1}f} {self._unit}/s, {_clock(left)} left"

    def _show_bar(self, progress: Any, pace: str) -> None:
        if self._bar is None:
            self._bar = tqdm(
                total=progress.total_tokens,
                desc=_ends(self.title, _columns() // 2),
                unit=self._unit,
                unit_scale=True,
                ncols=_columns(),
                bar_format=_BAR,
            )
        self._bar.set_postfix_str(pace, refresh=False)
        self._bar.update(progress.tokens - self._bar.n)
        if progress.batch == progress.batches:
            self._bar.close()


class Work:
    """One piece of work of a known size: weights to read (`unit` B), programs to compile.

    A bar on a terminal, which goes away; otherwise one log line at the end. `advance` may be called
    from any thread, the last of `total` ends it, `close` does so before. Nothing is shown of work
    that takes two seconds or less, or where `shown` is False.
    """

    def __init__(self, title: str, unit: str, total: float, shown: bool = True) -> None:
        self._title, self._unit, self._total = title, unit, total
        self._shown, self._done, self._began = shown, 0.0, time.monotonic()
        self._lock = threading.Lock()
        self._closed = False
        self._bar: tqdm | None = None
        if shown and sys.stderr.isatty():
            self._bar = tqdm(
                total=round(total),
                desc=title,
                unit=unit,
                unit_scale=unit == "B",
                ncols=_columns(),
                # Bytes come at one pace. Programs do not: a time left would be a guess.
                bar_format=None if unit == "B" else _BAR,
                delay=_QUIET_S,
                leave=False,
            )

    def advance(self, amount: float = 1) -> None:
        """So much more is done."""
        with self._lock:
            self._done += amount
            if self._bar is not None and not self._closed:
                self._bar.update(round(self._done) - self._bar.n)
            if self._done >= self._total:
                self._end()

    def close(self) -> None:
        """The work is over, or given up."""
        with self._lock:
            self._end()

    def __enter__(self) -> Work:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _end(self) -> None:
        if self._closed:
            return
        self._closed = True
        seconds = time.monotonic() - self._began
        if self._bar is not None:
            self._bar.close()
        elif self._shown and seconds > _QUIET_S and self._done:
            amount = f"{self._done:,.0f} {self._unit}{'s' if self._done != 1 else ''}"
            if self._unit == "B":
                amount = f"{self._done / 2**30:,.2f} GiB"
            log.info("%s: %s in %.0f s", self._title, amount, seconds)

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


def _columns() -> int:
    """As wide as the report at most: a wider bar is no easier to read."""
    return min(100, shutil.get_terminal_size().columns)


class Meter:
    """Shows `Progress` values (tokens, total_tokens, batch, batches, seconds, segment) it is given.

    The bar closes itself with the last batch. `tokens` and `seconds` are those of the last value:
    what the work came to, compilation included.
    """

    def __init__(self, title: str, unit: str) -> None:
        self.title, self._unit = title, unit
        self.tokens, self.seconds = 0, 0.0
        self._bar: tqdm | None = None
        self._terminal = sys.stderr.isatty()

    def __call__(self, progress: Any) -> None:
        self.tokens, self.seconds = progress.tokens, progress.seconds
        if self._terminal:
            self._show_bar(progress)
        elif progress.segment is not None:
            rate = progress.tokens / max(progress.seconds, 1e-9)
            left = (progress.total_tokens - progress.tokens) / max(rate, 1e-9)
            log.info(
                "%s: batch %d/%d (from %s), %s %s/s, %.0f s left",
                self.title,
                progress.batch,
                progress.batches,
                progress.segment,
                f"{rate:,.0f}",
                self._unit,
                left,
            )

    def _show_bar(self, progress: Any) -> None:
        if self._bar is None:
            self._bar = tqdm(
                total=progress.total_tokens,
                desc=self.title,
                unit=self._unit,
                unit_scale=True,
                ncols=_columns(),
            )
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

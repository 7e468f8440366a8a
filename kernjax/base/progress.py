"""Progress of long work: a bar on a terminal, one line a batch otherwise."""

from __future__ import annotations

import logging
import shutil
import sys
from typing import Any

from tqdm import tqdm

log = logging.getLogger("kernjax")


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

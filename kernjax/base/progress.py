"""Progress of long work: a bar on a terminal, one line a batch otherwise."""

from __future__ import annotations

import logging
import sys
from typing import Any

from tqdm import tqdm

log = logging.getLogger("kernjax")


class Meter:
    """Shows `Progress` values (tokens, total_tokens, batch, batches, seconds, segment) it is given.

    The bar closes itself with the last batch.
    """

    def __init__(self, title: str, unit: str) -> None:
        self._title, self._unit = title, unit
        self._bar: tqdm | None = None
        self._terminal = sys.stderr.isatty()

    def __call__(self, progress: Any) -> None:
        if self._terminal:
            self._show_bar(progress)
        elif progress.segment is not None:
            rate = progress.tokens / max(progress.seconds, 1e-9)
            left = (progress.total_tokens - progress.tokens) / max(rate, 1e-9)
            log.info(
                "%s: batch %d/%d (from %s), %s %s/s, %.0f s left",
                self._title,
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
                total=progress.total_tokens, desc=self._title, unit=self._unit, unit_scale=True
            )
        self._bar.update(progress.tokens - self._bar.n)
        if progress.batch == progress.batches:
            self._bar.close()

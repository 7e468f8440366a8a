"""Which positions of a segment become rows.

Decode scores every step. Prefill scores the prompt's last position, and positions where a fault
of a boundary would still be visible: just after chunk edges, prefill-window edges and document
starts. They cost one row of the output matrix each; the hidden state is there anyway.
"""

from __future__ import annotations

import numpy as np

PREFILL, DECODE, RESCORE = 0, 1, 2

CHUNK = 64
_AFTER_EDGE = (0, 1, 3)


def prefill_positions(context_len: int, window: int, documents: tuple[int, ...]) -> np.ndarray:
    """Scored prefill positions of one segment, ascending int32.

    `window` is the reference's prefill window. A lost recurrent state is visible for as long as
    the gates remember, so the positions right after an edge are the ones to look at. A candidate
    may prefill in windows of another length: some chunk edges lie where those would end. A slot
    that still holds the last request's state shows at the sequence's own first tokens.
    """
    edges = {edge for edge in range(window, context_len, window)}
    edges |= {start for start in documents if start < context_len}
    edges |= _chunk_edges(context_len)
    chosen = {edge + after for edge in edges for after in _AFTER_EDGE}
    chosen.add(context_len - 1)
    return np.asarray(sorted(p for p in chosen if p < context_len), np.int32)


def _chunk_edges(context_len: int) -> set[int]:
    """The first and the last edge, and the multiples of a power of two that cut it in 4 to 7."""
    stride = max(CHUNK, 1 << (max(1, context_len // 4).bit_length() - 1))
    last = (context_len - 1) // CHUNK * CHUNK
    return {edge for edge in (CHUNK, *range(stride, context_len, stride), last) if edge}

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
_CHUNK_EDGES = 4


def prefill_positions(context_len: int, window: int, documents: tuple[int, ...]) -> np.ndarray:
    """Scored prefill positions of one segment, ascending int32.

    `window` is the reference's prefill window. A lost recurrent state is visible for as long as
    the gates remember, so the positions right after an edge are the ones to look at.
    """
    edges = {edge for edge in range(window, context_len, window)}
    edges |= {start for start in documents if 0 < start < context_len}
    spread = np.linspace(1, max(1, (context_len - 1) // CHUNK), _CHUNK_EDGES).astype(int)
    edges |= {int(chunk) * CHUNK for chunk in spread}
    chosen = {edge + after for edge in edges for after in _AFTER_EDGE}
    chosen.add(context_len - 1)
    return np.asarray(sorted(p for p in chosen if p < context_len), np.int32)

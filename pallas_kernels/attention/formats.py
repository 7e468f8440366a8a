"""AttentionFormats: every place where an attention kernel rounds, by name."""

from __future__ import annotations

import dataclasses

from pallas_kernels.formats import F32, Format

_SITES = ("q", "k", "v", "scores", "p", "m", "l", "acc")


@dataclasses.dataclass(frozen=True)
class AttentionFormats:
    """The rounding sites of one attention call, and what else changes its bits.

    Keys are visited in tiles of `block_k`, in ascending order, by the online softmax

        s = scores(scale * q . k)          operands rounded to q, k at the door
        m' = m(max(m, max s))              running maximum, natural-log units
        p = exp(s - m')
        l' = l(l exp(m - m') + sum p)      sum of the unrounded P (row_sum="unrounded")
        acc' = acc(acc exp(m - m') + round_p(p) . v)
        o = acc / l

    - row_sum="rounded": l sums the rounded P.
    - rescale_threshold: log2 units. The old maximum is kept while the new one exceeds it by no
      more than this, so P can reach 2**threshold; 0 = exact running maximum.
    - dot="highest": float32-exact dots; "default": the platform's default dot precision.
    """

    q: Format = F32
    k: Format = F32
    v: Format = F32
    scores: Format = F32
    p: Format = F32
    m: Format = F32
    l: Format = F32  # noqa: E741 - the papers' name
    acc: Format = F32
    row_sum: str = "unrounded"
    rescale_threshold: float = 0.0
    block_k: int = 512
    dot: str = "highest"

    def __post_init__(self) -> None:
        for site in _SITES:
            if not isinstance(getattr(self, site), Format):
                raise ValueError(
                    f"AttentionFormats: {site}={getattr(self, site)!r} must be a Format."
                )
        if self.row_sum not in ("unrounded", "rounded"):
            raise ValueError(
                f"AttentionFormats: row_sum={self.row_sum!r} must be 'unrounded' or 'rounded'."
            )
        if not 0 <= self.rescale_threshold < float("inf"):
            raise ValueError(
                f"AttentionFormats: rescale_threshold={self.rescale_threshold!r} must be finite"
                " and at least 0 (log2 units)."
            )
        if not isinstance(self.block_k, int) or self.block_k < 1:
            raise ValueError(f"AttentionFormats: block_k={self.block_k!r} must be an int >= 1.")
        if self.dot not in ("highest", "default"):
            raise ValueError(f"AttentionFormats: dot={self.dot!r} must be 'highest' or 'default'.")

    @property
    def is_tile_independent(self) -> bool:
        """Whether the result in exact arithmetic does not depend on block_k."""
        exact = all(getattr(self, site).is_exact for site in ("p", "m", "l", "acc"))
        return exact and self.rescale_threshold == 0.0

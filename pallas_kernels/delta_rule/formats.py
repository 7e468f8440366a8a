"""Which tensors of the delta rule are rounded, and to what: one field per rounding site."""

from __future__ import annotations

import dataclasses

from pallas_kernels.formats import F32, Format

CHUNKS = (16, 32, 64, 128)
DOTS = ("highest", "default")


@dataclasses.dataclass(frozen=True)
class DeltaRuleFormats:
    """The rounding sites of the delta rule. Rounding of one site never moves another.

    With G = cumsum(g) inside the chunk (see `xla.py` for the whole form):

    - `state`: the state where it is *stored*: the final state of a chunked call, and the state
      after every recurrent step. Never inside a chunked call: outputs of that call do not see it.
    - `chunk_state`: the state as it is carried from chunk to chunk, the entering one included
      (FlashKDA holds it in bf16).
    - `state_operand`, `h`: the carried state as operand of `w S` and of `q S`; the carry itself
      stays as it is (FLA's `b_h.to(b_w.dtype)` and its stored `h`).
    - `v_new`: the delta `u - w S`, where it enters `p v_new`, and once more, after its decay to
      the end of the chunk (scalar gate), where it enters the state (FLA).
    - `inverse`: A^-1 as operand; `w`, `u`: the two products with it; `p`: the intra-chunk
      (q k^T) * decay, before the scale.
    - `g`: the log decay of a token; `g_cumsum`: G after the sum; `exp_g`: every exponential of
      gates; `beta`: the step size.
    - `chunk`: tokens per chunk, 16, 32, 64 or 128.
    - `dot`: "highest" multiplies in float32; "default" rounds both operands of every dot to
      bfloat16 and accumulates in float32, as one matrix-unit pass does.
    """

    state: Format = F32
    chunk_state: Format = F32
    state_operand: Format = F32
    h: Format = F32
    v_new: Format = F32
    inverse: Format = F32
    w: Format = F32
    u: Format = F32
    p: Format = F32
    g: Format = F32
    g_cumsum: Format = F32
    exp_g: Format = F32
    beta: Format = F32
    chunk: int = 64
    dot: str = "highest"

    def __post_init__(self) -> None:
        if self.chunk not in CHUNKS:
            raise ValueError(f"DeltaRuleFormats: chunk={self.chunk!r} is not one of {CHUNKS}.")
        if self.dot not in DOTS:
            raise ValueError(f"DeltaRuleFormats: dot={self.dot!r} is not one of {DOTS}.")

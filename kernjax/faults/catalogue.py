"""The catalogue: every fault, control and normal pair that the instrument is tried on.

A row replaces one op (or the same op in prefill and decode) of a model that is right otherwise.
Codes A.. are public bugs, a.. and g.. the faults of attention and of the gated delta rule that
follow from them; where a bug was is named by repository and number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kernjax.base.errors import UserError

Expected = Literal["red", "floor", "green"]
"""What a row has to come to: FAIL; FAIL, or proven below the corpus's floor; not FAIL."""

PREFILL, DECODE = "attention.prefill", "attention.decode"
CHUNKED, RECURRENT = "delta_rule.chunked", "delta_rule.recurrent"


@dataclass(frozen=True)
class Fault:
    """One row.

    `settings` are added to the production policy (scales that differ from 1, windows inside the
    corpus). `inputs` names the family of synthetic inputs (`inputs.py`) on which the op differs
    from the healthy one; `at_op` rows need what no bundled corpus holds, and are judged there.
    """

    id: str
    kernels: tuple[tuple[str, str], ...]  # (op, name in the op's module)
    what: str
    source: str
    expected: Expected = "red"
    settings: str = ""
    needs: str = ""  # what has to be in the corpus for the fault to act; empty: nothing
    inputs: str = "plain"
    at_op: bool = False

    @property
    def specs(self) -> tuple[str, ...]:
        """As --kernel takes them."""
        return tuple(f"{op}={_MODULES[op.partition('.')[0]]}:{name}" for op, name in self.kernels)


_MODULES = {
    "attention": "kernjax.faults.attention",
    "delta_rule": "kernjax.faults.delta_rule",
}
_SCALED = "kv_cache.k_scale=0.25,kv_cache.v_scale=0.5"


def _row(name: str, ops: str | tuple[str, ...], what: str, source: str, *, id: str = "",
         expected: Expected = "red", settings: str = "", needs: str = "", inputs: str = "plain",
         at_op: bool = False) -> Fault:  # fmt: skip
    ops = (ops,) if isinstance(ops, str) else ops
    kernels = tuple((op, name) for op in ops)
    return Fault(id or name, kernels, what, source, expected, settings, needs, inputs, at_op)


_BOTH = (PREFILL, DECODE)

ATTENTION = (
    _row("scale_twice", _BOTH, "softmax scale applied twice",
         "A34 a01, AI-Hypercomputer/maxtext#3138"),
    _row("mscale_missing", _BOTH, "factor 1.59 on the scores missing",
         "A35 a04, onnxruntime/mobius#548"),
    _row("k_scale_ignored", _BOTH, "scale of the stored keys (0.25) not applied",
         "A6 a02, flashinfer-ai/flashinfer#4979", settings=_SCALED, inputs="scaled"),
    _row("v_scale_ignored", _BOTH, "scale of the stored values (0.5) not applied",
         "A7 a03, flashinfer-ai/flashinfer#1023", settings=_SCALED, inputs="scaled"),
    _row("k_scale_for_v", _BOTH, "values read with the keys' scale",
         "A8, vllm-project/vllm#37054", settings=_SCALED, inputs="scaled"),
    _row("k_scale_twice", _BOTH, "keys' scale applied to the scores once more",
         "A8, vllm-project/vllm#37054", settings=_SCALED, inputs="scaled"),
    _row("sees_next", PREFILL, "causal mask shows the next token", "a05"),
    _row("misses_itself", PREFILL, "causal mask hides the query's own token", "a06"),
    _row("newest_key_lost", DECODE, "cache length one short in decode", "a06, in decode"),
    _row("window_1023", _BOTH, "a layer that sees everything gets a window of 1023 tokens",
         "a10", needs="context above 1023", inputs="deep"),
    _row("positions_int16", _BOTH, "positions compared as int16",
         "A2 a15, vllm-project/tpu-inference#2755", needs="context above 32767",
         inputs="past_int16", at_op=True),
    _row("positions_wrap_1024", _BOTH, "the same in small: positions wrap at 1024",
         "A2 a15, scaled down", needs="context above 1023", inputs="deep"),
    _row("rope_frequencies_bf16", _BOTH, "inverse frequencies in bfloat16",
         "A36 a11, sgl-project/sglang-jax#1472", inputs="deep"),
    _row("rope_positions_bf16", _BOTH, "positions in bfloat16",
         "A36, EleutherAI/gpt-neox#1003", needs="context above 256", inputs="deep"),
    _row("pads_attended", DECODE, "64 slots past the last token count as tokens",
         "A30, in attention; zml/zml#754", inputs="slots"),
    _row("first_page_lost", DECODE, "first 16 keys never read", "kind of A32"),
    _row("partial_tile_lost", DECODE, "keys of the last partial tile never read",
         "kind of A19"),
    _row("key_heads_interleaved", _BOTH, "query head n reads key head n % G",
         "A27, in attention; ggml-org/llama.cpp#21732"),
    _row("acc_not_rescaled", PREFILL, "accumulator not rescaled at a new maximum",
         "a22", needs="more than one tile of 256 keys", inputs="deep"),
    _row("acc_not_rescaled", DECODE, "the same in decode", "a22, in decode",
         id="acc_not_rescaled_in_decode", needs="more than one tile of 256 keys", inputs="deep"),
    _row("split_without_lse", DECODE, "two halves of the keys merged by their mean",
         "A12 a19", inputs="deep"),
    _row("p_e4m3", _BOTH, "P in e4m3 without a scale",
         "A4 A5 a16, flashinfer-ai/flashinfer#5020", expected="floor",
         needs="deep, diffuse attention", inputs="deep"),
    _row("p_e4m3_448", _BOTH, "P in e4m3 scaled by 448, as engines do: no bug, but a loss",
         "a17", expected="floor", inputs="deep"),
    _row("p_e4m3_lazy_rescale", _BOTH, "P * 256 in e4m3 with the maximum lagging by 2**4",
         "A3 a18, Dao-AILab/flash-attention#2694", inputs="peaked"),
    Fault("p_e4m3_other_tile_in_decode",
          ((PREFILL, "p_e4m3_tiles_of_192"), (DECODE, "p_e4m3_tiles_of_96")),
          "e4m3 P, tiles of 192 in prefill and of 96 in decode",
          "A10, vllm-project/vllm#54035", "floor", needs="deep, diffuse attention",
          inputs="deep"),
    _row("sums_in_bf16", _BOTH, "running maximum, sum and accumulator in bfloat16",
         "A37 a23, tpu-inference's default", expected="floor", needs="length", inputs="deep"),
    _row("acc_in_f16", _BOTH, "accumulator in float16",
         "A37, ggml-org/llama.cpp#13975", needs="values of several thousand",
         inputs="large_values", at_op=True),
)  # fmt: skip

_EITHER = (CHUNKED, RECURRENT)

DELTA_RULE = (
    _row("state_not_carried", CHUNKED, "state not carried between chunks", "g01"),
    _row("state_dropped_once", CHUNKED, "state dropped once, in the middle of the prompt",
         "A23 g02", needs="rows just after that edge"),
    _row("window_starts_empty", CHUNKED, "prefill windows after the first start from nothing",
         "A23 g01, gittensor-ai-lab/sparkinfer#1071", settings="prefill_window=512",
         needs="two prefill windows", inputs="entered"),
    _row("state_transposed", CHUNKED, "state transposed between chunks",
         "A22 g03, vllm-project/vllm#41292"),
    _row("final_state_transposed", CHUNKED, "state left to decode in the other layout",
         "A22, at the switch to decode"),
    _row("last_update_skipped", CHUNKED, "last chunk's update not written: seen in decode only",
         "g14"),
    _row("pads_update_state", CHUNKED, "64 pads update the state: seen in decode only",
         "A30 g15, vllm-project/vllm#55178"),
    _row("stale_slot", CHUNKED, "a new sequence starts from another one's state",
         "A1 g16, vllm-project/tpu-inference#2408", needs="rows at the first tokens"),
    _row("snapshot_of_another_slot", CHUNKED, "decode continues from another sequence's state",
         "A32, sgl-project/sglang#32555"),
    _row("decay_of_24", _EITHER, "decay exponent 24 times too large",
         "A28 g18, NeuraLegion/shainet#204"),
    _row("decay_ignored", RECURRENT, "no decay in decode", "kind of A28"),
    _row("key_heads_permuted", _EITHER, "value head h uses key head h % Hk",
         "A27 g19, ggml-org/llama.cpp#21732"),
    _row("gate_sum_in_bf16", CHUNKED, "gates of a chunk summed in bfloat16", "g04, A1",
         expected="floor", needs="fast gates"),
    _row("decay_in_bf16", RECURRENT, "exp(g) in bfloat16 in decode", "g27, kind of A13",
         expected="floor", needs="slow gates, many steps"),
    _row("beta_in_bf16", RECURRENT, "beta rounded to bfloat16 in decode",
         "A38 g28, vllm-project/vllm#53877", expected="floor"),
    _row("diagonal_twice", CHUNKED, "a token's own update counted twice in its output",
         "g07, dogkeeper886/ollama37#23"),
    _row("beta_missing_in_kk", CHUNKED, "beta missing in the matrix that is inverted", "g09"),
    _row("key_decay_missing", CHUNKED, "updates not decayed to the chunk's end", "g12"),
    _row("off_diagonal_blocks_missing", CHUNKED, "16 x 16 blocks of the inverse alone",
         "g10, kind of A15"),
    _row("neumann_f16", CHUNKED, "inverse by a Neumann product in float16",
         "A15, MoonshotAI/FlashKDA#34", needs="keys that point the same way",
         inputs="collinear", at_op=True),
    _row("neumann_bf16", CHUNKED, "inverse by a Neumann product in bfloat16",
         "A16, NVIDIA/cudnn-frontend#1051", expected="floor", needs="correlated keys",
         inputs="collinear"),
    _row("exp_before_mask", CHUNKED, "exp of the future's gates, then times 0",
         "A19 A21 g26, fla-org/flash-linear-attention#794", expected="floor",
         needs="gates that sum below -88 in a chunk", inputs="fast_gates"),
    _row("residual_of_rounded", _EITHER, "v and its prediction rounded before they are subtracted",
         "A17 g23, meta-pytorch/attention-gym#465", expected="floor", needs="converged keys",
         inputs="converged"),
    _row("chunk_entry_f16", CHUNKED, "state through float16 at chunk entry",
         "A18, meta-pytorch/attention-gym#464", needs="states of 65,504 and more",
         inputs="large_values", at_op=True),
    _row("dots_one_bf16_pass", _EITHER, "one bfloat16 pass in every product",
         "A1, vllm-project/tpu-inference#2408", expected="floor"),
    _row("state_4_bits", RECURRENT, "state of 4 mantissa bits after every token",
         "g22, kind of A13"),
    _row("state_bf16", RECURRENT, "state in bfloat16 after every token",
         "A14 g22, sgl-project/sglang#10258", expected="floor", needs="many steps"),
    _row("state_f16", RECURRENT, "state in float16 after every token",
         "A13, NVIDIA/TensorRT-Model-Connect#725", expected="floor",
         needs="states of 65,504 and more"),
    _row("reads_before_write", RECURRENT, "output lacks the token's own update", "kind of g07"),
)  # fmt: skip

CONTROLS = (
    _row("control_rope_tables_bf16", _BOTH, "cos and sin in bfloat16 after a float32 phase",
         "a14", expected="green"),
    _row("control_online_softmax", _BOTH, "plain online softmax, no fault", "form of a22",
         expected="green"),
    _row("control_state_bf16_per_chunk", CHUNKED, "state bfloat16 once per chunk",
         "g20, FlashKDA", expected="green"),
    _row("control_v_new_bf16", CHUNKED, "chunk's writes in bfloat16", "g21, FLA",
         expected="green"),
    _row("control_gate_bf16", _EITHER, "log decay of a token in bfloat16", "g29",
         expected="green"),
    _row("control_qk_bf16", _EITHER, "q and k bfloat16 after the l2 norm", "g30",
         expected="green"),
    _row("control_zero_pads", CHUNKED, "zero pads in the last chunk",
         "A41, huggingface/transformers#46190", expected="green"),
    _row("control_chunk_form", CHUNKED, "plain chunk equations, no fault", "form of g07",
         expected="green"),
    _row("control_token_form", RECURRENT, "plain recurrence, no fault", "form of g07",
         expected="green"),
)  # fmt: skip

NOT_ONE_OP = (
    (
        "A29, g25, the convolution of A31",
        "pads or a split enter the convolution in front of the op",
    ),
    ("A31, packed documents", "the op is not told where documents start"),
    ("A1, its bfloat16 l2 norm", "q and k are normalised before the op"),
    ("A11, A12 where the log-sum-exp is returned", "the op returns outputs only"),
    (
        "a09, a sliding window of 1023 for 1024",
        "these models have no window; `window_1023` puts one where none belongs",
    ),
    (
        "A20, reads out of bounds",
        "what they find depends on the neighbouring memory; padding that"
        " leaks is `pads_update_state`, and NaN in unused slots in the ops' own tests",
    ),
    ("A21, NaN gradients", "nothing here takes gradients; its forward form is `exp_before_mask`"),
    (
        "A33 and other prefix caches",
        "a cache's bookkeeping is the engine's; what arrives at the op"
        " is `snapshot_of_another_slot`",
    ),
)
"""Public bugs that no replacement of one op expresses, and why.

Rotary ones (A36, a11, a14) happen before the op as well, but can be had at its door: q and k are
turned back and turned wrongly.
"""

FAULTS = (*ATTENTION, *DELTA_RULE)
CATALOGUE = (*FAULTS, *CONTROLS)

NORMALS = (
    "bf16", "chunk32", "chunk128", "block256", "p_f32", "row_sum_rounded",
    "bf16,prefill_window=512",
)  # fmt: skip
"""Policies of equally right producers: their pairs must not be red."""

SHORT = (
    "p_e4m3_lazy_rescale", "split_without_lse", "state_transposed", "stale_slot", "state_4_bits",
    "positions_int16", "control_v_new_bf16", "control_qk_bf16",
)  # fmt: skip
"""What --short runs: each op, a fault of each class, two controls."""


def find(ids: list[str]) -> list[Fault]:
    """The rows of these ids, in the catalogue's order; UserError for one that is not there."""
    known = {fault.id: fault for fault in CATALOGUE}
    if unknown := [name for name in ids if name not in known]:
        raise UserError(
            f"The catalogue has no {', '.join(map(repr, unknown))}.",
            f"Known: {', '.join(known)}.",
        )
    return [fault for fault in CATALOGUE if fault.id in set(ids)]

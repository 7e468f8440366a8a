"""Random checkpoints in the published layout, written tensor by tensor under their HF names.

Values are drawn in the HF shapes and under the HF names, not through `kernjax.weights.save_hf`: a
mistake that writing and reading shared would cancel out. Scales are chosen so that nothing hides:
logits of standard deviation about 2, decays from almost none to all within a token, norm weights
that are not neutral.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from kernjax.model.config import ModelConfig
from kernjax.weights.names import ONE_BY_ONE, STACKED, expected_shapes

# Matrices whose products are added to the residual stream.
_OUTPUTS = ("out_proj.weight", "o_proj.weight", "down_proj.weight", "down_proj", "w2.weight")

L, F = "linear_attention", "full_attention"

WRAPPER_PREFIX = "model.language_model."
TEXT_PREFIX = "model."

# The vendor's, by family.
CLASSES = {
    "qwen3_5": "Qwen3_5ForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "kimi_linear": "KimiLinearForCausalLM",
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One checkpoint and the text it is run on.

    `wrapper` writes the multimodal layout (text_config, `model.language_model.` names, tensors of
    a vision tower and an MTP head that have to be skipped). Sizes are those of the config.
    `experts` are their number and how many a token goes to, `expert_sizes` the widths of one and of
    the shared one, `dense` the layers without; `one_by_one`: as tensors of their own in the file.
    `latents` are the ranks of latent attention: the keys' and values', and the query's (0: none).
    """

    name: str
    layers: tuple[str, ...]
    wrapper: bool
    tied: bool
    hidden: int = 48
    heads: tuple[int, int] = (6, 1)  # query, key-value
    head_dim: int = 16
    linear_heads: tuple[int, int] = (2, 6)  # key, value
    linear_dims: tuple[int, int] = (16, 16)  # key, value
    family: str = "qwen3_5"
    experts: tuple[int, int] = (0, 0)
    expert_sizes: tuple[int, int] = (0, 0)
    dense: tuple[int, ...] = ()
    one_by_one: bool = False
    latents: tuple[int, int] = (0, 0)
    vocab: int = 96
    batch: int = 2
    context_len: int = 200
    decode_len: int = 24
    seed: int = 0

    def text_config(self, dtype: str = "bfloat16") -> dict[str, Any]:
        """The config.json of a text-only checkpoint."""
        if self.family == "kimi_linear":
            return self._kimi_config(dtype)
        return {
            "architectures": [CLASSES[self.family]],
            "attention_bias": False,
            "attn_output_gate": True,
            "dtype": dtype,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": 2 * self.hidden,
            "layer_types": list(self.layers),
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": self.linear_dims[0],
            "linear_num_key_heads": self.linear_heads[0],
            "linear_num_value_heads": self.linear_heads[1],
            "linear_value_head_dim": self.linear_dims[1],
            "mamba_ssm_dtype": "float32",
            "max_position_embeddings": 4096,
            "model_type": "qwen3_next" if self.family == "qwen3_next" else f"{self.family}_text",
            "num_attention_heads": self.heads[0],
            "num_hidden_layers": len(self.layers),
            "num_key_value_heads": self.heads[1],
            "rms_norm_eps": 1e-6,
            "rope_parameters": {
                "mrope_interleaved": True,
                "mrope_section": [11, 11, 10],
                "partial_rotary_factor": 0.25,
                "rope_theta": 10_000_000,
                "rope_type": "default",
            },
            "tie_word_embeddings": self.tied,
            "vocab_size": self.vocab,
        } | self._moe_config()

    def _kimi_config(self, dtype: str) -> dict[str, Any]:
        numbers = {kind: [i + 1 for i, k in enumerate(self.layers) if k == kind] for kind in (L, F)}
        return {
            "architectures": [CLASSES[self.family]],
            "bos_token_id": 1,
            "dtype": dtype,
            "eos_token_id": 2,
            "first_k_dense_replace": len(self.dense),
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": 2 * self.hidden,
            "kv_lora_rank": self.latents[0],
            "linear_attn_config": {
                "full_attn_layers": numbers[F],
                "head_dim": self.linear_dims[0],
                "kda_layers": numbers[L],
                "num_heads": self.linear_heads[0],
                "short_conv_kernel_size": 4,
            },
            "mla_use_nope": True,
            "model_max_length": 4096,
            "model_type": self.family,
            "moe_intermediate_size": self.expert_sizes[0],
            "moe_renormalize": True,
            "moe_router_activation_func": "sigmoid",
            "num_attention_heads": self.heads[0],
            "num_expert_group": 1,
            "num_experts": self.experts[0],
            "num_experts_per_token": self.experts[1],
            "num_hidden_layers": len(self.layers),
            "num_key_value_heads": self.heads[1],
            "num_shared_experts": self.expert_sizes[1] // self.expert_sizes[0],
            "pad_token_id": 0,
            "q_lora_rank": self.latents[1] or None,
            "qk_nope_head_dim": self.head_dim,
            "qk_rope_head_dim": 8,
            "rms_norm_eps": 1e-5,
            "routed_scaling_factor": 2.446,
            "tie_word_embeddings": self.tied,
            "topk_group": 1,
            "v_head_dim": 12,
            "vocab_size": self.vocab,
        }

    def _moe_config(self) -> dict[str, Any]:
        if self.family == "qwen3_5":
            return {}
        fields = {
            "moe_intermediate_size": self.expert_sizes[0],
            "num_experts": self.experts[0],
            "num_experts_per_tok": self.experts[1],
            "shared_expert_intermediate_size": self.expert_sizes[1],
        }
        if self.family == "qwen3_next":
            dense = {"decoder_sparse_step": 1, "mlp_only_layers": list(self.dense)}
            fields |= {"norm_topk_prob": True, **dense}
        return fields

    def config(self, dtype: str = "bfloat16") -> dict[str, Any]:
        """The config.json as it is written."""
        text = self.text_config(dtype)
        if not self.wrapper:
            return text
        text.pop("architectures")
        return {
            "architectures": [CLASSES[self.family].replace("CausalLM", "ConditionalGeneration")],
            "image_token_id": self.vocab - 1,
            "model_type": self.family,
            "text_config": text,
            "tie_word_embeddings": self.tied,
            "vision_config": {"depth": 1, "hidden_size": 8, "model_type": self.family},
        }

    @property
    def tokens(self) -> np.ndarray:
        """int32 [batch, context_len + decode_len + 1]."""
        rng = np.random.default_rng([self.seed, 1])
        shape = (self.batch, self.context_len + self.decode_len + 1)
        return rng.integers(0, self.vocab, shape, dtype=np.int32)


# Every layer pattern, head ratio, layout and tying occurs; no two sizes of a case are equal where
# swapping them could pass.
CASES = (
    Case("text-3to1", (L, L, L, F) * 2, wrapper=False, tied=False),
    Case(
        "wrapper-3to1", (L, L, L, F) * 2, wrapper=True, tied=False,
        heads=(4, 2), linear_heads=(2, 4), linear_dims=(16, 24), seed=1,
    ),
    Case("attention-first", (F, L) * 2, wrapper=False, tied=True, linear_dims=(24, 16), seed=2),
    Case("4to1", (L, L, L, L, F), wrapper=True, tied=True, heads=(4, 2), seed=3),
    Case(
        "tail", (L, L, F, L, L, F, L), wrapper=False, tied=False,
        heads=(6, 3), linear_heads=(3, 3), linear_dims=(8, 16), seed=4,
    ),
    Case(
        "moe", (L, L, F), wrapper=True, tied=False, heads=(4, 2), family="qwen3_5_moe",
        experts=(8, 3), expert_sizes=(20, 28), seed=8,
    ),
    Case(
        "next", (L, L, F, L, F), wrapper=False, tied=False, heads=(4, 2), linear_dims=(16, 24),
        family="qwen3_next", experts=(12, 2), expert_sizes=(36, 20), dense=(0, 4), one_by_one=True,
        seed=9,
    ),
    Case(
        "kimi", (L, L, F, L, F), wrapper=False, tied=False, heads=(4, 4), linear_heads=(3, 3),
        family="kimi_linear", experts=(12, 3), expert_sizes=(20, 40), dense=(0,), one_by_one=True,
        latents=(20, 0), seed=11,
    ),
    Case(
        "kimi-low-rank", (F, L), wrapper=False, tied=False, heads=(4, 4), linear_heads=(3, 3),
        family="kimi_linear", experts=(6, 2), expert_sizes=(36, 36), dense=(0,), one_by_one=True,
        latents=(24, 28), seed=12,
    ),
)  # fmt: skip

# 8 layers, hidden 128, logits of standard deviation 2; head_dim 64, so that the softmax scale is a
# power of two as in the published models and costs no rounding of its own.
BF16_CASE = Case(
    "bf16-3to1", (L, L, L, F) * 2, wrapper=False, tied=False, hidden=128, heads=(4, 2),
    head_dim=64, linear_heads=(2, 4), linear_dims=(32, 32), vocab=256, batch=4, seed=5,
)  # fmt: skip

# Small enough for their traces to lie in the repository.
GOLDEN_CASES = (
    Case(
        "golden-3to1", (L, L, L, F), wrapper=True, tied=False, hidden=32, vocab=64, batch=1,
        linear_dims=(16, 8), context_len=100, decode_len=8, seed=6,
    ),
    Case(
        "golden-tail", (F, L, L), wrapper=False, tied=True, hidden=32, heads=(4, 2),
        linear_heads=(2, 4), vocab=64, batch=1, context_len=100, decode_len=8, seed=7,
    ),
    Case(
        "golden-next", (L, F, L), wrapper=False, tied=False, hidden=32, heads=(4, 2), vocab=64,
        batch=1, linear_dims=(16, 8), family="qwen3_next", experts=(8, 3), expert_sizes=(16, 24),
        dense=(0,), context_len=100, decode_len=8, seed=10,
    ),
)  # fmt: skip


def draw(case: Case) -> dict[str, np.ndarray]:
    """The text model's tensors under canonical HF names, float32 [HF shapes]."""
    config = ModelConfig.from_dict(case.text_config())
    shapes = expected_shapes(config, ONE_BY_ONE if case.one_by_one else STACKED)
    return {name: _tensor(case, name, shape) for name, shape in shapes.items()}


def write(
    case: Case,
    directory: Path,
    tensors: dict[str, np.ndarray] | None = None,
    dtype: str = "bfloat16",
) -> Path:
    """Writes the checkpoint, every tensor in `dtype` as in published files; the directory."""
    prefix = WRAPPER_PREFIX if case.wrapper else TEXT_PREFIX
    stored = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)
    tensors = draw(case) if tensors is None else tensors
    named = {n if n == "lm_head.weight" else prefix + n: x for n, x in tensors.items()}
    if case.wrapper:
        named["model.visual.patch_embed.proj.weight"] = np.ones((8, 3), np.float32)
        named["mtp.fc.weight"] = np.ones((case.hidden, 2 * case.hidden), np.float32)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: np.ascontiguousarray(x.astype(stored)) for name, x in named.items()},
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )
    (directory / "config.json").write_text(json.dumps(case.config(dtype), indent=1))
    return directory


def _tensor(case: Case, name: str, shape: tuple[int, ...]) -> np.ndarray:
    rng = np.random.default_rng([case.seed, zlib.crc32(name.encode())])
    normal = rng.standard_normal(shape)
    if name.endswith("A_log"):
        size = max(shape)
        values = np.log(np.geomspace(0.02, 16, size))[rng.permutation(size)].reshape(shape)
    elif name.endswith("dt_bias"):
        step = np.geomspace(1e-3, 1, shape[0])[rng.permutation(shape[0])]
        values = np.log(np.expm1(step))  # softplus^-1
    elif name.endswith("linear_attn.norm.weight") or (
        case.family == "kimi_linear" and name.endswith("norm.weight")
    ):
        values = 1 + 0.2 * normal
    elif name.endswith("norm.weight"):
        values = 0.2 * normal
    elif name.endswith("correction_bias"):
        values = 0.2 * normal
    elif name.endswith("conv1d.weight"):
        values = 0.5 * normal
    elif name.endswith("embed_tokens.weight"):
        values = 2 * normal * shape[1] ** -0.5 if case.tied else normal
    elif name == "lm_head.weight":
        values = 2 * normal * shape[1] ** -0.5
    elif name.endswith(
        ("out_proj.weight", "o_proj.weight", "down_proj.weight", "down_proj", "w2.weight")
    ):
        # Branches smaller than the residual stream, as in trained models: at unit gain a random
        # network multiplies float32's own rounding by a thousand.
        values = 0.35 * normal * shape[-1] ** -0.5
    else:
        values = normal * shape[-1] ** -0.5
    return values.astype(np.float32)

"""The architecture of a checkpoint, read from its HF `config.json`; nothing is guessed.

Known `model_type`s: `qwen3_5` (the multimodal wrapper; its `text_config` is read) and
`qwen3_5_text`: dense hybrids of gated delta net and gated attention (Qwen3.5, 3.6, 3.8);
`qwen3_5_moe` (wrapper), `qwen3_5_moe_text` and `qwen3_next`: the same with mixtures of experts;
`kimi_linear` and `kimi_k3` (wrapper): Kimi delta attention and latent attention (`config_kimi`).

The defaults of the transformers classes differ from the published values (hidden size, layers,
heads, rope theta), so a needed field that is absent is an error that names it. A field that would
change the computation in a way that is not implemented here is an error too, never ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernjax.base.errors import UserError
from kernjax.model.config_fields import Fields, read_config_json

LINEAR = "linear_attention"
FULL = "full_attention"

# Stacks of layers that have the same parameters, and the kind of their mixer.
STACKS = {"linear": LINEAR, "full": FULL, "linear_moe": LINEAR, "full_moe": FULL}

SOFTMAX, SIGMOID = "softmax", "sigmoid"

QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT = "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"
KIMI_LINEAR = "kimi_linear"
SILU, SITU = "silu", "situ"

# Multimodal wrappers, and the model_type of the text_config inside.
WRAPPERS = {"qwen3_5": QWEN3_5, "qwen3_5_moe": QWEN3_5_MOE, "kimi_k3": KIMI_LINEAR}
_QWEN_TYPES = ("qwen3_5", QWEN3_5, "qwen3_5_moe", QWEN3_5_MOE, QWEN3_NEXT)
MODEL_TYPES = (*_QWEN_TYPES, KIMI_LINEAR, "kimi_k3")


@dataclass(frozen=True)
class MoEConfig:
    """A mixture of experts in place of the MLP; every layer that has one has the same.

    - num_experts E, experts_per_token k, expert_size F: width inside one expert.
    - scoring: of the router's logits, "softmax" or "sigmoid"; correction_bias: whether a bias per
      expert is added to the scores for the choice (not for the weights); normalise: whether the
      chosen weights are divided by their sum; scaling: of the weights, last.
    - float32_router: logits and weights are float32 whatever the activations are.
    - shared_size: width of the expert that every token goes through (0: none); shared_gate: whether
      a sigmoid scales it.
    - latent_size: width W on which routed experts run, projected down and up (None: hidden_size);
      latent_norm: an RMSNorm of their weighted sum.
    """

    num_experts: int
    experts_per_token: int
    expert_size: int
    scoring: str = SOFTMAX
    correction_bias: bool = False
    normalise: bool = True
    scaling: float = 1.0
    float32_router: bool = False
    shared_size: int = 0
    shared_gate: bool = False
    latent_size: int | None = None
    latent_norm: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.experts_per_token <= self.num_experts:
            raise UserError(
                f"Inconsistent model config: {self.experts_per_token} experts a token, but"
                f" {self.num_experts} experts.",
                "Expected each token to go to at most as many experts as there are.",
            )
        if self.scoring not in (SOFTMAX, SIGMOID):
            raise UserError(
                f"The router's scores come from an unknown function, {self.scoring!r}.",
                f"Implemented: {SOFTMAX} and {SIGMOID}.",
            )


@dataclass(frozen=True)
class LatentAttentionConfig:
    """Multi-head latent attention (MLA): keys and values of all heads come from one latent.

    - kv_rank: width of the latent; query_rank: of the query's own (None: one full matrix).
    - nope_dim, rope_dim: parts of a head's query, of which the second meets a key that all heads
      share. Nothing is rotated. value_dim: width of a head's value.
    - output_gate: whether a sigmoid gate multiplies the output.
    - norm_eps: of the latents' norms, which do not take the model's.
    """

    kv_rank: int
    query_rank: int | None
    nope_dim: int
    rope_dim: int
    value_dim: int
    output_gate: bool
    norm_eps: float


@dataclass(frozen=True)
class KimiDeltaConfig:
    """What Kimi Delta Attention has beside the delta rule's heads.

    - lower_bound: of the log decay, which is then lower_bound * sigmoid(...); None: -A softplus.
    - full_rank_gate: whether the output gate is one matrix; otherwise two, of the heads' dim.
    """

    lower_bound: float | None
    full_rank_gate: bool


@dataclass(frozen=True)
class ModelConfig:
    """What the decoder computes. Frozen and hashable, so it can be a static argument of jit.

    Dimensions: D = hidden_size, F = intermediate_size, N/G = query/key-value heads of head_dim H,
    Hk/Hv = key/value heads of the delta rule with dims K/V, C = conv_channels.
    `dtype` is the checkpoint's nominal dtype; each tensor's own header decides when it is loaded.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    layer_types: tuple[str, ...]
    intermediate_size: int
    hidden_act: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    attn_output_gate: bool
    linear_key_heads: int
    linear_value_heads: int
    linear_key_dim: int
    linear_value_dim: int
    conv_kernel: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    dtype: str
    moe: MoEConfig | None = None
    moe_layers: tuple[int, ...] = ()
    # What linear and full attention layers are, where not gated delta net and grouped queries.
    delta: KimiDeltaConfig | None = None
    latent: LatentAttentionConfig | None = None
    # Layers a block of attention residuals (None: plain residuals).
    block_size: int | None = None
    # Of SiTU: of its gate, and of its other factor (None: left as it is).
    situ_betas: tuple[float, float | None] = (1.0, None)
    # Whether norms multiply by 1 + weight.
    zero_centred: bool = True

    def __post_init__(self) -> None:
        _check_consistent(self)

    @property
    def key_size(self) -> int:
        """Hk * K, the width of the delta rule's q, and of its k."""
        return self.linear_key_heads * self.linear_key_dim

    @property
    def value_size(self) -> int:
        """Hv * V, the width of the delta rule's v, and of its output."""
        return self.linear_value_heads * self.linear_value_dim

    @property
    def conv_channels(self) -> int:
        """C: the convolution runs over q, k and v, in this order."""
        return 2 * self.key_size + self.value_size

    @property
    def cached_widths(self) -> tuple[int, int]:
        """Numbers a token and key-value head has in the caches of keys and of values."""
        if self.latent is None:
            return self.head_dim, self.head_dim
        return self.latent.kv_rank + self.latent.rope_dim, self.latent.kv_rank

    @property
    def linear_layers(self) -> tuple[int, ...]:
        """Indices of the layers with a recurrent state."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == LINEAR)

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Indices of the attention layers."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == FULL)

    @property
    def layer_stacks(self) -> tuple[str, ...]:
        """The stack (a key of `STACKS`) of every layer."""
        short = {kind: name for name, kind in reversed(STACKS.items())}
        return tuple(
            short[kind] + ("_moe" if layer in self.moe_layers else "")
            for layer, kind in enumerate(self.layer_types)
        )

    @property
    def stacks(self) -> dict[str, tuple[int, ...]]:
        """The layers of every stack that this model has, in order."""
        of_layer = self.layer_stacks
        return {
            name: tuple(layer for layer, other in enumerate(of_layer) if other == name)
            for name in STACKS
            if name in of_layer
        }

    @classmethod
    def from_directory(cls, directory: str | Path) -> ModelConfig:
        """Reads `directory/config.json`."""
        return cls.from_dict(read_config_json(directory), artefact=f"{directory}/config.json")

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], *, artefact: str = "config.json") -> ModelConfig:
        """From the content of an HF `config.json`; UserError names the field and the artefact."""
        model_type = config.get("model_type")
        if model_type not in MODEL_TYPES:
            raise UserError(
                f"{artefact} has {model_type=}.",
                f"Known: {', '.join(MODEL_TYPES)}.",
                "Check that --model is a checkpoint of this family.",
            )
        if (inside := WRAPPERS.get(model_type)) is None:
            return _parser(model_type)(Fields(config, artefact), model_type)
        text = config.get("text_config")
        if not isinstance(text, Mapping):
            raise UserError(
                f"{artefact} of model_type {model_type!r} has no text_config object.",
                "The wrapper keeps the language model's fields in text_config.",
            )
        inner_type = text.get("model_type", inside)
        if inner_type != inside:
            raise UserError(
                f"{artefact}: text_config has model_type={inner_type!r}.",
                f"Expected {inside!r} inside a {model_type!r} wrapper.",
            )
        return _parser(inside)(Fields(text, artefact, outer=config), inside)


def _parser(model_type: str) -> Callable[[Fields, str], ModelConfig]:
    # They build on this module.
    from kernjax.model import config_kimi, config_qwen

    return config_kimi.parse if model_type == KIMI_LINEAR else config_qwen.parse


def _check_consistent(config: ModelConfig) -> None:
    c = config
    problems = [
        (
            len(c.layer_types) != c.num_layers,
            f"layer_types has {len(c.layer_types)} entries but num_layers={c.num_layers}",
            "one entry per layer",
        ),
        (
            c.num_heads % c.num_kv_heads != 0,
            f"num_attention_heads={c.num_heads}, num_key_value_heads={c.num_kv_heads}",
            "query heads to be a multiple of key-value heads",
        ),
        (
            c.linear_value_heads % c.linear_key_heads != 0,
            f"linear_num_value_heads={c.linear_value_heads}, "
            f"linear_num_key_heads={c.linear_key_heads}",
            "value heads to be a multiple of key heads",
        ),
        (
            c.latent is None
            and (c.rotary_dim <= 0 or c.rotary_dim % 2 != 0 or c.rotary_dim > c.head_dim),
            f"rotary dimension {c.rotary_dim} (head_dim={c.head_dim} x partial_rotary_factor)",
            "an even number, at least 2 and at most head_dim",
        ),
    ]
    for wrong, found, expected in problems:
        if wrong:
            raise UserError(f"Inconsistent model config: {found}.", f"Expected {expected}.")

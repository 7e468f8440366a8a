"""Which HF tensor holds which parameter: the one table between our tree and a checkpoint's names.

Names here are canonical: as below `model.` of a text-only checkpoint, `lm_head.weight` at the top
(transformers `Qwen3_5ForCausalLM`). `resolve` finds the prefix that a published file has.

Experts lie in files in two ways, and `experts_in` says in which: stacked (`experts.gate_up_proj`
[E, 2F, D] and `experts.down_proj` [E, D, F]) or one by one (`experts.7.gate_proj.weight` [F, D]).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from kernjax.model.config import FULL, KIMI_LINEAR, LINEAR, QWEN3_NEXT, STACKS, ModelConfig
from kernjax.model.params import LeafPath, ParamSpec, abstract_params, leaves, stacked_layers
from kernjax.weights.layouts import (
    AsIs,
    Depthwise,
    ExpertRows,
    HeadPart,
    Interleaved,
    Layout,
    PerHead,
    Row,
    Transposed,
)

LM_HEAD = "lm_head.weight"
STACKED, ONE_BY_ONE = "stacked", "one by one"

_AS_IS, _TRANSPOSED = AsIs(), Transposed()

_TOP: dict[LeafPath, tuple[str, Layout]] = {
    ("embed",): ("embed_tokens.weight", _AS_IS),
    ("final_norm",): ("norm.weight", _AS_IS),
    ("lm_head",): (LM_HEAD, _TRANSPOSED),
    ("output_res", "norm"): ("output_attn_res_norm.weight", _AS_IS),
    ("output_res", "proj"): ("output_attn_res_proj.weight", Row()),
}
_EVERY_LAYER: dict[LeafPath, tuple[str, Layout]] = {
    ("input_norm",): ("input_layernorm.weight", _AS_IS),
    ("post_norm",): ("post_attention_layernorm.weight", _AS_IS),
    ("mlp", "gate"): ("mlp.gate_proj.weight", _TRANSPOSED),
    ("mlp", "up"): ("mlp.up_proj.weight", _TRANSPOSED),
    ("mlp", "down"): ("mlp.down_proj.weight", _TRANSPOSED),
    ("moe", "router"): ("mlp.gate.weight", _TRANSPOSED),
    ("moe", "shared", "gate"): ("mlp.shared_expert.gate_proj.weight", _TRANSPOSED),
    ("moe", "shared", "up"): ("mlp.shared_expert.up_proj.weight", _TRANSPOSED),
    ("moe", "shared", "down"): ("mlp.shared_expert.down_proj.weight", _TRANSPOSED),
    ("moe", "shared_gate"): ("mlp.shared_expert_gate.weight", _TRANSPOSED),
}
_LINEAR: dict[LeafPath, tuple[str, Layout]] = _EVERY_LAYER | {
    ("qkv",): ("linear_attn.in_proj_qkv.weight", _TRANSPOSED),
    ("z",): ("linear_attn.in_proj_z.weight", _TRANSPOSED),
    ("b",): ("linear_attn.in_proj_b.weight", _TRANSPOSED),
    ("a",): ("linear_attn.in_proj_a.weight", _TRANSPOSED),
    ("conv",): ("linear_attn.conv1d.weight", Depthwise()),
    ("A_log",): ("linear_attn.A_log", _AS_IS),
    ("dt_bias",): ("linear_attn.dt_bias", _AS_IS),
    ("norm",): ("linear_attn.norm.weight", _AS_IS),
    ("out",): ("linear_attn.out_proj.weight", _TRANSPOSED),
}


# Kimi Linear and Kimi K3.
_KIMI_EVERY_LAYER: dict[LeafPath, tuple[str, Layout]] = _EVERY_LAYER | {
    ("mixer_res", "norm"): ("self_attention_res_norm.weight", _AS_IS),
    ("mixer_res", "proj"): ("self_attention_res_proj.weight", Row()),
    ("mlp_res", "norm"): ("mlp_res_norm.weight", _AS_IS),
    ("mlp_res", "proj"): ("mlp_res_proj.weight", Row()),
    ("moe", "router"): ("block_sparse_moe.gate.weight", _TRANSPOSED),
    ("moe", "correction"): ("block_sparse_moe.gate.e_score_correction_bias", _AS_IS),
    ("moe", "shared", "gate"): ("block_sparse_moe.shared_experts.gate_proj.weight", _TRANSPOSED),
    ("moe", "shared", "up"): ("block_sparse_moe.shared_experts.up_proj.weight", _TRANSPOSED),
    ("moe", "shared", "down"): ("block_sparse_moe.shared_experts.down_proj.weight", _TRANSPOSED),
    ("moe", "latent_down"): ("block_sparse_moe.routed_expert_down_proj.weight", _TRANSPOSED),
    ("moe", "latent_up"): ("block_sparse_moe.routed_expert_up_proj.weight", _TRANSPOSED),
    ("moe", "latent_norm"): ("block_sparse_moe.routed_expert_norm.weight", _AS_IS),
}
_KIMI_EXPERTS: dict[LeafPath, tuple[str, Layout]] = {
    ("moe", "experts", part): (f"block_sparse_moe.experts.{{expert}}.{name}.weight", _TRANSPOSED)
    for part, name in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
}
_DELTA: dict[LeafPath, tuple[str, Layout]] = _KIMI_EVERY_LAYER | {
    ("q",): ("self_attn.q_proj.weight", _TRANSPOSED),
    ("k",): ("self_attn.k_proj.weight", _TRANSPOSED),
    ("v",): ("self_attn.v_proj.weight", _TRANSPOSED),
    ("conv_q",): ("self_attn.q_conv1d.weight", Depthwise()),
    ("conv_k",): ("self_attn.k_conv1d.weight", Depthwise()),
    ("conv_v",): ("self_attn.v_conv1d.weight", Depthwise()),
    ("f_a",): ("self_attn.f_a_proj.weight", _TRANSPOSED),
    ("f_b",): ("self_attn.f_b_proj.weight", _TRANSPOSED),
    ("b",): ("self_attn.b_proj.weight", _TRANSPOSED),
    ("A_log",): ("self_attn.A_log", PerHead()),
    ("dt_bias",): ("self_attn.dt_bias", _AS_IS),
    ("g",): ("self_attn.g_proj.weight", _TRANSPOSED),
    ("g_a",): ("self_attn.g_a_proj.weight", _TRANSPOSED),
    ("g_b",): ("self_attn.g_b_proj.weight", _TRANSPOSED),
    ("norm",): ("self_attn.o_norm.weight", _AS_IS),
    ("out",): ("self_attn.o_proj.weight", _TRANSPOSED),
}
_LATENT: dict[LeafPath, tuple[str, Layout]] = _KIMI_EVERY_LAYER | {
    ("q",): ("self_attn.q_proj.weight", _TRANSPOSED),
    ("q_a",): ("self_attn.q_a_proj.weight", _TRANSPOSED),
    ("q_norm",): ("self_attn.q_a_layernorm.weight", _AS_IS),
    ("q_b",): ("self_attn.q_b_proj.weight", _TRANSPOSED),
    ("kv_a",): ("self_attn.kv_a_proj_with_mqa.weight", _TRANSPOSED),
    ("kv_norm",): ("self_attn.kv_a_layernorm.weight", _AS_IS),
    ("kv_b",): ("self_attn.kv_b_proj.weight", _TRANSPOSED),
    ("gate",): ("self_attn.g_proj.weight", _TRANSPOSED),
    ("o",): ("self_attn.o_proj.weight", _TRANSPOSED),
}


def _linear(config: ModelConfig) -> dict[LeafPath, tuple[str, Layout]]:
    """Qwen3-Next fuses the projections of x, group by group: a key head and its value heads."""
    if config.delta is not None:
        return _DELTA
    if config.model_type != QWEN3_NEXT:
        return _LINEAR
    groups = config.linear_key_heads
    heads = config.linear_value_heads // groups
    key, value = config.linear_key_dim, heads * config.linear_value_dim

    def qkvz(*spans: tuple[int, int]) -> tuple[str, Layout]:
        layout = Interleaved(groups, 2 * key + 2 * value, spans)
        return "linear_attn.in_proj_qkvz.weight", layout

    def ba(*spans: tuple[int, int]) -> tuple[str, Layout]:
        return "linear_attn.in_proj_ba.weight", Interleaved(groups, 2 * heads, spans)

    return _LINEAR | {
        ("qkv",): qkvz((0, key), (key, key), (2 * key, value)),
        ("z",): qkvz((2 * key + value, value)),
        ("b",): ba((0, heads)),
        ("a",): ba((heads, heads)),
    }


def _experts(config: ModelConfig, experts: str) -> dict[LeafPath, tuple[str, Layout]]:
    """Names with `{expert}` are of one expert each."""
    if config.moe is None:
        return {}
    if config.model_type == KIMI_LINEAR:
        return _KIMI_EXPERTS
    if experts == ONE_BY_ONE:
        return {
            ("moe", "experts", part): (f"mlp.experts.{{expert}}.{part}_proj.weight", _TRANSPOSED)
            for part in ("gate", "up", "down")
        }
    size, width = config.moe.expert_size, config.hidden_size
    return {
        ("moe", "experts", "gate"): ("mlp.experts.gate_up_proj", ExpertRows(0, 2 * size)),
        ("moe", "experts", "up"): ("mlp.experts.gate_up_proj", ExpertRows(size, 2 * size)),
        ("moe", "experts", "down"): ("mlp.experts.down_proj", ExpertRows(0, width)),
    }


def usual_experts(config: ModelConfig) -> str:
    """How transformers writes the experts of this model."""
    return ONE_BY_ONE if config.model_type in (QWEN3_NEXT, KIMI_LINEAR) else STACKED


def experts_in(names: Iterable[str], config: ModelConfig) -> str:
    """How a checkpoint with these tensors holds its experts."""
    names = list(names)
    if any(re.search(r"\.experts\.\d+\.", name) for name in names):
        return ONE_BY_ONE
    stacked = any(re.search(r"\.experts\.(gate_up|down)_proj", name) for name in names)
    return STACKED if stacked else usual_experts(config)


def _full(config: ModelConfig) -> dict[LeafPath, tuple[str, Layout]]:
    if config.latent is not None:
        return _LATENT
    return _EVERY_LAYER | {
        ("q",): ("self_attn.q_proj.weight", HeadPart(0, config.head_dim)),
        ("gate",): ("self_attn.q_proj.weight", HeadPart(1, config.head_dim)),
        ("k",): ("self_attn.k_proj.weight", _TRANSPOSED),
        ("v",): ("self_attn.v_proj.weight", _TRANSPOSED),
        ("q_norm",): ("self_attn.q_norm.weight", _AS_IS),
        ("k_norm",): ("self_attn.k_norm.weight", _AS_IS),
        ("o",): ("self_attn.o_proj.weight", _TRANSPOSED),
    }


class Part(NamedTuple):
    """One HF tensor as (part of) one layer of one parameter."""

    name: str  # canonical
    layout: Layout
    hf_shape: tuple[int, ...]


@dataclass(frozen=True)
class Leaf:
    """One parameter and where its values come from.

    The leading axes `stack` of the parameter, none, (layers,) or (layers, experts), count the
    parts, the last one fastest.
    """

    path: LeafPath
    spec: ParamSpec
    parts: tuple[Part, ...]
    stack: tuple[int, ...]

    @property
    def part_shape(self) -> tuple[int, ...]:
        """The shape of what one part holds."""
        return self.spec.shape[len(self.stack) :]


def table(config: ModelConfig, experts: str | None = None) -> list[Leaf]:
    """Every parameter of `config` with its HF tensors, in the order of `abstract_params`.

    `experts`: how they lie in the file, None as transformers writes them.
    """
    mlp = _experts(config, experts or usual_experts(config))
    kinds = {LINEAR: _linear(config) | mlp, FULL: _full(config) | mlp}
    result = []
    for path, spec in leaves(abstract_params(config)):
        layers = stacked_layers(config, path)
        if layers is None:
            name, layout = _TOP[path]
            names, stack = [name], ()
        else:
            suffix, layout = kinds[STACKS[path[0]]][path[1:]]
            names, stack = [f"layers.{layer}.{suffix}" for layer in layers], (len(layers),)
            if "{expert}" in suffix:
                every = range(spec.shape[1])
                names = [n.replace("{expert}", str(expert)) for n in names for expert in every]
                stack = spec.shape[:2]
        shape = layout.hf_shape(spec.shape[len(stack) :])
        parts = tuple(Part(name, layout, shape) for name in names)
        result.append(Leaf(path, spec, parts, stack))
    return result


def expected_shapes(config: ModelConfig, experts: str | None = None) -> dict[str, tuple[int, ...]]:
    """Canonical name -> HF shape of every tensor a checkpoint of `config` must hold."""
    return {part.name: part.hf_shape for leaf in table(config, experts) for part in leaf.parts}


class Prefix(NamedTuple):
    """Where a checkpoint keeps the decoder (`body`) and the output projection (`head`)."""

    body: str
    head: str

    def full(self, name: str) -> str:
        """The file's name for a canonical one."""
        return (self.head if name == LM_HEAD else self.body) + name

    def canonical(self, name: str) -> str | None:
        """The canonical name of a file's tensor; None where the prefix does not fit."""
        head = name.removeprefix(self.head)
        short = head if head == LM_HEAD else name.removeprefix(self.body)
        return short if self.full(short) == name else None


# Published files and a re-saved wrapper; a text-only save; Kimi K3 and MLX conversions.
PREFIXES = (
    Prefix("model.language_model.", ""),
    Prefix("model.", ""),
    Prefix("language_model.model.", "language_model."),
)

# The vision tower and the multi-token-prediction head: not part of the language model's logits.
SKIPPED = ("model.visual.", "visual.", "mtp.", "vision_tower.", "mm_projector.")


def usual_name(name: str) -> str:
    """A canonical name for one that transformers writes: of Kimi Linear's dense layers."""
    return re.sub(r"\.block_sparse_moe\.(gate|up|down)_proj\.", r".mlp.\1_proj.", name)


def is_skipped(name: str) -> bool:
    return name.startswith(SKIPPED)


def resolve(expected: Collection[str], names: Collection[str]) -> Prefix:
    """The prefix under which most of the `expected` canonical names occur among `names`."""
    return max(PREFIXES, key=lambda prefix: sum(prefix.full(name) in names for name in expected))

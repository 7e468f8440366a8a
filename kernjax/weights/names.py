"""Which HF tensor holds which parameter: the one table between our tree and a checkpoint's names.

Names here are canonical: as below `model.` of a text-only checkpoint, `lm_head.weight` at the top
(transformers `Qwen3_5ForCausalLM`). `resolve` finds the prefix that a published file has.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from kernjax.model.config import ModelConfig
from kernjax.model.params import LeafPath, ParamSpec, abstract_params, leaves, stacked_layers
from kernjax.weights.layouts import AsIs, Depthwise, HeadPart, Layout, Transposed

LM_HEAD = "lm_head.weight"

_AS_IS, _TRANSPOSED = AsIs(), Transposed()

_TOP: dict[LeafPath, tuple[str, Layout]] = {
    ("embed",): ("embed_tokens.weight", _AS_IS),
    ("final_norm",): ("norm.weight", _AS_IS),
    ("lm_head",): (LM_HEAD, _TRANSPOSED),
}
_EVERY_LAYER: dict[LeafPath, tuple[str, Layout]] = {
    ("input_norm",): ("input_layernorm.weight", _AS_IS),
    ("post_norm",): ("post_attention_layernorm.weight", _AS_IS),
    ("mlp", "gate"): ("mlp.gate_proj.weight", _TRANSPOSED),
    ("mlp", "up"): ("mlp.up_proj.weight", _TRANSPOSED),
    ("mlp", "down"): ("mlp.down_proj.weight", _TRANSPOSED),
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


def _full(config: ModelConfig) -> dict[LeafPath, tuple[str, Layout]]:
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
    """One parameter and where its values come from: a part per layer, or one part if unstacked."""

    path: LeafPath
    spec: ParamSpec
    parts: tuple[Part, ...]
    stacked: bool

    @property
    def part_shape(self) -> tuple[int, ...]:
        """The shape of one layer."""
        return self.spec.shape[1:] if self.stacked else self.spec.shape


def table(config: ModelConfig) -> list[Leaf]:
    """Every parameter of `config` with its HF tensors, in the order of `abstract_params`."""
    kinds = {"linear": _LINEAR, "full": _full(config)}
    result = []
    for path, spec in leaves(abstract_params(config)):
        layers = stacked_layers(config, path)
        if layers is None:
            name, layout = _TOP[path]
            parts: tuple[Part, ...] = (Part(name, layout, layout.hf_shape(spec.shape)),)
        else:
            suffix, layout = kinds[path[0]][path[1:]]
            shape = layout.hf_shape(spec.shape[1:])
            parts = tuple(Part(f"layers.{layer}.{suffix}", layout, shape) for layer in layers)
        result.append(Leaf(path, spec, parts, stacked=layers is not None))
    return result


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Canonical name -> HF shape of every tensor a checkpoint of `config` must hold."""
    return {part.name: part.hf_shape for leaf in table(config) for part in leaf.parts}


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


# Published files and a re-saved wrapper; a text-only save; the layout of MLX conversions.
PREFIXES = (
    Prefix("model.language_model.", ""),
    Prefix("model.", ""),
    Prefix("language_model.model.", "language_model."),
)

# The vision tower and the multi-token-prediction head: not part of the language model's logits.
SKIPPED = ("model.visual.", "visual.", "mtp.")


def is_skipped(name: str) -> bool:
    return name.startswith(SKIPPED)


def resolve(expected: Collection[str], names: Collection[str]) -> Prefix:
    """The prefix under which most of the `expected` canonical names occur among `names`."""
    return max(PREFIXES, key=lambda prefix: sum(prefix.full(name) in names for name in expected))

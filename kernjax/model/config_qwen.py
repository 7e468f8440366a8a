"""Configs of Qwen3.5, 3.6, 3.8 and Qwen3-Next, dense and with mixtures of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernjax.base.errors import UserError
from kernjax.model.config import (
    FULL,
    LINEAR,
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_NEXT,
    SILU,
    SOFTMAX,
    ModelConfig,
    MoEConfig,
)
from kernjax.model.config_fields import Fields

# Fields that change what is computed, and their only values implemented here. Where a field is
# absent the model class itself hard-codes the first value (the class, not a config default: e.g.
# transformers never reads attn_output_gate, and writes no such key).
_ONLY_VALUES: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "attn_output_gate": (True,),
    "output_gate_type": ("swish", "silu"),
    "mamba_ssm_dtype": ("float32",),
    "mlp_bias": (False, None),
    "sliding_window": (None,),
    "use_sliding_window": (False, None),
}
# The same, of mixtures of experts.
_ONLY_VALUES_OF: dict[str, dict[str, tuple[Any, ...]]] = {
    QWEN3_5: {"mlp_only_layers": ([], None), "num_experts": (0, None)},
    QWEN3_5_MOE: {
        "decoder_sparse_step": (1, None),
        "mlp_only_layers": ([], None),
        "norm_topk_prob": (True, None),
        "scoring_func": (SOFTMAX, None),
    },
    QWEN3_NEXT: {"scoring_func": (SOFTMAX, None)},
}


def parse(fields: Fields, model_type: str) -> ModelConfig:
    fields.only(_ONLY_VALUES | _ONLY_VALUES_OF[model_type])
    hidden_act = fields.config.get("hidden_act")
    if hidden_act != SILU:
        raise fields.bad("hidden_act", hidden_act, "'silu', the only activation of this model type")

    num_layers = fields.whole("num_hidden_layers")
    head_dim = fields.whole("head_dim")
    theta, partial = _rope(fields)
    moe, moe_layers = _moe(fields, model_type, num_layers)
    return ModelConfig(
        model_type=model_type,
        vocab_size=fields.whole("vocab_size"),
        hidden_size=fields.whole("hidden_size"),
        num_layers=num_layers,
        layer_types=_layer_types(fields, num_layers),
        # Without a layer that has it, mixtures' configs leave it out.
        intermediate_size=(
            0 if len(moe_layers) == num_layers else fields.whole("intermediate_size")
        ),
        hidden_act="silu",
        num_heads=fields.whole("num_attention_heads"),
        num_kv_heads=fields.whole("num_key_value_heads"),
        head_dim=head_dim,
        rotary_dim=int(head_dim * partial),
        rope_theta=theta,
        attn_output_gate=True,
        linear_key_heads=fields.whole("linear_num_key_heads"),
        linear_value_heads=fields.whole("linear_num_value_heads"),
        linear_key_dim=fields.whole("linear_key_head_dim"),
        linear_value_dim=fields.whole("linear_value_head_dim"),
        conv_kernel=fields.whole("linear_conv_kernel_dim"),
        rms_norm_eps=fields.real("rms_norm_eps"),
        max_position_embeddings=fields.whole("max_position_embeddings"),
        tie_word_embeddings=fields.tied(),
        dtype=fields.dtype(),
        moe=moe,
        moe_layers=moe_layers,
    )


def _moe(
    fields: Fields, model_type: str, num_layers: int
) -> tuple[MoEConfig | None, tuple[int, ...]]:
    """The mixture of experts and the layers that have it."""
    if model_type == QWEN3_5 or (
        model_type == QWEN3_NEXT and fields.config.get("num_experts") == 0
    ):
        return None, ()
    layers, normalise = tuple(range(num_layers)), True
    if model_type == QWEN3_NEXT:
        step, dense = (
            fields.whole("decoder_sparse_step"),
            fields.config.get("mlp_only_layers") or [],
        )
        if not isinstance(dense, list | tuple) or not all(type(layer) is int for layer in dense):
            raise fields.error(f"mlp_only_layers={dense!r}", "a list of layer numbers")
        layers = tuple(i for i in layers if i not in dense and (i + 1) % step == 0)
        normalise = fields.config.get("norm_topk_prob")
        if not isinstance(normalise, bool):
            raise fields.bad("norm_topk_prob", normalise, "true or false")
    experts, chosen = fields.whole("num_experts"), fields.whole("num_experts_per_tok")
    if chosen > experts:
        raise fields.error(
            f"num_experts_per_tok={chosen}, but num_experts={experts}",
            "a token to go to at most as many experts as there are",
        )
    moe = MoEConfig(
        num_experts=experts,
        experts_per_token=chosen,
        expert_size=fields.whole("moe_intermediate_size"),
        normalise=normalise,
        shared_size=fields.whole("shared_expert_intermediate_size"),
        shared_gate=True,
    )
    return (moe, layers) if layers else (None, ())


def _rope(fields: Fields) -> tuple[float, float]:
    """(theta, partial_rotary_factor); both occur in `rope_parameters`, flat, or in both places.

    mrope_section is not read: text positions are equal in its three sections, so plain rope.
    """
    nested: dict[str, Any] = {}
    for name in ("rope_parameters", "rope_scaling"):  # rope_scaling: files of transformers 4
        value = fields.config.get(name)
        if value is None:
            continue
        if not isinstance(value, Mapping):
            raise fields.error(f"{name}={value!r}", "an object")
        rope_type = value.get("rope_type", value.get("type", "default"))
        if rope_type != "default":
            raise UserError(
                f"{fields.artefact}: {name} has {rope_type=}.",
                "Implemented: 'default' (rotation by theta, no scaling of positions).",
            )
        nested |= value

    def one(name: str) -> float:
        places = [source for source in (nested, fields.config) if source.get(name) is not None]
        values = [fields.real(name, source) for source in places]
        if len(set(values)) > 1:
            raise fields.error(
                f"{name}={values[0]} in rope_parameters but {values[1]} flat", "one value"
            )
        return values[0] if values else fields.real(name)

    theta, partial = one("rope_theta"), one("partial_rotary_factor")
    if partial > 1:
        raise fields.error(f"partial_rotary_factor={partial}", "at most 1")
    return theta, partial


def _layer_types(fields: Fields, num_layers: int) -> tuple[str, ...]:
    """The given list; or, from `full_attention_interval` n, attention in every n-th layer."""
    given = fields.config.get("layer_types")
    if given is None:
        if fields.config.get("full_attention_interval") is None:
            raise fields.error(
                "field layer_types is missing", "it, or full_attention_interval to derive it from"
            )
        interval = fields.whole("full_attention_interval")
        return tuple(LINEAR if (i + 1) % interval else FULL for i in range(num_layers))
    if not isinstance(given, list | tuple):
        raise fields.error(f"layer_types={given!r}", "a list")
    unknown = sorted({repr(kind) for kind in given if kind not in (LINEAR, FULL)})
    if unknown:
        raise fields.error(f"layer_types holds {', '.join(unknown)}", f"{LINEAR} or {FULL}")
    if len(given) != num_layers:
        raise fields.error(
            f"layer_types has {len(given)} entries but num_hidden_layers={num_layers}",
            "one entry per layer",
        )
    return tuple(given)

"""Configs of Kimi Linear (`kimi_linear`) and Kimi K3 (`kimi_k3`, the same fields in text_config).

Published files list the layers in `linear_attn_config`, counted from 1; transformers writes
`layer_types` and `mlp_layer_types` as well, or instead. Where both are there they must agree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kernjax.model.config import (
    FULL,
    LINEAR,
    SIGMOID,
    SILU,
    SITU,
    KimiDeltaConfig,
    LatentAttentionConfig,
    ModelConfig,
    MoEConfig,
)
from kernjax.model.config_fields import Fields

_ONLY_VALUES: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "mla_use_nope": (True, None),  # transformers' class has no other
    "moe_router_activation_func": (SIGMOID, None),
    "n_group": (1, None),
    "num_expert_group": (1, None),
    "num_nextn_predict_layers": (0, None),
    "topk_group": (1, None),
    "topk_method": ("noaux_tc", None),
}
# The norms of the latents have their class's own epsilon in the vendor's code; vLLM gives them
# rms_norm_eps.
_LATENT_NORM_EPS = 1e-6

# One field by the names that published files and transformers have for it.
_MAX_POSITIONS = ("max_position_embeddings", "model_max_length")
_CHOSEN = ("num_experts_per_token", "num_experts_per_tok")
_NUM_EXPERTS = ("num_experts", "num_local_experts")
_SHARED = ("num_shared_experts", "n_shared_experts")
_NORMALISE = ("moe_renormalize", "norm_topk_prob")


def parse(fields: Fields, model_type: str) -> ModelConfig:
    fields.only(_ONLY_VALUES)
    num_layers = fields.whole("num_hidden_layers")
    heads = fields.whole("num_attention_heads")
    if fields.config.get("num_key_value_heads") not in (heads, None):
        raise fields.bad(
            "num_key_value_heads",
            fields.config["num_key_value_heads"],
            f"num_attention_heads ({heads}): each head of latent attention has its own",
        )
    linear = _Linear(fields)
    moe_layers = _moe_layers(fields, num_layers)
    latent = _latent(fields)
    activation, betas = _activation(fields)
    return ModelConfig(
        model_type=model_type,
        vocab_size=fields.whole("vocab_size"),
        hidden_size=fields.whole("hidden_size"),
        num_layers=num_layers,
        layer_types=_layer_types(fields, linear.lists, num_layers),
        intermediate_size=fields.whole("intermediate_size"),
        hidden_act=activation,
        num_heads=heads,
        num_kv_heads=1,  # as cached: one latent
        head_dim=latent.nope_dim + latent.rope_dim,
        rotary_dim=0,
        rope_theta=1.0,
        attn_output_gate=latent.output_gate,
        linear_key_heads=linear.heads,
        linear_value_heads=linear.heads,
        linear_key_dim=linear.dim,
        linear_value_dim=linear.dim,
        conv_kernel=linear.kernel,
        rms_norm_eps=fields.real("rms_norm_eps"),
        max_position_embeddings=_either(fields, _MAX_POSITIONS, fields.whole),
        tie_word_embeddings=fields.tied(),
        dtype=fields.dtype(),
        moe=_moe(fields) if moe_layers else None,
        moe_layers=moe_layers,
        delta=linear.delta,
        latent=latent,
        block_size=_optional(fields, "attn_res_block_size"),
        situ_betas=betas,
        zero_centred=False,
    )


class _Linear:
    """The delta rule's sizes, and the lists of layers, of `linear_attn_config` or flat fields."""

    def __init__(self, fields: Fields) -> None:
        nested = fields.config.get("linear_attn_config")
        if nested is None:
            self.lists = None
            self.heads = fields.whole("linear_num_heads")
            self.dim = fields.whole("linear_head_dim")
            self.kernel = fields.whole("linear_conv_kernel_dim")
            self.delta = KimiDeltaConfig(lower_bound=None, full_rank_gate=False)
            return
        if not isinstance(nested, Mapping):
            raise fields.error(f"linear_attn_config={nested!r}", "an object")
        inside = Fields(nested, f"{fields.artefact}: linear_attn_config")
        self.heads = inside.whole("num_heads")
        self.dim = inside.whole("head_dim")
        self.kernel = inside.whole("short_conv_kernel_size")
        self.lists = inside
        self.delta = KimiDeltaConfig(
            lower_bound=_lower_bound(inside), full_rank_gate=_flag(inside, "use_full_rank_gate")
        )


def _lower_bound(inside: Fields) -> float | None:
    value = inside.config.get("gate_lower_bound")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not -math.inf < value < 0:
        raise inside.bad("gate_lower_bound", value, "a number below 0, or null")
    return float(value)


def _latent(fields: Fields) -> LatentAttentionConfig:
    return LatentAttentionConfig(
        kv_rank=fields.whole("kv_lora_rank"),
        query_rank=_optional(fields, "q_lora_rank"),
        nope_dim=fields.whole("qk_nope_head_dim"),
        rope_dim=fields.whole("qk_rope_head_dim"),
        value_dim=fields.whole("v_head_dim"),
        output_gate=_flag(fields, "mla_use_output_gate"),
        norm_eps=_LATENT_NORM_EPS,
    )


def _activation(fields: Fields) -> tuple[str, tuple[float, float | None]]:
    """(name, betas of SiTU)."""
    name = fields.config.get("hidden_act")
    if name == SILU:
        return SILU, (1.0, None)
    if name != SITU:
        raise fields.bad("hidden_act", name, f"{SILU!r} or {SITU!r}, the activations implemented")
    beta = fields.real("activation_situ_beta")
    linear = fields.config.get("activation_situ_linear_beta")
    return SITU, (beta, None if linear is None else fields.real("activation_situ_linear_beta"))


def _moe(fields: Fields) -> MoEConfig:
    size = fields.whole("moe_intermediate_size")
    shared = fields.config.get(_present(fields, _SHARED), 0)
    return MoEConfig(
        num_experts=_either(fields, _NUM_EXPERTS, fields.whole),
        experts_per_token=_either(fields, _CHOSEN, fields.whole),
        expert_size=size,
        scoring=SIGMOID,
        correction_bias=True,
        normalise=_flag(fields, _present(fields, _NORMALISE), absent=None),
        scaling=fields.real("routed_scaling_factor"),
        float32_router=True,
        shared_size=size * _either(fields, _SHARED, fields.whole) if shared else 0,
        latent_size=_optional(fields, "routed_expert_hidden_size"),
        latent_norm=_flag(fields, "latent_moe_use_norm"),
    )


def _moe_layers(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """Layers, from 0, with experts: all from first_k_dense_replace on, every moe_layer_freq-th."""
    kinds = fields.config.get("mlp_layer_types")
    first = fields.config.get("first_k_dense_replace")
    if kinds is None and first is None:
        raise fields.error(
            "fields first_k_dense_replace and mlp_layer_types are missing", "one of them"
        )
    listed = derived = None
    if kinds is not None:
        _check_list(fields, "mlp_layer_types", kinds, ("dense", "sparse"), num_layers)
        listed = tuple(i for i, kind in enumerate(kinds) if kind == "sparse")
    if first is not None:
        if type(first) is not int or first < 0:
            raise fields.bad("first_k_dense_replace", first, "a whole number of layers")
        step = 1 if fields.config.get("moe_layer_freq") is None else fields.whole("moe_layer_freq")
        derived = tuple(i for i in range(first, num_layers) if i % step == 0)
    if None not in (listed, derived) and listed != derived:
        raise fields.error(
            f"mlp_layer_types has experts in layers {_from_one(listed)}, but"
            f" first_k_dense_replace={first} in layers {_from_one(derived)} (from 1)",
            "one answer",
        )
    return derived if listed is None else listed


def _layer_types(fields: Fields, lists: Fields | None, num_layers: int) -> tuple[str, ...]:
    given = fields.config.get("layer_types")
    if given is not None:
        _check_list(fields, "layer_types", given, (LINEAR, FULL), num_layers)
        given = tuple(given)
    names = ("full_attn_layers", "kda_layers")
    if lists is None or all(lists.config.get(name) is None for name in names):
        if given is None:
            raise fields.error(
                "layers are listed neither in linear_attn_config nor in layer_types", "one of both"
            )
        return given
    full, linear = (_numbers(lists, name, num_layers) for name in names)
    both, neither = full & linear, set(range(1, num_layers + 1)) - full - linear
    if both or neither:
        raise lists.error(
            "of full_attn_layers and kda_layers "
            + " and ".join(
                f"{what} has layer {', '.join(map(str, sorted(layers)))}"
                for what, layers in (("both", both), ("neither", neither))
                if layers
            ),
            f"each layer of 1 to {num_layers} in one of them",
        )
    listed = tuple(FULL if layer + 1 in full else LINEAR for layer in range(num_layers))
    if given is not None and given != listed:
        raise fields.error(
            f"layer_types has attention in layers {_from_one(_full(given))}, but"
            f" linear_attn_config in layers {_from_one(_full(listed))} (from 1)",
            "one answer",
        )
    return listed


def _numbers(lists: Fields, name: str, num_layers: int) -> set[int]:
    value = lists.config.get(name)
    if not isinstance(value, list | tuple) or not all(type(layer) is int for layer in value):
        raise lists.bad(name, value, "a list of layers, counted from 1")
    beyond = [layer for layer in value if not 1 <= layer <= num_layers]
    if beyond or len(set(value)) != len(value):
        raise lists.error(
            f"{name} has layer {beyond[0]}" if beyond else f"{name} has a layer twice",
            f"layers, counted from 1 to num_hidden_layers={num_layers}",
        )
    return set(value)


def _check_list(
    fields: Fields, name: str, value: Any, allowed: tuple[str, str], num_layers: int
) -> None:
    if not isinstance(value, list | tuple):
        raise fields.error(f"{name}={value!r}", "a list")
    unknown = sorted({repr(kind) for kind in value if kind not in allowed})
    if unknown:
        raise fields.error(f"{name} holds {', '.join(unknown)}", " or ".join(allowed))
    if len(value) != num_layers:
        raise fields.error(
            f"{name} has {len(value)} entries but num_hidden_layers={num_layers}",
            "one entry per layer",
        )


def _full(layer_types: tuple[str, ...]) -> tuple[int, ...]:
    return tuple(i for i, kind in enumerate(layer_types) if kind == FULL)


def _from_one(layers: tuple[int, ...] | None) -> str:
    return ", ".join(str(layer + 1) for layer in layers or ()) or "none"


def _optional(fields: Fields, name: str) -> int | None:
    return None if fields.config.get(name) is None else fields.whole(name)


def _flag(fields: Fields, name: str, *, absent: bool | None = False) -> bool:
    """A truth value, `absent` where the field is not there; None: then it is an error."""
    value = fields.config.get(name)
    value = absent if value is None else value
    if not isinstance(value, bool):
        raise fields.bad(name, value, "true or false")
    return value


def _present(fields: Fields, names: tuple[str, ...]) -> str:
    """The first of a field's names that the config has, or its first."""
    return next((name for name in names if fields.config.get(name) is not None), names[0])


def _either(fields: Fields, names: tuple[str, ...], read: Any) -> Any:
    """One field that has several names; two values are an error."""
    found = {name: read(name) for name in names if fields.config.get(name) is not None}
    if len(set(found.values())) > 1:
        raise fields.error(" but ".join(f"{k}={v}" for k, v in found.items()), "one value")
    return next(iter(found.values())) if found else read(names[0])

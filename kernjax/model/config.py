"""The architecture of a checkpoint, read from its HF `config.json`; nothing is guessed.

Known `model_type`s: `qwen3_5` (the multimodal wrapper; its `text_config` is read) and
`qwen3_5_text`: dense hybrids of gated delta net and gated attention (Qwen3.5, 3.6, 3.8);
`qwen3_5_moe` (wrapper), `qwen3_5_moe_text` and `qwen3_next`: the same with mixtures of experts.

The defaults of the transformers classes differ from the published values (hidden size, layers,
heads, rope theta), so a needed field that is absent is an error that names it. A field that would
change the computation in a way that is not implemented here is an error too, never ignored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernjax.base.errors import UserError

LINEAR = "linear_attention"
FULL = "full_attention"

# Stacks of layers that have the same parameters, and the kind of their mixer.
STACKS = {"linear": LINEAR, "full": FULL, "linear_moe": LINEAR, "full_moe": FULL}

SOFTMAX, SIGMOID = "softmax", "sigmoid"

QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT = "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"

# Multimodal wrappers, and the model_type of the text_config inside.
WRAPPERS = {"qwen3_5": QWEN3_5, "qwen3_5_moe": QWEN3_5_MOE}
MODEL_TYPES = ("qwen3_5", QWEN3_5, "qwen3_5_moe", QWEN3_5_MOE, QWEN3_NEXT)
CHECKPOINT_DTYPES = ("bfloat16", "float16", "float32")

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
    def linear_layers(self) -> tuple[int, ...]:
        """Indices of the gated delta net layers."""
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
            return _parse(_Fields(config, artefact), model_type)
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
        return _parse(_Fields(text, artefact, outer=config), inside)


def read_config_json(directory: str | Path) -> dict[str, Any]:
    """The parsed `config.json` of an HF directory."""
    directory = Path(directory)
    path = directory / "config.json"
    if not directory.is_dir():
        raise UserError(
            f"--model directory {directory} "
            + ("is not a directory." if directory.exists() else "does not exist."),
            "Expected an HF directory (config.json and safetensors).",
        )
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UserError(
            f"{directory} has no config.json.",
            "Expected an HF directory (config.json and safetensors).",
            "Download the whole checkpoint.",
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} could not be read as JSON: {error}.", "", "Download config.json again."
        ) from None
    if not isinstance(config, dict):
        raise UserError(f"{path} holds a JSON {type(config).__name__}.", "Expected an object.")
    return config


class _Fields:
    """Typed access to a config's fields; every refusal names the field and the file."""

    def __init__(
        self, config: Mapping[str, Any], artefact: str, outer: Mapping[str, Any] | None = None
    ) -> None:
        self.config, self.artefact, self.outer = config, artefact, outer or {}

    def error(self, found: str, expected: str) -> UserError:
        return UserError(
            f"{self.artefact}: {found}.", f"Expected {expected}.", "Defaults are never assumed."
        )

    def whole(self, name: str) -> int:
        value = self.config.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise self._bad(name, value, "a positive whole number")
        return value

    def real(self, name: str, source: Mapping[str, Any] | None = None) -> float:
        value = (self.config if source is None else source).get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._bad(name, value, "a positive number")
        if not (math.isfinite(value) and value > 0):
            raise self._bad(name, value, "a positive number")
        return float(value)

    def _bad(self, name: str, value: Any, expected: str) -> UserError:
        found = f"field {name} is missing" if value is None else f"{name}={value!r}"
        return self.error(found, f"{name} to be {expected}")

    def shared(self, *names: str) -> Any:
        """A field that the wrapper may hold at its top level, or in text_config, or in both."""
        found = {
            f"{where}{name}": source[name]
            for where, source in (("text_config.", self.config), ("top-level ", self.outer))
            for name in names
            if source.get(name) is not None
        }
        if len(set(map(repr, found.values()))) > 1:
            raise self.error(" but ".join(f"{k}={v!r}" for k, v in found.items()), "one value")
        return next(iter(found.values()), None)


def _parse(fields: _Fields, model_type: str) -> ModelConfig:
    for name, allowed in (_ONLY_VALUES | _ONLY_VALUES_OF[model_type]).items():
        if name in fields.config and fields.config[name] not in allowed:
            raise UserError(
                f"{fields.artefact}: {name}={fields.config[name]!r} is not implemented.",
                f"Implemented: {' or '.join(map(repr, allowed))}.",
            )
    hidden_act = fields.config.get("hidden_act")
    if hidden_act != "silu":
        raise fields._bad("hidden_act", hidden_act, "'silu', the only activation implemented")

    tie = fields.shared("tie_word_embeddings")
    if not isinstance(tie, bool):
        raise fields._bad("tie_word_embeddings", tie, "true or false")
    dtype = fields.shared("dtype", "torch_dtype")
    if dtype not in CHECKPOINT_DTYPES:
        raise fields._bad("dtype", dtype, f"one of {', '.join(CHECKPOINT_DTYPES)}")

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
        tie_word_embeddings=tie,
        dtype=dtype,
        moe=moe,
        moe_layers=moe_layers,
    )


def _moe(
    fields: _Fields, model_type: str, num_layers: int
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
            raise fields._bad("norm_topk_prob", normalise, "true or false")
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


def _rope(fields: _Fields) -> tuple[float, float]:
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


def _layer_types(fields: _Fields, num_layers: int) -> tuple[str, ...]:
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
            c.rotary_dim <= 0 or c.rotary_dim % 2 != 0 or c.rotary_dim > c.head_dim,
            f"rotary dimension {c.rotary_dim} (head_dim={c.head_dim} x partial_rotary_factor)",
            "an even number, at least 2 and at most head_dim",
        ),
    ]
    for wrong, found, expected in problems:
        if wrong:
            raise UserError(f"Inconsistent model config: {found}.", f"Expected {expected}.")

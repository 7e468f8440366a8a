"""The record of a precision policy, and the table of its fields by their names on a command line.

`LayerPolicy` says, for one layer, to which format every tensor is rounded and what else changes
bits. `FIELDS` lists its leaves in reading order (`attention.p`, `delta_rule.state`, ...): the
grammar, manifests, differences and error messages all go through it.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Iterable
from typing import Any

from kernjax.base.errors import UserError
from pallas_kernels.attention.formats import AttentionFormats
from pallas_kernels.delta_rule.formats import DeltaRuleFormats
from pallas_kernels.formats import F32, Format

Value = Format | str | int | float


@dataclasses.dataclass(frozen=True)
class KVCacheFormats:
    """How keys and values lie in the cache: round_k(k / k_scale), read back times k_scale."""

    k: Format = F32
    v: Format = F32
    k_scale: float = 1.0
    v_scale: float = 1.0


@dataclasses.dataclass(frozen=True)
class Implementations:
    """Which implementation computes each op; "auto" is the platform's usual one."""

    attention_prefill: str = "auto"
    attention_decode: str = "auto"
    delta_rule_chunked: str = "auto"
    delta_rule_recurrent: str = "auto"


@dataclasses.dataclass(frozen=True)
class LayerPolicy:
    """What one layer rounds, and how; hashable, so that equal layers compile once.

    - activations: every tensor between ops (projections, norms, residual stream).
    - weights: the matrices as multiplied. logits: the output of lm_head.
    - attention, delta_rule: the rounding sites inside these ops, as their own records list them.
      float32 means "as it arrives": attention.q in a bf16 policy is bf16 already.
    - qk (field delta_rule.qk): l2-normalised q and k, which enter the delta rule.
    - conv: the causal convolution: its sum, its silu and the window it keeps.
    - dot: "highest", or "default": one bf16 pass, what a TPU does to float32 operands.
    - dequantise: when the weights of a quantised checkpoint become values: "load", or "layer" by
      layer as they are used, quantised in memory. The same bits.
    - prefill_window: tokens a prefill call takes; states are stored between windows.
    """

    activations: Format = F32
    weights: Format = F32
    dequantise: str = "load"
    logits: Format = F32
    attention: AttentionFormats = AttentionFormats()
    kv_cache: KVCacheFormats = KVCacheFormats()
    qk: Format = F32
    delta_rule: DeltaRuleFormats = DeltaRuleFormats()
    conv: Format = F32
    dot: str = "highest"
    prefill_window: int = 2048
    implementations: Implementations = Implementations()

    def implementation(self, op: str) -> str | None:
        """The implementation to ask `op` ("attention.prefill") for; None: the platform's."""
        name = getattr(self.implementations, op.replace(".", "_"))
        return None if name == "auto" else name


@dataclasses.dataclass(frozen=True)
class Field:
    """One leaf of the record: its name, where it is, what values it takes."""

    name: str
    path: tuple[str, ...]
    parse: Callable[[str], Value]
    per_layer: bool = True

    def get(self, policy: LayerPolicy) -> Value:
        value: Any = policy
        for attribute in self.path:
            value = getattr(value, attribute)
        return value

    def set(self, policy: Any, value: Value) -> Any:
        """`policy` with this field at `value`; ValueError where the record refuses it."""
        owner, *rest = self.path
        if not rest:
            return dataclasses.replace(policy, **{owner: value})
        record = dataclasses.replace(getattr(policy, owner), **{rest[0]: value})
        return dataclasses.replace(policy, **{owner: record})


def show(value: Value) -> str:
    """A value as it is written on a command line; `Field.parse` reads it back exactly."""
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)


def _choice(*allowed: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in allowed:
            raise ValueError(f"expected one of {', '.join(allowed)}{nearest(text, allowed)}")
        return text

    return parse


def _whole(*allowed: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < 1 or (allowed and int(text) not in allowed):
            choices = f"one of {', '.join(map(str, allowed))}" if allowed else "a whole number >= 1"
            raise ValueError(f"expected {choices}")
        return int(text)

    return parse


def _number(zero_allowed: bool) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not (math.isfinite(number) and (number > 0 or zero_allowed and number == 0)):
            raise ValueError(f"expected a finite number {'>=' if zero_allowed else '>'} 0")
        return number

    return parse


_DOT = _choice("highest", "default")
# The file names of pallas_kernels' backends; an op that lacks one says so when it is asked for it.
_IMPLEMENTATION = _choice(
    "auto", "reference", "xla", "mosaic_tpu", "mosaic_tpu_interpret", "mosaic_gpu",
    "mosaic_gpu_interpret",
)  # fmt: skip
_NOT_FORMATS: dict[str, Callable[[str], Value]] = {
    "attention.row_sum": _choice("unrounded", "rounded"),
    "attention.rescale_threshold": _number(zero_allowed=True),
    "attention.block_k": _whole(),
    "attention.dot": _DOT,
    "kv_cache.k_scale": _number(zero_allowed=False),
    "kv_cache.v_scale": _number(zero_allowed=False),
    "delta_rule.chunk": _whole(16, 32, 64, 128),
    "delta_rule.dot": _DOT,
    "dequantise": _choice("load", "layer"),
    "dot": _DOT,
    "prefill_window": _whole(),
}
# One checkpoint is held in one format; logits and windows belong to the model, not to a layer.
_WHOLE_MODEL = ("weights", "dequantise", "logits", "prefill_window")


def _fields() -> dict[str, Field]:
    paths: dict[str, tuple[str, ...]] = {}
    for owner in dataclasses.fields(LayerPolicy):
        if owner.name == "qk":
            paths["delta_rule.qk"] = ("qk",)
        elif owner.name == "implementations":
            for op in dataclasses.fields(Implementations):
                # attention_prefill -> attention.prefill, delta_rule_chunked -> delta_rule.chunked
                name = ".".join(op.name.rsplit("_", 1))
                paths[f"{name}.implementation"] = (owner.name, op.name)
        elif dataclasses.is_dataclass(owner.default) and not isinstance(owner.default, Format):
            for leaf in dataclasses.fields(owner.default):
                paths[f"{owner.name}.{leaf.name}"] = (owner.name, leaf.name)
        else:
            paths[owner.name] = (owner.name,)

    def parser(name: str) -> Callable[[str], Value]:
        if name.endswith(".implementation"):
            return _IMPLEMENTATION
        return _NOT_FORMATS.get(name, Format.parse)

    return {
        name: Field(name, path, parser(name), name not in _WHOLE_MODEL)
        for name, path in paths.items()
    }


FIELDS: dict[str, Field] = _fields()


def field(name: str) -> Field:
    """The field of that name; UserError with the nearest spelling and the whole list."""
    if name not in FIELDS:
        raise UserError(
            f"Policy field {name!r} does not exist.",
            f"Fields: {', '.join(FIELDS)}.",
            nearest(name, FIELDS, "Did you mean {}?"),
        )
    return FIELDS[name]


def nearest(word: str, known: Iterable[str], sentence: str = "; did you mean {}?") -> str:
    """`sentence` with the known word closest to `word`, or nothing where none is close."""
    close = difflib.get_close_matches(word.lower(), list(known), n=1, cutoff=0.5)
    return sentence.format(repr(close[0])) if close else ""

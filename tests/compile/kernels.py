"""The kernels of `arg_specs` as functions of their arrays, for compiling without running."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from pallas_kernels import arg_specs, attention, delta_rule
from pallas_kernels.attention import AttentionFormats
from pallas_kernels.attention import mosaic_tpu as attention_tpu
from pallas_kernels.attention.tiles import choose_tpu
from pallas_kernels.delta_rule import DeltaRuleFormats
from pallas_kernels.delta_rule import mosaic_tpu as delta_rule_tpu
from pallas_kernels.formats import BF16, E4M3_448, F32

P_FORMATS = {"p=bf16": BF16, "p=fp8*448": E4M3_448, "p=f32": F32}
# Float32 P and fp8 P are other programs; one width each of 64, 128, 192 and 256 shows them.
_ALL_FORMATS = ("qwen3.8-27b_prefill", "qwen3.8-27b_decode", "kimi-linear_prefill", "demo_prefill")
_ALL_FORMATS += ("public_d128_prefill", "qwen3.8-27b_decode_fp8_cache")


class Compilable(NamedTuple):
    name: str  # spec, and the format where it matters
    op: str
    tiles: dict[str, Any]
    function: Callable[..., Any]
    avals: tuple[Any, ...]
    heads_first: tuple[int, ...] = ()  # as in `topology.compile_for`


def compilables(op: str) -> Iterator[Compilable]:
    """Everything of `op`, "attention" or "delta_rule", that has to compile for every TPU."""
    yield from {"attention": _attention, "delta_rule": _delta_rule}[op]()


def _attention() -> Iterator[Compilable]:
    for name, spec in arg_specs.ATTENTION.items():
        for label, p in P_FORMATS.items():
            if label != "p=bf16" and name not in _ALL_FORMATS:
                continue
            arguments = spec.arguments()
            formats = AttentionFormats(q=BF16, p=p)

            def call(q, k, v, q_offset, kv_length, formats=formats):
                return attention_tpu.attention(
                    q, k, v, q_offset=q_offset, kv_length=kv_length, k_scale=0.5, formats=formats
                )

            tiles = attention.describe(
                spec.op, *(arguments[x] for x in "qkv"), formats=formats,
                implementation="mosaic_tpu_interpret",
            )["tiles"]  # fmt: skip
            avals = tuple(arguments.values())
            case = Compilable(f"{name} {label}", f"attention.{spec.op}", tiles, call, avals)
            yield case
            if case.name == "qwen3.8-27b_decode p=bf16":
                yield case._replace(name="qwen3.8-27b_decode heads first", heads_first=(1, 2))
    yield from _fp8_cast()


def _fp8_cast() -> Iterator[Compilable]:
    """e4m3 P by the chip's own conversion, which is TPU7x's alone and spelled out elsewhere."""
    formats = AttentionFormats(q=BF16, p=E4M3_448)
    arguments = arg_specs.ATTENTION["public_d128_prefill"].arguments()
    q, k = arguments["q"], arguments["k"]
    tiles = choose_tpu(q, k, formats, "TPU7x")

    def call(q, k, v, q_offset, kv_length):
        return attention_tpu.attention(
            q, k, v, q_offset=q_offset, kv_length=kv_length, formats=formats, tiles=tiles
        )

    avals = tuple(arguments.values())
    fields = dataclasses.asdict(tiles)
    yield Compilable("public_d128_prefill fp8 cast", "attention.prefill", fields, call, avals)


def _delta_rule() -> Iterator[Compilable]:
    formats = DeltaRuleFormats()
    for name, spec in arg_specs.DELTA_RULE.items():
        arguments = spec.arguments()
        call = functools.partial(
            getattr(delta_rule_tpu, spec.op), lengths=None, scale=spec.key_dim**-0.5,
            formats=formats,
        )  # fmt: skip
        tiles = delta_rule.describe(
            spec.op, *(arguments[x] for x in ("q", "k", "v", "g", "beta")), formats=formats,
            implementation="mosaic_tpu_interpret",
        )["tiles"]  # fmt: skip
        yield Compilable(name, f"delta_rule.{spec.op}", tiles, call, tuple(arguments.values()))

"""The parity table: what the tests measured, printed at the end of the run (see conftest.py)."""

from __future__ import annotations

import numpy as np

from .trace import Difference

LIMIT_F32 = 1e-4
"""Largest absolute difference of logits, and of anything kept between calls."""

LIMIT_KL_RATIO = 2.0
"""Our bf16 against the vendor's, over the vendor's own eager against sdpa."""

_f32: list[tuple[str, str, Difference]] = []
_bf16: list[tuple[str, str, np.ndarray, np.ndarray]] = []
_layers: list[tuple[str, str, str, list[float]]] = []


def note_f32(case: str, run: str, found: Difference) -> None:
    _f32.append((case, run, found))


def note_bf16(case: str, what: str, kls: np.ndarray, normal: np.ndarray) -> None:
    """`kls` per position, and those of the vendor's eager against its sdpa on the same ones."""
    _bf16.append((case, what, kls, normal))


def note_layers(case: str, what: str, shares: dict[str, list[float]]) -> None:
    """`shares` as `equal_bits` gives them."""
    _layers.extend((case, what, kind, equal) for kind, equal in shares.items())


def run_name(window: int | None) -> str:
    return "whole prefill, decode" if window is None else f"windows of {window}, decode"


def equal_bits(
    outputs: list[tuple[str, np.ndarray]], expected: np.ndarray
) -> dict[str, list[float]]:
    """By kind of layer: the share of every layer's outputs that have exactly the vendor's value."""
    shares: dict[str, list[float]] = {}
    for (kind, output), want in zip(outputs, expected, strict=True):
        shares.setdefault(kind, []).append(float(np.mean(output == want)))
    return shares


def table() -> list[str]:
    """The lines of the table; none where nothing was measured."""
    lines = []
    if _f32:
        lines += [f"float32 against transformers (eager); allowed {LIMIT_F32:.0e}", ""]
        lines += [_row("case", "run", "|dlogit|", "|dstate|", "|dhidden|")]
        for case, run, d in _f32:
            numbers = (d.logits, d.state, max(d.hidden))
            lines.append(_row(case, run, *(f"{x:.1e}" for x in numbers)))
    if _bf16:
        lines += ["", "bfloat16: KL(transformers eager || ours), x = over KL(eager || sdpa)", ""]
        lines += [_row("case", "policy", "median", "mean", "max")]
        for case, what, kls, normal in _bf16:
            cells = [_against(f, kls, normal) for f in (np.median, np.mean, np.max)]
            lines.append(_row(case, what, *cells))
    if _layers:
        lines += ["", "bfloat16: outputs of one layer with the vendor's bits, on its inputs", ""]
        lines += [_row("case", "policy", "kind", "least", "most")]
        for case, what, kind, equal in _layers:
            cells = (kind.split("_")[0], f"{min(equal):.2%}", f"{max(equal):.2%}")
            lines.append(_row(case, what, *cells))
    return lines


def _row(case: str, run: str, *cells: str) -> str:
    return f"{case:<16} {run:<34}" + "".join(f"{cell:>17}" for cell in cells)


def _against(summary, kls: np.ndarray, normal: np.ndarray) -> str:
    return f"{summary(kls):.1e} x {summary(kls) / summary(normal):4.2f}"

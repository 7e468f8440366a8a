"""Which layers and which runs execute a rounding site: a site never executed is an error."""

from __future__ import annotations

from collections.abc import Iterable

from kernjax.precision.fields import FIELDS

KINDS = ("full_attention", "linear_attention")

# Read by the chunked rule only; the recurrent one has no such intermediate.
_CHUNKED_ONLY = frozenset(
    f"delta_rule.{site}"
    for site in "chunk_state state_operand h v_new inverse w u p g_cumsum chunk dot".split()
)


def kind_of(name: str) -> str | None:
    """The kind of layer that executes field `name`; None: every layer, or the model itself."""
    if name.startswith(("attention.", "kv_cache.")):
        return "full_attention"
    if name.startswith("delta_rule.") or name == "conv":
        return "linear_attention"
    return None


def executed_sites(layer_kinds: Iterable[str], *, windows: int, decode_steps: int) -> set[str]:
    """The fields a run executes: `windows` prefill calls per segment, then `decode_steps` tokens.

    windows: the most prefill windows any segment takes. The recurrent state's format counts only
    where a stored state is read again: in a second window, or in decode.
    """
    kinds = set(layer_kinds)
    if unknown := kinds - set(KINDS):
        raise ValueError(f"layer_kinds: {sorted(unknown)} are not among {KINDS}.")

    def executed(name: str) -> bool:
        kind = kind_of(name)
        if kind is not None and kind not in kinds:
            return False
        if name in _CHUNKED_ONLY or name in (
            "attention.prefill.implementation",
            "delta_rule.chunked.implementation",
        ):
            return windows >= 1
        if name in ("attention.decode.implementation", "delta_rule.recurrent.implementation"):
            return decode_steps >= 1
        if name == "delta_rule.state":
            return windows >= 2 or decode_steps >= 1
        return windows >= 1 or decode_steps >= 1

    return {name for name in FIELDS if executed(name)}

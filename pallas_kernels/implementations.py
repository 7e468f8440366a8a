"""Choosing one implementation of an op from its table, loudly.

A table is a dict: name -> function, all of one signature. The caller's `implementation` is a name
(it must run, or raise), a tuple of names (the first that accepts), or None (the platform's usual
ones, best first). An implementation refuses a case it cannot run by raising
`NotImplementedError(reason)` before it computes anything; no other exception is caught, so that a
bug never turns into a quiet change of kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

# The Pallas kernels have been interpreted and compiled, never run on a chip: until they have, a
# ground truth must not rest on them. By name they run.
PLATFORM_DEFAULTS: dict[str, tuple[str, ...]] = {
    "cpu": ("xla",),
    "gpu": ("xla", "mosaic_gpu"),
    "tpu": ("xla", "mosaic_tpu"),
}


def names_to_try(
    op: str, table: Mapping[str, Callable[..., Any]], implementation: str | tuple[str, ...] | None
) -> tuple[str, ...]:
    """The names of `table` that `implementation` stands for, in the order they are tried.

    ValueError for a name that is not in the table, and for an empty tuple.
    """
    if implementation is None:
        usual = PLATFORM_DEFAULTS.get(jax.default_backend(), ("xla",))
        names = tuple(name for name in usual if name in table)
    elif isinstance(implementation, str):
        names = (implementation,)
    elif isinstance(implementation, tuple) and implementation:
        names = implementation
    else:
        raise ValueError(
            f"{op}: {implementation=!r} must be None, one of {sorted(table)}, or a non-empty tuple"
            " of these."
        )
    for name in names:
        if name not in table:
            raise ValueError(f"{op}: implementation {name!r} is not one of {sorted(table)}.")
    return names


def run_first(
    op: str,
    table: Mapping[str, Callable[..., Any]],
    implementation: str | tuple[str, ...] | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """What the first accepting implementation returns for `*args, **kwargs`.

    NotImplementedError when the one named implementation refuses; ExceptionGroup of every reason
    when all of several (or of the platform's usual ones) refuse.
    """
    if isinstance(implementation, str):
        (name,) = names_to_try(op, table, implementation)
        return table[name](*args, **kwargs)
    refusals: list[Exception] = []
    for name in names_to_try(op, table, implementation):
        try:
            return table[name](*args, **kwargs)
        except NotImplementedError as refusal:
            refusal.add_note(f"refused by implementation {name!r} of {op}")
            refusals.append(refusal)
    if not refusals:
        raise NotImplementedError(
            f"{op}: no implementation for platform {jax.default_backend()!r}; the table has"
            f" {sorted(table)}."
        )
    raise ExceptionGroup(f"{op}: every implementation refused", refusals)

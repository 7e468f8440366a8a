"""What an op would run: the implementation that accepts a call, and its tile configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from pallas_kernels import implementations


def describe(
    op: str,
    table: Mapping[str, Callable[..., Any]],
    choosers: Mapping[str, Callable[[], Any]],
    implementation: str | tuple[str, ...] | None,
    *args: Any,
    **kwargs: Any,
) -> dict[str, Any]:
    """{"implementation": name, "tiles": {field: value} or None}, for a recording's manifest.

    Nothing is computed: the arrays among the arguments may be `jax.ShapeDtypeStruct`. `choosers`
    gives, for the implementations that are tiled, what returns their tile record for this call;
    choosers and kernels see the same shapes, so that what is described is what runs. Raises as
    the call itself would.
    """
    is_array = [hasattr(value, "shape") for value in (*args, *kwargs.values())]
    values = (*args, *kwargs.values())
    arrays = [value for value, shaped in zip(values, is_array, strict=True) if shaped]
    accepted = []

    def call(*arrays: jax.Array) -> Any:
        given = iter(arrays)
        filled = [next(given) if shaped else v for v, shaped in zip(values, is_array, strict=True)]
        keywords = dict(zip(kwargs, filled[len(args) :], strict=True))
        return implementations.run_first(
            op, recorded, implementation, *filled[: len(args)], **keywords
        )

    def recording(name: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            out = table[name](*args, **kwargs)
            accepted.append(name)
            return out

        return run

    recorded = {name: recording(name) for name in table}
    jax.eval_shape(call, *arrays)
    (name,) = accepted
    tiles = dataclasses.asdict(choosers[name]()) if name in choosers else None
    return {"implementation": name, "tiles": tiles}

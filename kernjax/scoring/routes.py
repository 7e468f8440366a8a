"""Which experts a mixture sent tokens to: captured, kept in recordings, and forced from one.

A recording keeps them for its rows (`route_ids`, with `route_gaps`, how nearly to others), on
request those of every token too (`token_route_ids`): what another run needs to take the same ones.
That is k numbers of one or two bytes a layer and token, 0.3 KB for 40 layers of 8 and 2.9 KB for
Kimi K3's 92 of 16; the rows cost as much a row, and four bytes a layer more.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernjax.base.errors import UserError
from kernjax.model import ModelConfig, Routes
from kernjax.recording import Recording

ROUTE_IDS, ROUTE_GAPS, TOKEN_ROUTE_IDS = "route_ids", "route_gaps", "token_route_ids"
ROWS, ALL = "rows", "all"


def check_routes(config: ModelConfig, routes: str | None) -> None:
    """UserError where routes are asked for and the model has none."""
    if routes is not None and config.moe is None:
        raise UserError(
            f"There are no routes to record: a {config.model_type} model like this one has no"
            " mixture of experts.",
            todo="Drop --routes.",
        )


def route_extras(config: ModelConfig, routes: str | None) -> dict[str, dict[str, Any]]:
    """What a manifest declares for `routes`: None, "rows" or "all"."""
    if routes is None or config.moe is None:
        return {}
    layers, dtype = len(config.moe_layers), _dtype(config)
    ids = {"dtype": dtype, "shape": [layers, config.moe.experts_per_token]}
    declared = {ROUTE_IDS: ids, ROUTE_GAPS: {"dtype": "float32", "shape": [layers]}}
    return declared | ({TOKEN_ROUTE_IDS: {**ids, "per": "token"}} if routes == ALL else {})


def route_rows(
    routes: Routes, columns: jax.Array, config: ModelConfig, kept: str
) -> dict[str, jax.Array]:
    """A call's arrays: of its rows [B, R, ...], and with kept="all" of its tokens [B, T, ...].

    `routes` of [layers, B, T, ...]; columns int32 [B, R] are the tokens that are rows.
    """
    ids = jnp.moveaxis(routes.ids, 0, 2).astype(_dtype(config))
    gaps = jnp.moveaxis(routes.gaps, 0, 2)
    rows = {
        ROUTE_IDS: jnp.take_along_axis(ids, columns[:, :, None, None], axis=1),
        ROUTE_GAPS: jnp.take_along_axis(gaps, columns[:, :, None], axis=1),
    }
    return rows | ({TOKEN_ROUTE_IDS: ids} if kept == ALL else {})


def recorded_experts(recording: Recording, segment: str, config: ModelConfig) -> np.ndarray:
    """[context_len + score_len, layers, k]: the experts that a recording's tokens went to."""
    parts = recording.token_extras.get(TOKEN_ROUTE_IDS)
    if parts is None:
        raise UserError(
            f"Recording {recording.path} does not hold the experts of every token, and those of its"
            " rows do not settle what came before.",
            todo="Record it again with --routes=all.",
        )
    experts = parts[[one["id"] for one in recording.segments].index(segment)]
    expected = None
    if config.moe is not None:
        expected = (len(config.moe_layers), config.moe.experts_per_token)
    if experts.shape[1:] != expected or experts.max() >= config.moe.num_experts:
        raise UserError(
            f"Recording {recording.path} holds {experts.shape[2]} experts in each of"
            f" {experts.shape[1]} layers; this model "
            + (f"takes {expected[1]} in {expected[0]}." if expected else "has none."),
            "Expected a recording of the same architecture.",
        )
    return experts


def _dtype(config: ModelConfig) -> str:
    """The narrowest that holds an expert's number."""
    assert config.moe is not None
    return "uint8" if config.moe.num_experts <= 256 else "uint16"

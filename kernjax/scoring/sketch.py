"""A short fingerprint of the residual stream, so that two runs can be compared layer by layer.

Storing [layers, hidden] for every row would be a hundred times the recording. A fixed random
projection to 32 numbers keeps relative distances (Johnson-Lindenstrauss: within about
sqrt(2/32) = 25 % for one row, far better averaged over rows), and equal states have equal
sketches bit for bit.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

SKETCH_DIM = 32


def sketch(states: jax.Array) -> jax.Array:
    """states float32 [layers, B, ..., D] -> float32 [B, ..., layers, 32]."""
    dim = states.shape[-1]
    signs = np.random.default_rng(0).integers(0, 2, (dim, SKETCH_DIM)) * 2 - 1
    projection = jnp.asarray(signs / np.sqrt(SKETCH_DIM), jnp.float32)
    projected = jnp.einsum("...d,ds->...s", states, projection, precision=jax.lax.Precision.HIGHEST)
    return jnp.moveaxis(projected, 0, -2)

"""Keeps XLA's CPU backend from computing wrong sums (jaxlib below 0.12).

There a jitted `sum(c[:, None] * X, 0)` of a few thousand columns can come out as garbage, relative
error 1, when the product and the sum are fused into a YNNPACK call (jax-ml/jax issues 39103, 39257,
40412). Leaving reductions out of that fusion makes them right. XLA reads its flags once, when the
first backend starts, so this must happen on import; `sums_are_right` tells whether it did.
"""

from __future__ import annotations

import os
from importlib.metadata import version

_FLAG = "--xla_cpu_experimental_ynn_fusion_type"


def avoid_wrong_sums() -> None:
    """Adds the flag to XLA_FLAGS, unless somebody set it or jaxlib has no such bug."""
    major, minor = (int(part) for part in version("jaxlib").split(".")[:2])
    flags = os.environ.get("XLA_FLAGS", "")
    # Later versions may drop the flag, and XLA ends the process over one that it does not know.
    if (major, minor) < (0, 12) and _FLAG not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {_FLAG}=-reduce".strip()


def sums_are_right() -> bool:
    """Whether a jitted sum of products agrees with NumPy's float64 to float32 accuracy."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    rng = np.random.default_rng(0)
    c = rng.standard_normal((16, 4096), np.float32)
    x = rng.standard_normal((16, 16, 4096), np.float32)
    got = np.asarray(jax.jit(lambda c, x: jnp.sum(c[:, None] * x, axis=0))(c, x))
    truth = np.einsum("am,abm->bm", c.astype(np.float64), x.astype(np.float64))
    return bool(np.linalg.norm(got - truth) <= 1e-5 * np.linalg.norm(truth))

"""XLA's flags for CPUs: what keeps sums right, and what compiles and runs quicker.

Below jaxlib 0.12 a jitted `sum(c[:, None] * X, 0)` of a few thousand columns can come out as
garbage, relative error 1, when the product and the sum are fused into a YNNPACK call (jax-ml/jax
issues 39103, 39257, 40412). Leaving reductions out of that fusion makes them right.

What is left out then falls to jaxlib 0.10's newer emitters, which do not vectorise a maximum or a
sum along a row; its older ones do (attention of deep windows takes 0.6 of the time), and compile a
third quicker. Fewer, larger parts for LLVM save another sixth: each part costs some 20 ms.

XLA reads its flags once, when the first backend starts, so this must happen on import;
`sums_are_right` tells whether the first one did.
"""

from __future__ import annotations

import os
from importlib.metadata import version

# Flag, value, and the first jaxlib (major, minor) that needs or knows it no more: XLA ends the
# process over a flag that it does not know.
_FLAGS = (
    ("--xla_cpu_experimental_ynn_fusion_type", "-reduce", (0, 12)),
    ("--xla_cpu_use_fusion_emitters", "false", (0, 11)),
    ("--xla_cpu_parallel_codegen_split_count", "4", (0, 11)),
)


def set_flags() -> None:
    """Adds to XLA_FLAGS what this jaxlib needs and nobody has set."""
    major, minor = (int(part) for part in version("jaxlib").split(".")[:2])
    flags = os.environ.get("XLA_FLAGS", "")
    added = [
        f"{name}={value}"
        for name, value, until in _FLAGS
        if (major, minor) < until and name not in flags
    ]
    if added:
        os.environ["XLA_FLAGS"] = " ".join([flags, *added]).strip()


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

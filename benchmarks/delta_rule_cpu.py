"""Chunked delta rule against the token scan, side by side in one run on this machine.

  python benchmarks/delta_rule_cpu.py [--tokens=2048] [--repeats=5]

Prints, for each shape and gate, milliseconds of the token scan (one recurrence step per scan
iteration), of the chunked form at each chunk length, and how many times quicker the latter is.
Runs alternate, and the best of each is taken, so that other load on the machine hits both.
"""

from __future__ import annotations

import argparse
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import delta_rule
from pallas_kernels.delta_rule import DeltaRuleFormats, xla

SHAPES = {  # Hk, Hv, K, V
    "Hv=4 K=V=64": (4, 4, 64, 64),
    "Hv=6 Hk=2 K=V=64": (2, 6, 64, 64),
    "Hv=8 K=V=128": (8, 8, 128, 128),
}


def inputs(tokens: int, shape: tuple[int, int, int, int], per_channel: bool) -> list[np.ndarray]:
    """q, k, v, g, beta and a state, float32, batch 1."""
    key_heads, value_heads, key_dim, value_dim = shape
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, 1, tokens, key_heads, key_dim))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = rng.normal(size=(1, tokens, value_heads, value_dim))
    gate = (1, tokens, value_heads) + ((key_dim,) if per_channel else ())
    g = -0.05 * rng.exponential(size=gate)
    beta = rng.uniform(size=(1, tokens, value_heads))
    state = rng.normal(size=(1, value_heads, key_dim, value_dim))
    return [x.astype(np.float32) for x in (q, k, v, g, beta, state)]


def token_scan(q, k, v, g, beta, state):
    """The quickest token form here: decode's step under one scan."""
    return xla.recurrent(
        q, k, v, g, beta, state,
        lengths=None, scale=q.shape[-1] ** -0.5, formats=DeltaRuleFormats(),
    )  # fmt: skip


def best_times(functions: dict[str, jax.stages.Wrapped], args: list, repeats: int) -> dict:
    """Milliseconds of the best run of each, after one run that compiles."""
    best = {}
    for run in range(repeats + 1):
        for name, function in functions.items():
            start = time.perf_counter()
            jax.block_until_ready(function(*args))
            elapsed_ms = 1e3 * (time.perf_counter() - start)
            if run:
                best[name] = min(best.get(name, np.inf), elapsed_ms)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    functions = {"scan": jax.jit(token_scan)}
    for chunk in (16, 32, 64, 128):
        formats = DeltaRuleFormats(chunk=chunk)
        functions[f"C={chunk}"] = jax.jit(functools.partial(delta_rule.chunked, formats=formats))
    print(f"T={options.tokens}, {jax.devices()[0].device_kind}, jax {jax.__version__}")
    for name, shape in SHAPES.items():
        for per_channel in (False, True):
            args = [jnp.asarray(x) for x in inputs(options.tokens, shape, per_channel)]
            times = best_times(functions, args, options.repeats)
            scan = times.pop("scan")
            gate = "channel" if per_channel else "scalar"
            print(
                f"{name:18} {gate:8} scan {scan:8.1f} ms  "
                + "  ".join(f"{c} {t:6.1f} ms ({scan / t:4.1f}x)" for c, t in times.items()),
                flush=True,
            )


if __name__ == "__main__":
    main()

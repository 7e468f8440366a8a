"""Blockwise attention beside the dense reference on this CPU, in one run, printed as ratios.

  python benchmarks/attention_cpu.py [--cpu_time] [--only=prefill_2k,...]

Both sides alternate and the best of each counts. `GEMM` is the share of the float32 GEMM rate
(2048 x 2048, measured in the same run) that the useful arithmetic of the causal triangle reaches:
softmax, masks and the tiles cut by the diagonal count as waste. `bandwidth` (decode) is the share
of the rate at which this machine sums a large array. On a shared machine --cpu_time compares
processor seconds instead of wall time; read the ratios, not the rates.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import attention
from pallas_kernels.attention import AttentionFormats
from pallas_kernels.formats import BF16, E4M3_448

_BF16 = dict(q=BF16, k=BF16, v=BF16)
FORMATS = {
    "f32": AttentionFormats(),
    "bf16": AttentionFormats(**_BF16, p=BF16),
    "fp8*448": AttentionFormats(**_BF16, p=E4M3_448),
}
# name: (op, B, T, S, N, G, H, whether the dense reference fits)
CASES = {
    "prefill_2k": ("prefill", 1, 2048, 2048, 8, 2, 64, True),
    "prefill_window_8k": ("prefill", 1, 1024, 8192, 8, 2, 64, True),
    "prefill_batch": ("prefill", 8, 512, 4096, 2, 1, 64, True),
    "prefill_wide": ("prefill", 1, 1024, 4096, 8, 2, 256, True),
    "prefill_window_64k": ("prefill", 1, 1024, 65536, 4, 1, 64, False),
    "decode_8k": ("decode", 1, 1, 8192, 8, 2, 64, True),
    "decode_batch": ("decode", 16, 1, 2048, 2, 1, 64, True),
    "decode_wide": ("decode", 1, 1, 8192, 24, 4, 256, True),
}


def best(clock: Callable[[], float], calls: list[Callable[[], jax.Array]], rounds: int) -> list:
    """The shortest time of each call, alternating, after one call each to compile."""
    times = [float("inf")] * len(calls)
    for r in range(rounds + 1):
        for i, call in enumerate(calls):
            start = clock()
            jax.block_until_ready(call())
            if r:
                times[i] = min(times[i], clock() - start)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cpu_time", action="store_true", help="processor seconds, not wall time")
    parser.add_argument("--only", default=",".join(CASES), help="names of cases, comma separated")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    clock = time.process_time if args.cpu_time else time.perf_counter
    rng = np.random.default_rng(0)

    square = jnp.asarray(rng.standard_normal((2048, 2048), np.float32))
    large = jnp.ones(1 << 26, jnp.float32)
    matmul, total = jax.jit(jnp.matmul), jax.jit(jnp.sum)
    gemm, read = best(clock, [lambda: matmul(square, square), lambda: total(large)], args.rounds)
    gemm, read = 2 * 2048**3 / gemm, large.nbytes / read
    print(f"GEMM {gemm / 1e9:.0f} GFLOP/s, read {read / 1e9:.1f} GB/s")
    print(f"{'case':20}{'formats':10}{'ms':>9}{'x dense':>9}{'GEMM':>8}{'bandwidth':>11}")

    for name in args.only.split(","):
        op, B, T, S, N, G, H, fits = CASES[name]
        q = jnp.asarray(rng.standard_normal((B, T, N, H), np.float32))
        k, v = (jnp.asarray(rng.standard_normal((B, S, G, H), np.float32)) for _ in "kv")
        lengths = dict(q_offset=jnp.full(B, S - T, jnp.int32), kv_length=jnp.full(B, S, jnp.int32))
        function = jax.jit(getattr(attention, op), static_argnames=("formats", "implementation"))
        flops = 4 * H * B * N * T * (S - T + (T + 1) / 2)
        for label, formats in FORMATS.items():

            def call(implementation, formats, function=function, args=(q, k, v), lengths=lengths):
                return function(*args, **lengths, formats=formats, implementation=implementation)

            calls = [lambda f=formats, c=call: c("xla", f)]
            if fits:  # the plain float32 softmax, whatever our side rounds
                calls.append(lambda c=call: c("reference", FORMATS["f32"]))
            times = best(clock, calls, args.rounds)
            ratio = f"{times[1] / times[0]:.2f}" if fits else "-"
            share = f"{flops / times[0] / gemm:.0%}"
            traffic = f"{(k.nbytes + v.nbytes) / times[0] / read:.0%}" if op == "decode" else ""
            print(f"{name:20}{label:10}{times[0] * 1e3:9.1f}{ratio:>9}{share:>8}{traffic:>11}")


if __name__ == "__main__":
    main()

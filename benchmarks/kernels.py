"""Our TPU kernels beside the public ones, side by side in one run, as ratios: compiled, not run.

  python benchmarks/kernels.py [--ops attention,delta_rule] [--chips v5p,v6e] [--only TEXT]

Needs `pip install 'jax[tpu]'` and no TPU. For each kernel: static cycles, the time of its HBM
traffic in the same cycles, bundles, spill stores and VMEM from the compiler, and `x public`: cycles
over the best public kernel's of the same case, each being the larger of compute and traffic.
Cycle estimates are a guide, not a measurement. `-` is an estimate that the profiler refused.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import jax  # noqa: E402
from static_profile import CHIPS, profile  # noqa: E402

# Clock (GHz, inferred from the peaks) and HBM bytes per second of what runs one program.
CLOCK = {"v5e": 1.5e9, "v5p": 1.75e9, "v6e": 1.75e9, "tpu7x": 2.2e9}
HBM = {"v5e": 819e9, "v5p": 2765e9, "v6e": 1638e9, "tpu7x": 3685e9}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ops", default="attention,delta_rule")
    parser.add_argument("--chips", default="v5p,v6e")
    parser.add_argument("--only", default="", help="only cases that contain this")
    args = parser.parse_args()
    print(f"jax {jax.__version__}; compiled, not run")
    for op in args.ops.split(","):
        module = importlib.import_module(f"{op}_tpu")
        for case in module.CASES:
            if args.only not in case:
                continue
            for chip in args.chips.split(","):
                if chip not in CHIPS:
                    raise SystemExit(f"--chips: {chip!r} is not one of {', '.join(CHIPS)}.")
                _table(op, module, case, chip)


def _table(op, module, case: str, chip: str) -> None:
    flops, moved = module.work(case)
    traffic = moved / HBM[chip] * CLOCK[chip]
    names = module.contenders(case)
    found = {name: profile(f"{op}_tpu", case, name, chip) for name in names}
    bound = {
        name: max(result["cycles"], traffic) for name, result in found.items() if "cycles" in result
    }
    best = min((cycles for name, cycles in bound.items() if module.public(name)), default=None)
    print(f"\n{op} {case}, {chip}: {flops / 1e9:.1f} GFLOP, HBM {traffic:.0f} cycles")
    print(f"  {'':16}{'cycles':>9}{'bundles':>9}{'spills':>8}{'VMEM MiB':>10}{'x public':>10}")
    for name, result in found.items():
        ratio = f"{bound[name] / best:.2f}" if name in bound and best else "-"
        columns = [str(result.get(column, "-")) for column in ("cycles", "bundles", "spills")]
        vmem = f"{result['vmem'] / 2**20:.1f}" if "vmem" in result else "-"
        print(
            f"  {name:16}{columns[0]:>9}{columns[1]:>9}{columns[2]:>8}{vmem:>10}{ratio:>10}",
            flush=True,
        )


if __name__ == "__main__":
    main()

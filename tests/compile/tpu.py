"""Compiles every kernel of `arg_specs` with the real TPU compiler and prints what each takes.

  python -m tests.compile.tpu [--ops attention,delta_rule] [--chips v5e,v5p,v6e,tpu7x] [--only TEXT]

Needs `pip install 'jax[tpu]'` and no TPU. Compiled, not run: it shows that Mosaic takes the
program and that it fits, not that it is right or quick. A line a kernel and chip: seconds to
compile, vector memory (VMEM) it uses, and HBM taken besides arguments and results (a
transposed cache counts). Exit code 1 if anything fails to compile, or copies a cache that lies
as the kernel reads it.
"""

from __future__ import annotations

import argparse
import sys
import time

from tests.compile.topology import CHIPS, compile_for, quiet

quiet()

import re  # noqa: E402

import jax  # noqa: E402

from tests.compile.kernels import compilables  # noqa: E402

_NO_COPY = 16  # MiB: q, o and scalars in another layout, but no cache


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ops", default="attention,delta_rule")
    parser.add_argument("--chips", default=",".join(CHIPS))
    parser.add_argument("--only", default="", help="only names with one of these texts in them")
    args = parser.parse_args()
    print(f"jax {jax.__version__}; compiled, not run")
    print(f"{'kernel':52}{'chip':7}{'s':>6}{'VMEM MiB':>10}{'HBM MiB':>9}  tiles")
    failures = 0
    for op in args.ops.split(","):
        for case in compilables(op):
            if not any(text in case.name for text in args.only.split(",")):
                continue
            for chip in args.chips.split(","):
                start = time.perf_counter()
                label = f"{case.op.split('.')[0]} {case.name}"
                try:
                    compiled = compile_for(
                        chip, case.function, *case.avals, heads_first=case.heads_first
                    )
                except Exception as error:  # whatever the compiler says is the result
                    failures += 1
                    print(f"{label:52}{chip:7}FAILED: {' '.join(str(error).split())[:300]}")
                    continue
                seconds = time.perf_counter() - start
                spare = compiled.memory_analysis().temp_size_in_bytes / 2**20
                tiles = " ".join(f"{name}={value}" for name, value in case.tiles.items() if value)
                print(
                    f"{label:52}{chip:7}{seconds:6.1f}{_vmem(compiled):10.1f}{spare:9.1f}  {tiles}",
                    flush=True,
                )
                if case.heads_first and spare > _NO_COPY:
                    failures += 1
                    print(f"{label}: FAILED: a cache with its heads first is copied nevertheless")
    print(f"{failures} failed" if failures else "all compiled")
    return 1 if failures else 0


def _vmem(compiled: jax.stages.Compiled) -> float:
    """MiB of vector memory that the kernel uses: its blocks, state and temporaries."""
    used = re.findall(
        r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"\d+","size":"(\d+)"',
        "\n".join(line for line in compiled.as_text().splitlines() if "tpu_custom_call" in line),
    )
    return max(map(int, used)) / 2**20


if __name__ == "__main__":
    sys.exit(main())

"""Compiles the GPU kernels of `arg_specs` with the real GPU compiler, prints registers and spills.

  python -m tests.compile.gpu [--gpus h100,b200] [--only TEXT] [--all]

Needs no GPU, but jax's CUDA plugin and NVIDIA's assembler:
  pip install --no-deps jax-cuda13-plugin jax-cuda13-pjrt nvidia-cuda-nvcc nvidia-nvvm
Compiled, not run. Exit code 1 if anything fails to compile or spills registers.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
_DUMPS = tempfile.mkdtemp()
os.environ["MOSAIC_GPU_DUMP_TO"] = _DUMPS
os.environ["MOSAIC_GPU_DUMP_PTXAS"] = os.environ["MOSAIC_GPU_DUMP_RESOURCES"] = "1"

import jax  # noqa: E402
import numpy as np  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

from kernjax.planning.gpus import GPUS, target  # noqa: E402
from pallas_kernels.arg_specs import ATTENTION, DELTA_RULE  # noqa: E402
from pallas_kernels.attention import AttentionFormats  # noqa: E402
from pallas_kernels.attention import mosaic_gpu as attention_gpu  # noqa: E402
from pallas_kernels.attention.tiles import choose_gpu  # noqa: E402
from pallas_kernels.delta_rule import DeltaRuleFormats  # noqa: E402
from pallas_kernels.delta_rule import mosaic_gpu as delta_rule_gpu  # noqa: E402
from pallas_kernels.formats import BF16, E4M3_448, F32  # noqa: E402


def compile_for(gpu: str, function: Any, *avals: Any) -> list[str]:
    """Compiles for one device; the kernels' hashes. Raises what the compiler says."""
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="1x1x1", target_config=target(gpu), topology="1x1x1"
    )
    mesh = Mesh(np.array(topology.devices), ("x",))
    here = NamedSharding(mesh, PartitionSpec())
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(function, in_shardings=here, out_shardings=here).lower(*avals)
        lowered.compile()
    return re.findall(r'kernel_hash = "([^"]+)"', lowered.as_text())


def kernels(
    every: bool,
) -> Iterator[tuple[str, tuple[str, ...], Callable[..., Any], tuple[Any, ...]]]:
    """(name, GPUs it is for, function, argument shapes) of the kernels to compile.

    Attention specs with the same blocks, split or not, differ in the grid alone, and the first
    stands for them, unless it shall be `every` one.
    """
    for name, spec in DELTA_RULE.items():
        run = functools.partial(
            getattr(delta_rule_gpu, spec.op), lengths=None, scale=spec.key_dim**-0.5,
            formats=DeltaRuleFormats(),
        )  # fmt: skip
        yield name, tuple(GPUS), run, tuple(spec.arguments().values())
    blocks = set()
    for name, spec in ATTENTION.items():
        avals = tuple(spec.arguments().values())
        splits = choose_gpu(*avals[:3], AttentionFormats(q=BF16), "9.0").splits
        block = spec.width, spec.v_width, spec.op, splits > 1
        if block in blocks and not every:
            continue
        blocks.add(block)
        for label, p in (("bf16", BF16), ("fp8*448", E4M3_448), ("f32", F32), ("f32 lse", F32)):
            return_lse = label.endswith("lse")
            if return_lse and name != "qwen3.8-27b_prefill" and not every:
                continue
            formats = AttentionFormats(q=BF16, p=p, block_k=64)

            def attend(
                q, k, v, q_offset, kv_length, formats=formats, return_lse=return_lse, capability=""
            ):
                return attention_gpu.attention(
                    q, k, v, q_offset=q_offset, kv_length=kv_length, k_scale=0.5, formats=formats,
                    capability=capability, return_lse=return_lse,
                )  # fmt: skip

            for gpu in GPUS:
                run = functools.partial(attend, capability=f"{GPUS[gpu][1]}.0")
                yield f"{name} p={label}", (gpu,), run, avals


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", default="h100,b200")
    parser.add_argument("--only", default="", help="only names that contain this")
    parser.add_argument("--all", action="store_true", help="specs that differ in the grid too")
    args = parser.parse_args()
    if "," in args.gpus:
        # A process each: the compiler dumps a kernel once, whatever the device.
        command = [sys.executable, "-m", "tests.compile.gpu", "--only", args.only, "--gpus"]
        command[3:3] = ["--all"] * args.all
        return max(subprocess.run([*command, gpu]).returncode for gpu in args.gpus.split(","))
    print(f"jax {jax.__version__}; compiled, not run")
    print(f"{'kernel':40}{'gpu':6}{'s':>6}{'registers':>11}{'spill B':>9}{'shared B':>10}")
    failures, seen = 0, {}
    for name, made_for, run, avals in kernels(args.all):
        if args.only not in name:
            continue
        for gpu in set(args.gpus.split(",")) & set(made_for):
            for path in Path(_DUMPS).iterdir():
                path.unlink()
            start = time.perf_counter()
            hashes = compile_for(gpu, run, *avals)
            seconds = time.perf_counter() - start
            dumps = sorted(Path(_DUMPS).iterdir())
            kept = [p for p in dumps if p.suffix == ".ptxas" or "resources" in p.name]
            text = "\n".join(p.read_text(errors="replace") for p in kept)
            # Dumped once in a process: a cache in fp8 is cast before a kernel that was here.
            for one in hashes:
                text += seen.setdefault((gpu, one), text)
            registers = _largest(r"Used (\d+) registers", text)
            spills = _largest(r"(\d+) bytes spill stores", text)
            failures += spills is None or spills > 0
            shared = _largest(r"smem_scratch_bytes=(\d+)", text)
            print(
                f"{name:40}{gpu:6}{seconds:6.1f}{_shown(registers):>11}{_shown(spills):>9}"
                f"{_shown(shared):>10}",
                flush=True,
            )
    print(f"{failures} failed" if failures else "all compiled without spills")
    return 1 if failures else 0


def _largest(pattern: str, text: str) -> int | None:
    return max((int(x) for x in re.findall(pattern, text)), default=None)


def _shown(value: int | None) -> str:
    return "-" if value is None else str(value)


if __name__ == "__main__":
    sys.exit(main())

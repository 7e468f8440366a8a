"""Compiles the Mosaic GPU attention kernel with the real GPU compiler and prints what it takes.

  python -m tests.compile.gpu [--only TEXT]

Needs jax-cuda13-plugin, jax-cuda13-pjrt and ptxas (nvidia-cuda-nvcc, or a CUDA toolkit on the
PATH), and no GPU. Compiled for an H100, not run. A line a kernel: registers a thread, bytes of
spills, shared memory. Exit code 1 if anything fails to compile or spills.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
from pathlib import Path

_DUMP = tempfile.mkdtemp()
os.environ["MOSAIC_GPU_DUMP_TO"] = _DUMP
os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"
os.environ["MOSAIC_GPU_DUMP_RESOURCES"] = "1"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

from pallas_kernels.arg_specs import ATTENTION  # noqa: E402
from pallas_kernels.attention import AttentionFormats, mosaic_gpu  # noqa: E402
from pallas_kernels.attention.tiles import choose_gpu  # noqa: E402
from pallas_kernels.formats import BF16, E4M3_448, F32  # noqa: E402

# What the compiler has to know of the device: an H100 SXM.
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3350000000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 85899345920
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 0 patch: 0 }
runtime_version { major: 13 minor: 0 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
FORMATS = {"p=bf16": BF16, "p=fp8*448": E4M3_448, "p=f32": F32}
MODELS = ("qwen3.8-27b", "kimi-k3", "kimi-linear", "demo")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="only names that contain this")
    args = parser.parse_args()
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="1x1x1", target_config=H100, topology="1x1x1"
    )
    mesh = Mesh(np.array(topology.devices), ("x",))
    here = NamedSharding(mesh, PartitionSpec())
    print(f"jax {jax.__version__}, sm_90a; compiled, not run")
    print(f"{'kernel':46}{'s':>6}{'registers':>10}{'spills':>8}{'shared KiB':>11}  tiles")
    failures = 0
    for name, spec in ATTENTION.items():
        for label, p in FORMATS.items():
            if args.only not in f"{name} {label}" or not name.startswith(MODELS):
                continue
            arguments = spec.arguments()
            formats = AttentionFormats(q=BF16, p=p, block_k=64)
            tiles = choose_gpu(arguments["q"], arguments["k"], formats)

            def call(q, k, v, q_offset, kv_length, formats=formats):
                return mosaic_gpu.attention(
                    q, k, v, q_offset=q_offset, kv_length=kv_length, k_scale=jnp.float32(0.5),
                    formats=formats,
                )  # fmt: skip

            for old in Path(_DUMP).iterdir():
                old.unlink()
            start = time.perf_counter()
            try:
                with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                    jitted = jax.jit(call, in_shardings=here, out_shardings=here)
                    jitted.lower(*arguments.values()).compile()
            except Exception as error:  # whatever the compiler says is the result
                failures += 1
                print(f"{name + ' ' + label:46}FAILED: {' '.join(str(error).split())[:300]}")
                continue
            seconds = time.perf_counter() - start
            text = "\n".join(x.read_text(errors="replace") for x in Path(_DUMP).glob("*.ptxas"))
            registers = max(map(int, re.findall(r"Used (\d+) registers", text)), default=0)
            spills = max(map(int, re.findall(r"(\d+) bytes spill stores", text)), default=0)
            shared = max(map(int, re.findall(r"smem_scratch_bytes=(\d+)", _resources())), default=0)
            failures += spills > 0 or registers == 0
            print(
                f"{name + ' ' + label:46}{seconds:6.1f}{registers:10}{spills:8}"
                f"{shared / 1024:11.0f}"
                f"  heads={tiles.heads} block_q={tiles.block_q} block_k={tiles.block_k}",
                flush=True,
            )
    print(f"{failures} failed or spilled" if failures else "all compiled, none spilled")
    return 1 if failures else 0


def _resources() -> str:
    return "\n".join(
        path.read_text(errors="replace")
        for path in Path(_DUMP).iterdir()
        if "resource" in path.name
    )


if __name__ == "__main__":
    sys.exit(main())

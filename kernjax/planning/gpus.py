"""GPUs as compile targets: what NVIDIA's compiler has to be told of a device that is not there."""

from __future__ import annotations

# Name, compute capability, multiprocessors, memory bytes, bytes per second, L2 bytes, GHz.
GPUS = {
    "h100": ("NVIDIA H100 80GB HBM3", 9, 132, 80 * 2**30, 3350 * 10**9, 50 * 2**20, 1.98),
    "b200": ("NVIDIA B200", 10, 148, 180 * 2**30, 8000 * 10**9, 126 * 2**20, 1.965),
}


def target(gpu: str) -> str:
    """The GpuTargetConfig text that stands for the device, from its data sheet."""
    name, major, cores, memory, bandwidth, cache, clock = GPUS[gpu]
    return f"""gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472 core_count: {cores} fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth} l2_cache_size: {cache} clock_rate_ghz: {clock}
  device_memory_size: {memory} registers_per_core_limit: 65536 registers_per_block_limit: 65536
  cuda_compute_capability {{ major: {major} feature_extension: ACCELERATED_FEATURES }}
}}
platform_name: "CUDA"
device_description_str: "{name}"
"""

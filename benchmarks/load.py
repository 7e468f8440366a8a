"""Loading weights beside reading the same files raw, from the same disk.

  python benchmarks/load.py [--gib=4] [--directory=DIR] [--dtype=bfloat16] [--quantised]

Writes a checkpoint of about --gib GiB of random bytes in the published layout into DIR (a temporary
directory without it; kept and used again with it), then, each time with the files dropped from the
page cache:

- raw: every file read from end to end in blocks of 16 MiB;
- load: `kernjax.weights.load_params` in a process of its own, and its peak memory beyond what the
  parameters themselves take (on a CPU they are in the same memory).

The last line is the ratio of the two rates; the aim is 0.8. On an idle machine only.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from kernjax.model.config import ModelConfig
from kernjax.weights.names import expected_shapes

_BLOCK = 16 << 20
_SHARDS = 4

_CONFIG = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "attention_bias": False,
    "dtype": "bfloat16",
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2560,
    "intermediate_size": 9216,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "tie_word_embeddings": False,
    "vocab_size": 65536,
}
_FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}

_LOAD = """
import json, resource, sys, time
import jax, numpy as np
from kernjax.model.config import ModelConfig
from kernjax.weights import load_params

directory, dtype = sys.argv[1:]
config = ModelConfig.from_directory(directory)
jax.block_until_ready(jax.numpy.zeros(1) + 1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
start = time.perf_counter()
params = jax.block_until_ready(load_params(directory, config, dtype=dtype))
seconds = time.perf_counter() - start
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
leaves = jax.tree.leaves(params)
held = sum(leaf.nbytes for leaf in leaves)
print(json.dumps({"seconds": seconds, "beyond": peak - before - held, "held": held,
                  "largest": max(leaf.nbytes // leaf.shape[0] if leaf.ndim == 3 else leaf.nbytes
                                 for leaf in leaves)}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=4.0)
    parser.add_argument("--directory")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantised", action="store_true", help="matrices as FP8 with scales")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=".") as temporary:
        directory = Path(args.directory or temporary)
        if not (directory / "config.json").exists():
            write_checkpoint(directory, args.gib, args.quantised)
        files = sorted(directory.glob("*.safetensors"))
        size = sum(file.stat().st_size for file in files)
        raw = size / raw_seconds(files)
        drop_from_cache(files)
        done = subprocess.run(
            [sys.executable, "-c", _LOAD, directory, args.dtype],
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        load = json.loads(done.stdout.splitlines()[-1])
    rate, mib, gib = size / load["seconds"], 2**20, 2**30
    print(f"{size / gib:.2f} GiB in {len(files)} files, as {args.dtype}")
    print(f"raw   {raw / mib:8.0f} MiB/s")
    print(f"load  {rate / mib:8.0f} MiB/s, {load['seconds']:.1f} s")
    print(
        f"peak  {load['beyond'] / mib:8.0f} MiB beyond the parameters,"
        f" {load['held'] / gib:.2f} GiB;"
        f" largest tensor {load['largest'] / mib:.0f} MiB"
    )
    print(f"load/raw {rate / raw:.2f}")


def write_checkpoint(directory: Path, gib: float, quantised: bool) -> None:
    """Random bits (exponents kept small, so that no value is infinite) in `_SHARDS` shards."""
    directory.mkdir(parents=True, exist_ok=True)
    config = _sized(gib, 1 if quantised else 2)
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, shape in expected_shapes(ModelConfig.from_dict(config)).items():
        full = name if name == "lm_head.weight" else f"model.{name}"
        if (
            quantised
            and len(shape) == 2
            and "_proj" in name
            and not name.endswith(("_a.weight", "_b.weight"))
        ):
            tensors[full] = ("F8_E4M3", shape)
            tensors[f"{full}_scale_inv"] = ("BF16", tuple(-(-n // 128) for n in shape))
        else:
            tensors[full] = ("BF16", shape)
    names, weight_map = list(tensors), {}
    for shard in range(_SHARDS):
        file = f"model-{shard + 1:05}-of-{_SHARDS:05}.safetensors"
        part = names[len(names) * shard // _SHARDS : len(names) * (shard + 1) // _SHARDS]
        _write_shard(directory / file, {name: tensors[name] for name in part})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    config |= {"quantization_config": _FP8} if quantised else {}
    (directory / "config.json").write_text(json.dumps(config))


def _sized(gib: float, itemsize: int) -> dict:
    """The config with as many layers, in fours, as make about `gib`; at least four."""
    layers = 4
    while True:
        config = _CONFIG | {"num_hidden_layers": layers}
        shapes = expected_shapes(ModelConfig.from_dict(config)).values()
        if sum(int(np.prod(shape)) for shape in shapes) * itemsize >= gib * 2**30:
            return config
        layers += 4


def _write_shard(path: Path, tensors: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    header, at = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = int(np.prod(shape)) * (1 if dtype == "F8_E4M3" else 2)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    rng = np.random.default_rng(0)
    noise = (rng.integers(0, 256, _BLOCK, np.uint8) & 0xBF).tobytes()
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for start in range(0, at, _BLOCK):
            file.write(noise[: min(_BLOCK, at - start)])
        file.flush()
        os.fsync(file.fileno())


def raw_seconds(files: list[Path]) -> float:
    """Seconds to read all files once."""
    drop_from_cache(files)
    block = bytearray(_BLOCK)
    start = time.perf_counter()
    for path in files:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(block):
                pass
    return time.perf_counter() - start


def drop_from_cache(files: list[Path]) -> None:
    """Asks the kernel to forget the files' pages (they are on the disk)."""
    for path in files:
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    main()

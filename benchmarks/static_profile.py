"""What the TPU compiler says of one kernel, without a TPU: static cycles, bundles, spills, VMEM.

`profile(module, case, contender, chip)` runs itself once per question in a process of its own:
libtpu's simulation of the schedule aborts on some kernels, which counts as "no estimate". The
cycle model knows no contention and is optimistic about HBM; branches on values that are not known
when compiling are not followed right. Take it as a guide.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

CHIPS = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
_FLAGS = {
    "cycles": "--xla_jf_dump_static_llo_profile_to={}",
    "bundles": "--xla_jf_dump_to={} --xla_jf_dump_llo_text=true",
}


def profile(
    module: str, case: str, contender: str, chip: str, modes: tuple[str, ...] = tuple(_FLAGS)
) -> dict[str, Any]:
    """{"cycles", "bundles", "spills", "vmem"} of a contender; what could not be had is missing.

    `module` has `build(case, contender, device_kind) -> (function, avals)`; cycles and bundles are
    those of the largest Pallas kernel in it.
    """
    found: dict[str, Any] = {}
    for mode in modes:
        with tempfile.TemporaryDirectory() as folder:
            environment = os.environ | {
                "LIBTPU_INIT_ARGS": _FLAGS[mode].format(folder),
                "TPU_MIN_LOG_LEVEL": "3",  # an aborted run may write gigabytes otherwise
                "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
                "JAX_PLATFORMS": "cpu",
                "TPU_WORKER_HOSTNAMES": "localhost",
                "TPU_ACCELERATOR_TYPE": "v5litepod-8",
            }
            command = [sys.executable, __file__, module, case, contender, chip]
            try:
                run = subprocess.run(
                    command, env=environment, capture_output=True, text=True, timeout=600
                )
            except subprocess.TimeoutExpired:
                continue
            if run.returncode == 0:
                found |= json.loads(run.stdout.splitlines()[-1])
                found |= _cycles(folder) if mode == "cycles" else _bundles(folder)
            elif "error" not in found:
                # The profiler's abort is no failure to compile; the other mode will say.
                lines = [x for x in run.stderr.splitlines() if "Error" in x or "failed:" in x]
                found |= {"no " + mode: lines[-1][-200:] if lines else f"exit {run.returncode}"}
    return found


def _cycles(folder: str) -> dict[str, int]:
    files = Path(folder).rglob("*static_llo_profile.textproto")
    values = [re.search(r"estimated_cycles: (\d+)", path.read_text()) for path in files]
    cycles = [int(value[1]) for value in values if value]
    return {"cycles": max(cycles)} if cycles else {}


def _bundles(folder: str) -> dict[str, int]:
    """Bundles of the longest program, and its register spills (stores)."""
    longest: list[list[int]] = []
    names: list[str] = []
    for path in Path(folder).rglob("*final_hlo-static-per-bundle-utilization.txt"):
        if "pre-delay" in path.name:
            continue
        lines = path.read_text().splitlines()
        rows = [list(map(int, line.split())) for line in lines[4:] if line.strip()]
        if len(rows) > len(longest):
            longest, names = rows, [name.strip() for name in lines[1].split(",")]
    if not longest:
        return {}
    spills = names.index("VSTORE:SPILL")
    return {"bundles": len(longest), "spills": sum(row[spills] for row in longest)}


def _main(module: str, case: str, contender: str, chip: str) -> None:
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    import jax
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    topology = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[chip])
    device = topology.devices[0]
    function, avals = importlib.import_module(module).build(case, contender, device.device_kind)
    here = SingleDeviceSharding(device)
    compiled = jax.jit(function, in_shardings=here, out_shardings=here).lower(*avals).compile()
    lines = [line for line in compiled.as_text().splitlines() if "tpu_custom_call" in line]
    used = re.findall(
        r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"\d+","size":"(\d+)"',
        "\n".join(lines),
    )
    print(json.dumps({"vmem": max(map(int, used), default=0)}))


if __name__ == "__main__":
    _main(*sys.argv[1:])

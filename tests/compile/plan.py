"""Plans of a tiny hybrid by the real TPU compiler, on every generation; and one that cannot fit.

  python -m tests.compile.plan [--topologies v5e:2x2,v5p:2x2x1,v6e:2x2,tpu7x:2x2x1]

Needs `pip install 'jax[tpu]'` and no TPU. Exit code 1 if a plan lacks a number, does not hold what
its arguments must take, or the one that is too large is said to fit.
"""

from __future__ import annotations

import argparse
import math
import sys

from kernjax.planning.chips import parse_topology
from kernjax.planning.compiler import compile_program, devices_of, prepare

prepare()

from kernjax.base.errors import UserError  # noqa: E402
from kernjax.model import ModelConfig  # noqa: E402
from kernjax.model.params import leaves  # noqa: E402
from kernjax.planning import programs  # noqa: E402
from kernjax.planning.bounds import decode_bound  # noqa: E402
from kernjax.planning.compiler import TooLarge  # noqa: E402
from kernjax.planning.models import default_mesh  # noqa: E402
from kernjax.precision import parse_policy  # noqa: E402
from kernjax.weights import parse_mesh  # noqa: E402
from tests.tiny import CONFIG  # noqa: E402

_POLICY = ",".join(
    ["bf16", "prefill_window=256"]
    + [
        f"{op}.implementation=xla"
        for op in (
            "attention.prefill", "attention.decode", "delta_rule.chunked", "delta_rule.recurrent",
        )
    ]
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--topologies", default="v5e:2x2,v5p:2x2x1,v6e:2x2,tpu7x:2x2x1")
    failures = []
    for text in parser.parse_args().topologies.split(","):
        for name, setup in (("tiny", _tiny(text)), ("too large", _too_large(text))):
            result, seconds = compile_program(programs.decode_step(setup))
            print(f"{text:12} {name:10} {seconds:6.1f} s  {result}", flush=True)
            if isinstance(result, TooLarge) != (name == "too large"):
                failures.append(f"{text} {name}: {result}")
            elif name == "tiny":
                failures += _wrong(text, setup, result)
            elif result.needed is None or result.needed <= result.available:
                failures.append(f"{text}: the refusal's numbers are not understood: {result}")
    # 8 is no product of axes of 4: they are split.
    mesh = parse_mesh("fsdp=8,tensor=8", devices_of(parse_topology("v5p:4x4x4")))
    if len(set(mesh.devices.flat)) != 64:
        failures.append(f"v5p:4x4x4: not every chip has its place in {mesh.shape}")
    try:
        devices_of(parse_topology("v5e:3x5"))
        failures.append("v5e:3x5 is no slice, and was taken")
    except UserError as error:
        print(error)
    print("\n".join(failures) if failures else "all as planned")
    return 1 if failures else 0


def _tiny(text: str) -> programs.Setup:
    return _setup(text, context=1024)


def _too_large(text: str) -> programs.Setup:
    """A million sequences: caches of half a terabyte."""
    return _setup(text, context=3584, batch=1 << 20)


def _setup(text: str, context: int, batch: int = 1) -> programs.Setup:
    config = ModelConfig.from_dict(CONFIG)
    devices = devices_of(parse_topology(text))
    mesh = parse_mesh(default_mesh(config, len(devices)), devices)
    return programs.Setup(config, parse_policy(_POLICY), mesh, context, batch)


def _wrong(text: str, setup: programs.Setup, memory) -> list[str]:
    """A device's shards of the weights are the least that arguments can be."""
    weights = sum(
        leaf.dtype.itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape))
        for _, leaf in leaves(programs.abstract_weights(setup))
    )
    bound = decode_bound(setup, parse_topology(text), setup.context)
    problems = {
        f"arguments {memory.arguments} below the weights' {weights}": memory.arguments < weights,
        f"no code: {memory}": memory.code <= 0,
        f"peak below arguments: {memory}": memory.peak < memory.arguments,
        f"bound {bound}": not bound.seconds > 0,
    }
    return [f"{text}: {problem}" for problem, is_so in problems.items() if is_so]


if __name__ == "__main__":
    sys.exit(main())

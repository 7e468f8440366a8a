"""Peak memory of scoring one deep segment of the demo model on this machine.

  python benchmarks/deep_memory.py [--context=131072] [--mesh=sequence=4]

Random tokens: memory and time depend on their number only. Prints the peak resident size of the
process beside what the cache itself takes; with a mesh, on as many virtual devices, also what each
of them holds of it. They share this machine's cores: its time says nothing of real ones.
"""

from __future__ import annotations

import argparse
import math
import resource
import time

import jax
import numpy as np

from kernjax.base.resources import model_directory
from kernjax.model import init_cache
from kernjax.precision import parse_policy
from kernjax.scoring.batch import RowPlan
from kernjax.scoring.placement import Placement
from kernjax.scoring.producer import JaxProducer
from kernjax.weights import parse_mesh
from kernjax.weights.sharding import cache_shardings, parse_mesh_sizes

SCORE_LEN = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--context", type=int, default=131072)
    parser.add_argument("--policy", default="f32")
    parser.add_argument("--mesh")
    args = parser.parse_args()
    mesh = None
    if args.mesh:
        jax.config.update("jax_num_cpu_devices", math.prod(parse_mesh_sizes(args.mesh).values()))
        mesh = parse_mesh(args.mesh)
    producer = JaxProducer(model_directory("demo"), parse_policy(args.policy), mesh=mesh)
    total = args.context + SCORE_LEN + 1
    tokens = np.random.default_rng(0).integers(0, producer.vocab_size, (1, total), np.int32)
    plan = RowPlan(np.arange(0, args.context, 2048, dtype=np.int32), rescore=True)
    slots = Placement(producer.config, producer.execution, mesh).slots(total)
    cache = jax.eval_shape(lambda: init_cache(producer.config, producer.execution, 1, slots))
    began = time.perf_counter()
    (rows,) = producer.score(tokens, args.context, [plan])
    seconds = time.perf_counter() - began
    assert np.isfinite(rows["top_logprobs"]).all()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(
        f"context {args.context:,}, policy {args.policy}: peak {peak / 1e9:.2f} GB, of which the"
        f" cache is {sum(map(nbytes, jax.tree.leaves(cache))) / 1e9:.2f} GB; {seconds:.0f} s"
    )
    if mesh is not None:
        parts = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(
                sharding.shard_shape(leaf.shape), leaf.dtype
            ),
            cache,
            cache_shardings(producer.config, cache, mesh),
        )
        for name, part, whole in (
            ("keys and values", (parts.keys, parts.values), (cache.keys, cache.values)),
            ("recurrent states", (parts.conv, parts.state), (cache.conv, cache.state)),
        ):
            held, of = (sum(map(nbytes, leaves)) / 1e6 for leaves in (part, whole))
            print(f"{args.mesh}: a device holds {held:.1f} of {of:.1f} MB of {name}")


def nbytes(leaf: jax.ShapeDtypeStruct) -> int:
    return leaf.size * leaf.dtype.itemsize


if __name__ == "__main__":
    main()

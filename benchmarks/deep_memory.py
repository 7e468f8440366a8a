"""Peak memory of scoring one deep segment of the demo model on this machine.

  python benchmarks/deep_memory.py [--context=131072]

Random tokens: memory and time depend on their number only. Prints the peak resident size of the
process beside what the cache itself takes.
"""

from __future__ import annotations

import argparse
import resource
import time

import jax
import numpy as np

from kernjax.base.resources import model_directory
from kernjax.model import init_cache
from kernjax.precision import parse_policy
from kernjax.scoring.batch import RowPlan
from kernjax.scoring.producer import JaxProducer

SCORE_LEN = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--context", type=int, default=131072)
    parser.add_argument("--policy", default="f32")
    args = parser.parse_args()
    producer = JaxProducer(model_directory("demo"), parse_policy(args.policy))
    total = args.context + SCORE_LEN + 1
    tokens = np.random.default_rng(0).integers(0, producer.vocab_size, (1, total), np.int32)
    plan = RowPlan(np.arange(0, args.context, 2048, dtype=np.int32), rescore=True)
    cache = jax.eval_shape(lambda: init_cache(producer.config, producer.execution, 1, total))
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
    began = time.perf_counter()
    (rows,) = producer.score(tokens, args.context, [plan])
    seconds = time.perf_counter() - began
    assert np.isfinite(rows["top_logprobs"]).all()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(
        f"context {args.context:,}, policy {args.policy}: peak {peak / 1e9:.2f} GB, of which the"
        f" cache is {held / 1e9:.2f} GB; {seconds:.0f} s"
    )


if __name__ == "__main__":
    main()

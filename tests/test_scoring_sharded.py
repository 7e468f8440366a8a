"""Scoring on 1, 2, 4 and 8 virtual devices: the same numbers, weights and caches in parts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

from instrument import LAYERS
from tiny import write_checkpoint

EIGHT_DEVICES = """
    import json, sys
    import jax, numpy as np
    jax.config.update("jax_num_cpu_devices", 8)
    from kernjax.precision import parse_policy
    from kernjax.scoring.batch import RowPlan
    from kernjax.scoring.producer import JaxProducer
    from kernjax.weights import parse_mesh

    directory, context = sys.argv[1], 40
    tokens = np.random.default_rng(0).integers(0, 64, (3, context + 5)).astype(np.int32)
    plans = [RowPlan(np.asarray([7, 39], np.int32)) for _ in tokens]
    policy = parse_policy("f32,prefill_window=24")

    def rows(mesh):
        producer = JaxProducer(directory, policy, mesh=mesh)
        scored = producer.score(tokens, context, plans)
        assert len(scored) == 3
        return producer, np.stack([row["target_logprobs"] for row in scored])

    _, one = rows(None)
    differences = {}
    for text in ("tensor=1", "data=2", "tensor=2", "data=2,tensor=2", "data=2,fsdp=2,tensor=2"):
        count = int(np.prod([int(item.partition("=")[2]) for item in text.split(",")]))
        mesh = parse_mesh(text, jax.devices()[:count])
        producer, sharded = rows(mesh)
        differences[text] = float(np.abs(sharded - one).max())
        placement, data = producer.scorer._placement, mesh.shape["data"]
        assert placement.filled(3) == -(-3 // data) * data
        cache = placement.empty_cache(4, 64)
        for leaf in (cache.keys, cache.values, cache.conv, cache.state):
            part, whole = leaf.addressable_shards[0].data, leaf
            assert len(leaf.sharding.device_set) == count
            # Sequences over `data`, heads over `tensor`; layers and tokens whole.
            assert part.shape[1] == whole.shape[1] // data, text
            assert part.size * data * mesh.shape["tensor"] == whole.size, text
    print(json.dumps(differences))
"""


def test_the_same_numbers_on_any_number_of_devices(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", **LAYERS)
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(EIGHT_DEVICES), model],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    differences = json.loads(done.stdout.splitlines()[-1])
    # One device is one device, and nothing is reduced over `data`: the same order, the same bits.
    assert differences.pop("tensor=1") == 0
    assert differences.pop("data=2") == 0
    # Sums split in parts are rounded elsewhere: float32's last bits, of logprobs around -4.
    assert all(0 <= difference < 2e-5 for difference in differences.values()), differences
    assert any(differences.values()), "tensor=2 adds in the order of one device?"

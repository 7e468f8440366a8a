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
    tokens = np.random.default_rng(0).integers(0, 64, (4, context + 5)).astype(np.int32)
    plan = RowPlan(np.asarray([7, 39], np.int32))
    policy = parse_policy("f32,prefill_window=20")

    def logprobs(producer, tokens):
        rows = producer.score(tokens, context, [plan] * len(tokens))
        assert len(rows) == len(tokens)
        return np.stack([row["target_logprobs"] for row in rows])

    single = JaxProducer(directory, policy)
    # Two at a time: as many as a device has on `data=2`.
    one = np.concatenate([logprobs(single, tokens[:2]), logprobs(single, tokens[2:])])
    differences = {}
    for text, batch in (("data=2", 4), ("fsdp=2,tensor=2", 2), ("data=2,fsdp=2,tensor=2", 3)):
        count = int(np.prod([int(item.partition("=")[2]) for item in text.split(",")]))
        mesh = parse_mesh(text, jax.devices()[:count])
        producer, data = JaxProducer(directory, policy, mesh=mesh), mesh.shape["data"]
        sharded = logprobs(producer, tokens[:batch])
        differences[text] = float(np.abs(sharded - one[:batch]).max())
        placement = producer.scorer._placement
        assert placement.filled(batch) == -(-batch // data) * data
        cache = placement.empty_cache(4, 64)
        for leaf in (cache.keys, cache.values, cache.conv, cache.state):
            part = leaf.addressable_shards[0].data
            assert len(leaf.sharding.device_set) == count
            # Sequences over `data`, heads over `tensor`; layers and tokens whole.
            assert part.shape[1] == leaf.shape[1] // data, text
            assert part.size * data * mesh.shape["tensor"] == leaf.size, text
        # Each part of `data` is a program of its own: it sees its sequences and no others.
        seen = []
        jax.eval_shape(
            placement.by_sequences(
                lambda c, b: (seen.append((c.keys.shape[1], len(b))), b)[1], "cb", "b"
            ),
            cache,
            placement.put(np.zeros((4, 3), np.int32)),
        )
        parts = data if placement.is_split else 1
        assert seen[-1] == (4 // parts, 4 // parts)
        assert placement.is_split or text.count("=") != 1
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
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    differences = json.loads(done.stdout.splitlines()[-1])
    # Nothing is reduced over `data`: the same shapes a device, the same bits.
    assert differences.pop("data=2") == 0
    # Sums split in parts are rounded elsewhere: float32's last bits, of logprobs around -4.
    assert all(0 <= difference < 2e-5 for difference in differences.values()), differences
    assert any(differences.values()), "split sums in the order of one device?"

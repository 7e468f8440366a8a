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
    from kernjax.scoring import batch as scoring
    from kernjax.scoring.batch import RowPlan
    from kernjax.scoring.producer import JaxProducer
    from kernjax.weights import parse_mesh

    directory, context = sys.argv[1], 40
    tokens = np.random.default_rng(0).integers(0, 64, (4, context + 5)).astype(np.int32)
    plan = RowPlan(np.asarray([7, 39], np.int32))
    policy = parse_policy("f32,prefill_window=20")
    # 45 slots, 12 in each of four parts: windows straddle them, and the last one is not full.
    scoring._capacity = lambda tokens: tokens

    def logprobs(producer, tokens):
        rows = producer.score(tokens, context, [plan] * len(tokens))
        assert len(rows) == len(tokens)
        return np.stack([row["target_logprobs"] for row in rows])

    single = JaxProducer(directory, policy)
    # Two at a time: as many as a device has on `data=2`.
    one = np.concatenate([logprobs(single, tokens[:2]), logprobs(single, tokens[2:])])
    differences = {}
    for text, batch in (
        ("data=2", 4),
        ("fsdp=2,tensor=2", 2),
        ("data=2,fsdp=2,tensor=2", 3),
        ("sequence=4", 2),
    ):
        count = int(np.prod([int(item.partition("=")[2]) for item in text.split(",")]))
        mesh = parse_mesh(text, jax.devices()[:count])
        producer, data = JaxProducer(directory, policy, mesh=mesh), mesh.shape["data"]
        sharded = logprobs(producer, tokens[:batch])
        differences[text] = float(np.abs(sharded - one[:batch]).max())
        placement = producer.scorer._placement
        assert placement.filled(batch) == -(-batch // data) * data
        cache, parts = placement.empty_cache(4, 62), mesh.shape["sequence"]
        for leaf in (cache.keys, cache.values, cache.conv, cache.state):
            part = leaf.addressable_shards[0].data
            assert len(leaf.sharding.device_set) == count
            # Sequences over `data`, heads over `tensor`, slots over `sequence`; layers whole.
            assert part.shape[1] == leaf.shape[1] // data, text
            split = parts if leaf is cache.keys or leaf is cache.values else 1
            assert part.size * data * mesh.shape["tensor"] * split == leaf.size, text
        assert cache.capacity == -(-62 // parts) * parts
        assert cache.keys.addressable_shards[0].data.shape[2] * parts == cache.capacity
        # Each part of `data` is a program of its own: it sees its sequences and no others.
        seen = []
        jax.eval_shape(
            placement.by_parts(
                lambda c, b: (seen.append((c.keys.shape[1], len(b))), b)[1], "cb", "b"
            ),
            cache,
            placement.put(np.zeros((4, 3), np.int32)),
        )
        if placement.parted:
            assert seen[-1] == (4 // data, 4 // data)
        assert placement.parted == {axis for axis in ("data", "sequence") if mesh.shape[axis] > 1}
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

"""A cache in parts on a mesh axis: what is written where, and attention merged over the parts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from instrument import LAYERS, last_line, run
from kimi_checkpoints import K3, K3_TEXT, write_k3
from tiny import CONFIG, make_corpus, write_checkpoint

from kernjax import record
from kernjax.texts import write_corpus

ROOT = Path(__file__).resolve().parents[1]

# One layer, of latent attention and a mixture of experts.
TEXT = K3_TEXT | {
    "first_k_dense_replace": 0,
    "linear_attn_config": K3_TEXT["linear_attn_config"]
    | {"full_attn_layers": [1], "kda_layers": []},
    "num_hidden_layers": 1,
    "vocab_size": CONFIG["vocab_size"],
}

FOUR_PARTS = """
    import json, sys
    import jax
    jax.config.update("jax_num_cpu_devices", 8)
    import jax.numpy as jnp, numpy as np
    from jax.sharding import NamedSharding, PartitionSpec as P
    from kernjax.model.attention import write_cache
    from kernjax.model.execution import LayerPlan
    from kernjax.precision import parse_policy
    from kernjax.scoring import batch as scoring
    from kernjax.scoring.batch import RowPlan
    from kernjax.scoring.producer import JaxProducer
    from kernjax.weights import parse_mesh

    LAYERS, B, S, G, H, N = 2, 2, 24, 2, 8, 4
    mesh = parse_mesh("sequence=4", jax.devices()[:4])
    parts = P(None, None, "sequence")
    rng = np.random.default_rng(0)

    def over_parts(function, specs, out):
        return jax.jit(jax.shard_map(
            function, mesh=mesh, in_specs=specs, out_specs=out, axis_names={"sequence"},
            check_vma=False))

    # Written from every slot on: one token, some (in one part or two), more than a part holds.
    cache = rng.standard_normal((LAYERS, B, S, G, H)).astype(np.float32)
    for tokens in (1, 4, 9):
        new = rng.standard_normal((B, tokens, G, H)).astype(np.float32)
        starts = np.arange(S - tokens + 1, dtype=np.int32)
        written = over_parts(
            lambda cache, new, starts: jax.lax.map(
                lambda at: write_cache(cache, new, jnp.int32(1), at, "sequence"), starts),
            (parts, P(), P()), P(None, *parts))(cache, new, starts)
        for start, got in zip(starts, np.asarray(written), strict=True):
            want = cache.copy()
            want[1, :, start : start + tokens] = new
            np.testing.assert_array_equal(got, want)

    # Attention of a plan, against float64 over all keys at once.
    plan = LayerPlan(parse_policy("f32").for_layer(0), sequence="sequence")
    values = rng.standard_normal((LAYERS, B, S, G, H)).astype(np.float32)

    def attend(op, q, keys, values, at):
        offset = jnp.full((B,), at, jnp.int32)
        return plan.attend(
            op, q, keys, values, jnp.int32(1), q_offset=offset, kv_length=offset + q.shape[1],
            formats=plan.policy.attention)

    for op, tokens, start in (("attention.prefill", 9, 4), ("attention.decode", 1, 23)):
        q = rng.standard_normal((B, tokens, N, H)).astype(np.float32)
        call = over_parts(lambda *x: attend(op, *x), (P(), parts, parts, P()), P())
        hidden = np.arange(S)[None] > start + np.arange(tokens)[:, None]
        k, v = (np.repeat(x[1].astype(np.float64), N // G, axis=2) for x in (cache, values))
        s = np.einsum("btnh,bsnh->bnts", q, k) * H**-0.5
        p = np.exp(np.where(hidden, -np.inf, s))
        want = np.einsum("bnts,bsnh->btnh", p / p.sum(-1, keepdims=True), v)
        used = np.where((np.arange(S) < start + tokens)[:, None, None], 1, np.nan)
        got = call(q, cache * used, values * used, jnp.int32(start))
        np.testing.assert_allclose(got, want, atol=1e-6)

    # Latent keys, and a mixture of experts inside a program over parts.
    tokens = np.random.default_rng(0).integers(0, 64, (2, 29)).astype(np.int32)
    row = RowPlan(np.asarray([3, 23], np.int32))
    scoring._capacity = lambda tokens: tokens
    policy = parse_policy("f32,prefill_window=12")
    rows = []
    for text in (None, "data=2,sequence=2,tensor=2"):
        on = text and parse_mesh(text)
        producer = JaxProducer(sys.argv[1], policy, mesh=on)
        scored = producer.score(tokens, 24, [row, row])
        rows.append(np.stack([r["target_logprobs"] for r in scored]))
    held = producer.scorer._placement.empty_cache(2, 28).keys
    part = held.addressable_shards[0].data
    assert part.shape[1:3] == (1, 14) and held.shape[1:3] == (2, 28)
    print(json.dumps(float(np.abs(rows[0] - rows[1]).max())))
"""


def test_written_and_read_in_parts(tmp_path: Path) -> None:
    write_k3(tmp_path, config=K3 | {"text_config": TEXT})
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FOUR_PARTS), tmp_path],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert 0 < json.loads(done.stdout.splitlines()[-1]) < 2e-5


PLUGIN = """
from pallas_kernels import attention

def plain(q, k, v, *, q_offset, kv_length, scale, k_scale, v_scale, formats):
    return attention.prefill(q, k, v, q_offset=q_offset, kv_length=kv_length, scale=scale)

def with_lse(q, k, v, *, return_lse=False, **rest):
    return attention.prefill(q, k, v, return_lse=return_lse, **rest)
"""


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("case")
    corpus = write_corpus(make_corpus({24: 1}, score_len=4), folder / "corpus")
    model = write_checkpoint(folder / "model", **LAYERS)
    return [f"--model={model}", f"--corpus={corpus}", f"--out={folder / 'out'}"]


def test_kernels_without_a_log_sum_exp_are_refused(words, tmp_path, monkeypatch, capsys):
    (tmp_path / "lse_plugin.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    words = [*words, "--only_check_args"]
    plain = "--kernel=attention.prefill=lse_plugin:plain"
    assert run(record, *words, plain, "--mesh=sequence=2") == 3
    error = capsys.readouterr().err
    assert "lse_plugin:plain for attention.prefill does not take return_lse" in error
    assert "Add the parameter, or choose a --mesh without sequence." in error
    assert run(record, *words, plain, "--mesh=tensor=2") == 0
    kernel = "--kernel=attention.prefill=lse_plugin:with_lse"
    assert run(record, *words, kernel, "--mesh=sequence=2") == 0
    assert last_line(capsys)["checked"]

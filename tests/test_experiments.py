"""The experiments: their measures against plain arithmetic, their commands on the tiny model."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from instrument import last_line, run

from kernjax.base.errors import UserError
from kernjax.experiments import article, attention, fp8_drift, long_decode, lost_mass, stochastic
from kernjax.experiments.divergence import full_kl
from kernjax.experiments.passages import passages, stacked
from kernjax.experiments.state import decode, lanes
from kernjax.experiments.tables import doublings
from kernjax.precision import parse_policy
from kernjax.scoring.batch import RowPlan
from kernjax.scoring.producer import Checkpoint, JaxProducer
from kernjax.scoring.session import Session
from kernjax.texts import load_corpus
from pallas_kernels.attention import AttentionFormats, prefill


def kl_in_float64(p_logits: np.ndarray, q_logits: np.ndarray) -> np.ndarray:
    p, q = (
        x - np.logaddexp.reduce(x, axis=-1, keepdims=True)
        for x in (p_logits.astype(np.float64), q_logits.astype(np.float64))
    )
    return np.sum(np.exp(p) * (p - q), axis=-1)


# --- passages


def test_passages_hold_every_text_once(instrument):
    corpus = load_corpus(str(instrument.corpus), None)
    found = passages(corpus, 99, 3)
    assert set(found) == {"prose", "code"}
    for kind, text in found.items():
        assert text.shape == (3, 100) and text.dtype == np.int32
        deepest = [s.tokens for s in corpus.segments if (s.kind, s.context_len) == (kind, 96)]
        assert np.array_equal(text.ravel(), np.concatenate(deepest)[:300])
    tokens, kinds = stacked(found)
    assert tokens.shape == (6, 100) and list(kinds) == ["prose"] * 3 + ["code"] * 3
    assert len(passages(corpus, 400, 9)["code"]) == 1  # as many as there is text for
    with pytest.raises(UserError, match="tokens of"):
        passages(corpus, 600, 1)


# --- measures


@pytest.mark.parametrize("size", [1e-5, 1e-3, 0.1, 3.0])
def test_full_kl_is_exact_where_a_plain_sum_is_not(size):
    rng = np.random.default_rng(0)
    p = rng.normal(0, 3, (64, 384)).astype(np.float32)
    q = (p + rng.normal(0, size, p.shape) + rng.normal(0, 5, (64, 1))).astype(np.float32)
    expected = kl_in_float64(p, q)
    # The logits themselves are float32: what that costs a KL is eps |logit| |d|.
    np.testing.assert_allclose(full_kl(p, q), expected, rtol=3e-3, atol=1e-11)
    assert (full_kl(p, p) == 0).all()


def test_stochastic_rounding_stays_on_the_grid_and_has_no_bias():
    x = np.concatenate([np.geomspace(1e-6, 448, 400), [0.0, 2.0**-9, 0.75, 447.0]])
    x = x.astype(np.float32)
    u = (np.arange(4096, dtype=np.float32) + 0.5) / 4096
    rounded = np.asarray(stochastic.stochastic_e4m3(x[:, None], u[None]))
    assert np.array_equal(rounded, rounded.astype(ml_dtypes.float8_e4m3fn).astype(np.float32))
    exact = x == x.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert (rounded[exact] == x[exact, None]).all()
    # The mean over u is x to half of the 4096th part of a step; a step is at most x / 8 + 2^-9.
    assert (np.abs(rounded.mean(axis=1, dtype=np.float64) - x) <= (x / 8 + 2.0**-9) / 4000).all()


def operands(capacity: int = 90, tokens: int = 20) -> tuple[dict, dict]:
    rng = np.random.default_rng(1)
    arrays = [rng.normal(size=shape) for shape in ((2, tokens, 4, 8), *[(2, capacity, 2, 8)] * 2)]
    q, k, v = (jnp.asarray(x, jnp.float32) for x in arrays)
    where = {
        "q_offset": jnp.array([capacity - tokens - 7, 3], jnp.int32),
        "kv_length": jnp.array([capacity - 7, tokens + 3], jnp.int32),
    }
    return (q, k, v), where


@pytest.mark.parametrize("name", ["attention", "attention_rounded_sum"])
def test_the_stochastic_kernel_without_rounding_is_attention(monkeypatch, name):
    arrays, where = operands()
    kernel = functools.partial(getattr(stochastic, name), formats=AttentionFormats(block_k=32))
    noisy = kernel(*arrays, **where)
    monkeypatch.setattr(stochastic, "stochastic_e4m3", lambda x, uniform: x)
    expected = prefill(*arrays, **where, implementation="reference")
    np.testing.assert_allclose(kernel(*arrays, **where), expected, atol=2e-6)
    error = np.abs(np.asarray(noisy - expected)).max()
    assert 1e-3 < error < 0.3


def test_mass_bias_and_noise_of_a_row_that_can_be_counted():
    """One key at the maximum, 1,000 whose weight e^-8 is below e4m3's half of the smallest."""
    keys, width = 1001, 4
    k = np.zeros((1, keys, 1, width), np.float32)
    k[0, 0, 0, 0] = 16.0  # with scale 1/2: a score of 8 above the others
    q = np.zeros((1, 1, 1, width), np.float32)
    q[..., 0] = 1.0
    v = np.zeros((1, keys, 1, width), np.float32)
    v[0, 0, 0, 0], v[0, 1:, 0, 1] = 1.0, 0.5  # what is lost points elsewhere
    where = {"q_offset": jnp.array([keys - 1]), "kv_length": jnp.array([keys])}
    ones = jnp.ones((1, keys, 1, 1))
    base = AttentionFormats()

    def effect(name: str, values: np.ndarray) -> list[float]:
        op = attention.op_with(name, base)
        truth = prefill(q, k, values, **where)
        found = attention._effect(truth, op(q, k, values, **where), op(q, k, ones, **where))
        return [float(x[0]) for x in found]

    tail = 1000 * np.exp(-8.0)
    share = tail / (1 + tail)
    head, rest = 1 - share, 0.5 * share  # the output's two components
    cosine2 = head**2 / (head**2 + rest**2)
    lost, bias, noise, error = effect("fp8", v)
    assert lost == pytest.approx(share, rel=1e-4)
    # e = (0, -rest): along o it is -rest^2, across it head * rest.
    assert bias == pytest.approx(-(1 - cosine2), rel=1e-3)
    assert noise == pytest.approx(np.sqrt(cosine2 * (1 - cosine2)), rel=1e-3)
    assert error == pytest.approx(np.hypot(bias, noise), rel=1e-4)
    lost, bias, *_ = effect("fp8/rounded", v)
    assert lost == 0 and bias == pytest.approx(head / (head**2 + rest**2) - 1, rel=1e-3)
    alike = np.ones_like(v)
    assert effect("fp8", alike)[1] == pytest.approx(-share, rel=1e-4)
    assert effect("fp8/rounded", alike)[1] == pytest.approx(0, abs=1e-5)


def test_doublings_end_at_the_last_depth():
    assert doublings((512, 1024, 1536, 2048, 2560)) == [0, 1, 3, 4]
    assert doublings((64,)) == [0]


# --- the model


CONTEXT, STEPS = 48, 8


@pytest.fixture(scope="module")
def decoded(instrument):
    """Three lanes on two segments: what they are, their tokens, and what was measured."""
    corpus = load_corpus(str(instrument.corpus), None)
    texts = [s.tokens for s in corpus.segments if s.context_len == CONTEXT]
    tokens = np.stack([texts[0], texts[-1]])  # one of each kind
    truth, production, isolated, _ = lanes(parse_policy("bf16"), ["m3"])
    chosen = [truth, production, isolated]
    found = decode(Checkpoint(instrument.model), chosen, tokens[:, :-1], CONTEXT)
    return chosen, tokens, found


def test_lanes_are_the_policies_they_name(instrument, decoded):
    """Against the recorder's own rows of a lane and of the truth, each run by itself."""
    chosen, tokens, found = decoded
    checkpoint = Checkpoint(instrument.model)

    def logprobs(policy) -> np.ndarray:
        plans = [RowPlan(np.array([CONTEXT - 1], np.int32))] * len(tokens)
        producer = JaxProducer(checkpoint, policy, full=True)
        rows = producer.score(tokens, CONTEXT, plans)
        return np.stack([row["logprobs"][1:] for row in rows])  # the decode rows

    expected = kl_in_float64(logprobs(chosen[0].policy), logprobs(chosen[2].policy))
    np.testing.assert_allclose(found.kl[1], expected, rtol=0.02, atol=1e-9)
    assert found.kl.shape == (2, 2, STEPS) and found.state.shape == (2, 1, 2, STEPS)
    assert (found.kl[0] > 0).all()
    assert (found.state[0] == 0).all()  # production with an unrounded state, against itself
    rounded = found.state[1, 0]  # 3 bits: each rounding moves |x| by 2^-4 at most
    assert (rounded > 0.005).all() and (rounded < 0.3).all()


def test_names_of_lanes():
    names = [lane.name for lane in lanes(parse_policy("bf16"), ["m7", "m3"])]
    assert names[:2] == ["isolated, f32", "in place, f32"]
    assert names[2:] == ["isolated, m7", "isolated, m3", "in place, m7", "in place, m3"]


def test_tables_of_a_long_decode(decoded):
    *_, found = decoded
    line = long_decode.summarise(found, np.array(["prose", "code"]))
    assert line["ranges"] == [(1, 1), (2, 8)] and line["passages"] == 2
    by_lane = {(row["kind"], row["lane"]): row for row in line["rows"]}
    assert by_lane["code", "in place, f32"]["over_production"] == pytest.approx([1, 1])
    rounded = by_lane["code", "isolated, m3"]
    assert rounded["kl"] == pytest.approx([found.kl[1, 1, 0], found.kl[1, 1, 1:].mean()])
    expected = found.kl[1, 1, 1:].mean() / found.kl[0, 1, 1:].mean()
    assert rounded["over_production"][1] == pytest.approx(expected)
    text = long_decode.markdown(line)
    assert "| code  | isolated, m3" in text and "middle recurrent layer" in text


def test_the_drift_of_fp8_on_a_tiny_model(instrument, monkeypatch, capsys):
    subject = ("--model", str(instrument.model), "--corpus", str(instrument.corpus))
    monkeypatch.setattr(fp8_drift, "FORMATS", ("fp8",))
    assert run(fp8_drift, *subject, "--depth=128", "--window=64", "--passages=1") == 0
    line = last_line(capsys)
    assert line["depths"] == [64, 128] == line["attention"]["depths"]
    assert len(line["rows"]) == 2 and all(min(row["kl"]) > 0 for row in line["rows"])
    local = line["attention"]["rows"][0]["by_layer"]
    # Rounding moves a P by 2^-4 at most, and an output by less.
    assert 1e-4 < local["noise"][0] < 2.0**-4 and abs(local["lost"][0]) < 2.0**-4

    assert run(lost_mass, *subject, "--depth=6000") == 3
    assert "tokens of" in capsys.readouterr().err


def test_what_the_articles_figures_need_of_a_model(instrument, monkeypatch):
    """One format of each kind: the first layer, the state after a step, and greedy texts."""
    monkeypatch.setattr(article, "P_FORMATS", ("fp8",))
    monkeypatch.setattr(article, "STATE_FORMATS", ("m3",))
    monkeypatch.setattr(article, "VARIANTS", {})
    session = Session.open(
        str(instrument.model), str(instrument.corpus), str(instrument.reference), batch_size=8
    )
    found = article.measured(session, parse_policy("bf16"), 8)
    first = found["first_layer"]
    assert (first["layer"], first["depth"]) == (1, 96) and set(first["error"]) == {"fp8"}
    # Rounding moves a P by 2^-4 at most, and an output by less.
    assert all(1e-4 < first["error"]["fp8"][kind] < 2.0**-4 for kind in ("prose", "code"))
    state = found["state"]
    assert state["layers"] == [0] and state["depth"] == 48 and state["formats"] == ["m3"]
    assert 0.005 < state["distance"][0][0] < 0.3
    (row,) = found["greedy"]["rows"]
    assert row["name"] == "production" and row["texts"] == 6 and 0 <= row["parted"] <= 6

"""Rows, corrections and outcomes of the gates."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from kernjax.judge.comparison import Segment
from kernjax.judge.gates import (
    TESTED,
    Evidence,
    Limit,
    Outcome,
    Row,
    bins_label,
    decide,
    predeclared,
    segments_needed,
)
from kernjax.judge.intervals import Estimate
from kernjax.judge.limits import limits_of, merge_flip_bins
from kernjax.judge.quantiles import t_quantile, tolerance_factor
from kernjax.judge.simulate import Corpus, Design
from kernjax.judge.summaries import Summary, ratio_statistics, row_groups

SEGMENTS = tuple(
    Segment(f"{kind}-{context}-{i}", kind, context, 8)
    for kind in ("code", "prose")
    for context in (512, 2048, 8192)
    for i in range(16)
)
N = len(SEGMENTS)


def summary(level=0.0, flips=None, tail=0.0, **groups) -> Summary:
    """A summary whose ln KL is -9 + level in every group, unless given."""
    values = {name: np.broadcast_to(-9.0 + np.asarray(level), N) for name in ("level",)}
    values |= {name: np.broadcast_to(-9.0 + np.asarray(v), N) for name, v in groups.items()}
    counts = np.zeros((N, 7), np.int64) if flips is None else flips
    return Summary(values, dict(values), np.broadcast_to(tail, N), counts, 0)


def noise(seed, scale=0.1):
    return scale * np.random.default_rng(seed).standard_normal(N)


def limit(allowed: float) -> Limit:
    return Limit(allowed, allowed, 0.0, allowed)


def test_at_most_eight_gates_are_tested():
    rows = predeclared(SEGMENTS, ["step", "self", "last", "edge_window", "edge_chunk"], [(1, 2)])
    assert len(TESTED) == 8
    assert {row.gate for row in rows} == set(TESTED)
    assert len({row.key for row in rows}) == len(rows)


def decide_level(subject: Summary, allowed: float):
    """Gates of a subject against one normal at ln KL -9, every row allowed `allowed`."""
    rows = [r for r in predeclared(SEGMENTS, [], []) if r.gate in ("level", "growth_context")]
    evidence = Evidence(SEGMENTS, subject, [summary()])
    return {
        f"{gate.name}: {gate.stratum}": gate
        for gate in decide(evidence, rows, {row.key: limit(allowed) for row in rows})
    }


def test_outcomes_around_the_limit():
    allowed = math.log(1.2)
    below = decide_level(summary(noise(0)), allowed)
    assert {gate.outcome for gate in below.values()} == {Outcome.PASS}
    above = decide_level(summary(math.log(1.5) + noise(0)), allowed)
    assert above["level: prose, geometric"].outcome is Outcome.FAIL
    assert above["level: prose, geometric"].observed == pytest.approx(1.5, rel=0.05)
    near = decide_level(summary(math.log(1.21) + noise(0)), allowed)["level: prose, geometric"]
    assert near.outcome is Outcome.INCONCLUSIVE
    assert near.low < 1.2 < near.high


def test_rescored_rows_have_the_rows_of_level_in_their_own_gate():
    rows = predeclared(SEGMENTS, ["self", "rescore"], [])
    level = [row for row in rows if row.gate == "level"]
    rescored = [row for row in rows if row.gate == "decode_vs_prefill" and row.kind]
    assert [(r.kind, r.context) for r in rescored] == [(r.kind, r.context) for r in level]
    assert [r.stratum for r in rescored] == [f"rescored {r.stratum}" for r in level]
    evidence = Evidence(SEGMENTS, summary(rescore=math.log(1.5) + noise(4)), [summary(rescore=0)])
    gates = decide(evidence, rows, {row.key: limit(math.log(1.2)) for row in rows})
    found = {g.stratum: g for g in gates}
    assert found["rescored code, geometric"].outcome is Outcome.FAIL
    assert found["rescored code, arithmetic"].observed == pytest.approx(1.5, rel=0.05)
    assert found["code, geometric"].outcome is Outcome.PASS
    assert "rescored code, geometric" not in {r.stratum for r in predeclared(SEGMENTS, [], [])}


def test_edges_of_prefill_and_of_decode():
    """Which rows count: by hand for two segments of 128 tokens, 66 of them decoded."""
    pos = [3, 64, 65, 126, 127, *range(128, 194), *range(128, 194)]
    phase = np.array([0] * 5 + [1] * 66 + [2] * 66, np.uint8)
    n = len(pos)
    kl = np.full(n, 1e-4)
    one = Corpus(Design(contexts=(512,), per_cell=2, steps=4), np.random.default_rng(0)).producer()
    c = dataclasses.replace(
        one,
        segments=tuple(Segment(f"s{i}", "prose", 128, 66, (0, 120)) for i in range(2)),
        segment=np.repeat([0, 1], n),
        pos=np.tile(pos, 2),
        phase=np.tile(phase, 2),
        finite=np.ones(2 * n, bool),
        self_kl=np.tile(np.where(phase == 1, kl, np.nan), 2),
        reference_manifest={"prefill_window": 96},
    )
    groups = row_groups(c, 1)
    found = {
        name: sorted(c.pos[rows[rows < n]].tolist())
        for name, rows in groups.items()
        if name.startswith("edge_") or name in ("last", "rescore")
    }
    assert found == {
        "last": [127],
        "edge_window": [126],
        "edge_document": [3],
        "edge_chunk": [64, 65],
        "edge_start": [128, 129, 130, 131],
        "edge_block": [191, 192],
        "rescore": list(range(128, 194)),
    }


def test_p_values_are_bonferroni_within_and_holm_across_gates():
    """Two gates: level (16 rows) and growth (2 rows), against the correction done by hand."""
    rows = [r for r in predeclared(SEGMENTS, [], []) if r.gate in ("level", "growth_context")]
    context = np.array([s.context_len for s in SEGMENTS])
    subject = summary(0.12 + 0.03 * np.log2(context / 512) + noise(1))
    evidence = Evidence(SEGMENTS, subject, [summary()])
    limits = {row.key: limit(0.02) for row in rows}
    gates = {g.name + ": " + g.stratum: g for g in decide(evidence, rows, limits)}
    raw: dict[str, dict[str, float]] = {}
    for row in rows:
        p = evidence.estimate(row).p_above(0.02)
        if row.gate == "growth_context":
            deepest = Row("level", "", "geometric", kind=row.kind, context=8192)
            p = max(p, evidence.estimate(deepest).p_above(0.0))
        raw.setdefault(row.gate, {})[row.key] = p
    smallest = {gate: min(p.values()) * len(p) for gate, p in raw.items()}
    first, second = sorted(smallest, key=smallest.get)
    factor = {first: 2, second: 1}
    for gate, ps in raw.items():
        for key, p in ps.items():
            by_hand = min(1.0, factor[gate] * len(ps) * p)
            assert gates[key].p_value >= min(by_hand, 1.0) - 1e-15
            if p == min(ps.values()):
                floor = 2 * smallest[first] if gate == second else 0.0
                assert gates[key].p_value == pytest.approx(min(1, max(by_hand, floor)))


def test_growth_fails_only_where_it_grows_above_normal():
    context = np.array([s.context_len for s in SEGMENTS])
    doublings = np.log2(context / 512)
    worse = decide_level(summary(0.1 * doublings + noise(2, 0.02)), 0.03)
    assert worse["growth_context: prose"].outcome is Outcome.FAIL
    assert worse["growth_context: prose"].observed == pytest.approx(math.exp(0.1), rel=0.03)
    better = decide_level(summary(-0.6 + 0.1 * doublings + noise(2, 0.02)), 0.03)
    assert better["growth_context: prose"].outcome is Outcome.PASS
    assert "grows" in better["growth_context: prose"].note
    tiny = decide_level(summary(-8 + 0.5 * doublings + noise(2, 0.02)), 0.03)
    assert tiny["growth_context: prose"].observed == pytest.approx(1.0, abs=0.01)


def test_mass_may_fail_on_either_side():
    row = Row("tail_mass", "prose", "tail", quantity="mass", kind="prose")
    wiggle = 1e-4 * np.random.default_rng(3).standard_normal(N)
    bound = {row.key: Limit(2e-4, 2e-4, 0.0, 2e-4, is_log=False)}
    for shift, outcome in (
        (0.0, Outcome.PASS),
        (1e-3, Outcome.FAIL),
        (-1e-3, Outcome.FAIL),
        (-2e-4, Outcome.INCONCLUSIVE),
    ):
        evidence = Evidence(SEGMENTS, summary(tail=shift + wiggle), [summary()])
        assert decide(evidence, [row], bound)[0].outcome is outcome


def test_flip_bins_are_merged_until_twenty_are_expected():
    assert merge_flip_bins(np.array([9, 30, 25, 21, 20, 40, 22.0])) == [(i,) for i in range(1, 7)]
    assert merge_flip_bins(np.array([50, 90, 12, 6, 2, 1, 0.0])) == [(1,), (2, 3, 4, 5, 6)]
    assert merge_flip_bins(np.array([50, 3, 12, 6, 2, 1, 0.0])) == [(1, 2, 3, 4, 5, 6)]
    assert merge_flip_bins(np.array([50, 5, 4, 3, 2, 1, 0.0])) == []
    assert bins_label((1,)) == "(0,0.05]"
    assert bins_label((2, 3)) == "(0.05,0.2]"
    assert bins_label((4, 5, 6)) == ">0.2"


def test_limits_are_the_stated_formula():
    row = Row("level", "prose, geometric", "geometric", kind="prose")
    values = np.array([0.10, -0.05, 0.02, -0.04, -0.03])
    wide = limits_of([row], {row.key: [Estimate(v, 1e-4, 60.0, 64) for v in values]})[row.key]
    spread = values.std(ddof=1) * 4 / 5
    assert wide.allowed == pytest.approx(values.mean() + tolerance_factor(5) * spread)
    few = limits_of([row], {row.key: [Estimate(v * 1e-3, 0.05, 60.0, 64) for v in values]})
    rise = t_quantile(0.95, 60.0) * (1 + math.sqrt(1 + 1 / 5))
    assert few[row.key].allowed == pytest.approx(rise * 0.05)
    none = limits_of([row], {row.key: [Estimate(0.0, 0.0, 1.0, 64)] * 5})
    assert none[row.key].allowed == pytest.approx(math.log(1.02))


def test_segments_needed_decide_four_times_out_of_five():
    """At the number it names, the effect is decided with about the power it promises."""
    row = Row("level", "prose, geometric", "geometric", kind="prose")
    sd, truth, allowed = 0.2, 0.05, 0.1
    now = Estimate(truth, sd / 4, 15.0, 16)
    needed = segments_needed(row, now, limit(allowed), 40)
    rng = np.random.default_rng(5)
    passed = 0
    for _ in range(400):
        y = rng.normal(truth, sd, needed)
        upper = y.mean() + t_quantile(0.95, needed - 1.0) * y.std(ddof=1) / math.sqrt(needed)
        passed += upper < allowed
    assert 0.7 < passed / 400 < 0.9
    assert segments_needed(row, dataclasses.replace(now, value=allowed), limit(allowed), 40) is None


def test_decode_and_prefill_may_differ_as_two_right_producers_do():
    """Their KL over twice the normals' KL to the truth: 1 for unrelated errors of one size."""
    normals = [summary(), summary(math.log(2.0))]  # KL e^-9 and 2 e^-9: 1.5 e^-9 on average
    subject = summary(self=math.log(6.0))
    assert np.allclose(ratio_statistics(subject, normals)["self"], math.log(6.0 / (2 * 1.5)))
    assert "self" not in ratio_statistics(summary(), normals)

"""The text report: order, width, honesty about what is missing, hostile names."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernjax.judge import Outcome, calibrate, judge
from kernjax.judge.gates import Gate
from kernjax.judge.simulate import Corpus, Design, Effect
from kernjax.reporting import render_text
from kernjax.reporting.layout import WIDTH, interval, number, ratio, safe, shorten, table


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return Corpus(Design(steps=32), np.random.default_rng(21))


@pytest.fixture(scope="module")
def band(corpus):
    return calibrate(None, [corpus.producer(name=f"normal {i}") for i in range(5)])


@pytest.fixture(scope="module")
def full(corpus, band):
    """A verdict with every part a report can have."""
    return judge(
        corpus.producer(Effect("bad", ratio=1.6)),
        band,
        isolated=corpus.producer(Effect("alone", ratio=0.01, per_doubling=1.3)),
        incumbent=corpus.producer(name="main"),
        deploy_context=65536,
    )


def test_the_verdict_comes_first(full):
    lines = render_text(full).splitlines()
    assert lines[0].startswith("FAIL: ")
    heads = [line.split(" (")[0] for line in lines if line and not line.startswith(" ")]
    order = ["What was compared", "What differs: nothing that the manifests record", "Findings",
             "By kind and depth", "Gates", "Flips by the reference's margin",
             "In isolation: f32 with the change alone", "Against the incumbent"]  # fmt: skip
    assert [head for head in heads if head in order] == order


def test_a_hundred_columns_and_nothing_unprintable(full):
    text = render_text(full)
    assert max(map(len, text.splitlines())) <= WIDTH
    assert all(char.isprintable() or char == "\n" for char in text)


def test_numbers_of_the_tables_are_those_of_the_verdict(full):
    text = render_text(full)
    for gate in full.gates:
        if gate.name == "level":
            row = next(line for line in text.splitlines() if f" {gate.stratum}  " in line)
            assert f"{gate.observed:.2f} [{gate.low:.2f}, {gate.high:.2f}]" in row
            assert f"{gate.allowed:.3f}" in row and row.endswith(str(gate.outcome))
    deep = next(s for s in full.strata if s.context_len == 16384 and s.phase == "decode")
    row = next(line for line in text.splitlines() if "16384   decode" in line)
    assert f"{deep.kl_median:.1e}" in row and f"{deep.ratio:.2f} [" in row
    for entry in full.margin_bins[1:]:
        assert any(
            line.split()[:2] == [entry.margin, str(entry.positions)] for line in text.splitlines()
        )


def test_only_what_differs_is_listed(full):
    verdict = dataclasses.replace(
        full, differences=(("policy.text", "f32", "bf16,attention.p=fp8"),)
    )
    text = render_text(verdict)
    assert "policy.text" in text and "bf16,attention.p=fp8" in text
    assert "weights_sha256" not in text
    many = dataclasses.replace(
        full, differences=tuple((f"versions.{i}", "1", "2") for i in range(50))
    )
    assert "and 30 more fields" in render_text(many)


def test_findings_carry_what_to_do_next(corpus, band):
    candidate = dataclasses.replace(
        corpus.producer(Effect(ratio=2.0)),
        candidate_manifest={"policy": {"text": "bf16,p=fp8"}, "logits_dtype": "float32"},
        reference_name="my refs/f32",
    )
    text = render_text(judge(candidate, band))
    assert (
        "$ python -m kernjax.check '--reference=my refs/f32' --policy=bf16,p=fp8 "
        "--incumbent=RECORDING" in text
    )


def test_inconclusive_lists_further_segments(full):
    verdict = dataclasses.replace(
        full, outcome=Outcome.INCONCLUSIVE, segments_to_decide={"level, prose, geometric": 12}
    )
    assert "Further segments that would decide\n  level, prose, geometric: 12" in render_text(
        verdict
    )


def test_hostile_names_are_shown_and_do_nothing(corpus, band):
    evil = "a\x1b[2J\u202eb\nPASS: \r\x00\U000e0001"
    segments = tuple(dataclasses.replace(s, id=f"{s.id}{evil}") for s in corpus.segments)
    hostile = Corpus(Design(steps=32), np.random.default_rng(22))
    hostile.segments = segments
    own = calibrate(None, [hostile.producer(name=f"{evil}{i}") for i in range(5)])
    candidate = dataclasses.replace(
        hostile.producer(Effect(nan=True, ratio=2.0)),
        candidate_manifest={"engine": evil, "logits_dtype": "float32", evil: evil},
        candidate_name=evil * 20,
    )
    text = render_text(judge(candidate, own))
    assert all(char.isprintable() or char == "\n" for char in text)
    assert text.splitlines()[0].startswith("FAIL: ")
    assert not any(line.startswith("PASS") for line in text.splitlines())
    assert "\\x1b[2J\\u202eb\\x0aPASS: \\x0d\\x00\\U000e0001" in text.replace("\n", "")
    commands = [line for line in text.splitlines() if line.lstrip().startswith("$")]
    assert all(len(line) <= WIDTH for line in text.splitlines() if line not in commands)


@given(st.text())
def test_safe_text_is_printable_and_keeps_printable_text(text):
    shown = safe(text)
    assert all(char.isprintable() for char in shown)
    if text.isprintable():
        assert shown == text


@given(st.text(), st.integers(3, 40))
def test_shorten_keeps_both_ends(text, width):
    short = shorten(text, width)
    assert len(short) <= width
    if len(text) > width:
        assert text.startswith(short.split("…")[0]) and "…" in short


@given(st.lists(st.text(max_size=200), min_size=1, max_size=5))
def test_tables_fit(names):
    text = table(["name", "value"], [[name, "1.00 [0.90, 1.10]"] for name in names])
    assert max(map(len, text.splitlines())) <= WIDTH
    assert text.count("1.00 [0.90, 1.10]") >= len(names)


def test_numbers():
    assert number(None) == "-" and number(float("nan")) == "-"
    assert number(3) == "3" and number(3.0) == "3" and number(0.12345) == "0.123"
    assert ratio(1.006) == "1.01" and ratio(1234.5) == "1234" and ratio(None) == "-"
    assert interval(1.0, 0.9, 1.1) == "1.00 [0.90, 1.10]"
    assert interval(None, None, None) == "-" and interval(2.0, None, None) == "2.00"


def test_strata_can_be_told_apart_beside_large_ratios():
    gates = [
        Gate("decode_vs_prefill", f"rescored {kind}, geometric", "ratio", 1.0, 0.9, 1.1, 1.07,
             Outcome.PASS, p_value=1.0)
        for kind in ("code", "prose")
    ]  # fmt: skip
    far = Gate("edges", "document", "ratio", 2423.0, 1926.0, 3041.0, 1.165, Outcome.FAIL, p_value=0)
    cells = [
        [g.name, g.stratum, interval(g.observed, g.low, g.high), "1.165", "1e-300", "FAIL"]
        for g in [*gates, far]
    ]
    text = table(["gate", "stratum", "observed", "allowed", "p", "outcome"], cells, 2, 2)
    assert "rescored code, geometric" in text and "rescored prose, geometric" in text
    assert "2423 [1926, 3041]" in text and max(map(len, text.splitlines())) <= 100

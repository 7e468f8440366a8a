"""What changed, how sure, where, what next: from manifests and gates, for each outcome."""

from __future__ import annotations

import dataclasses
import functools
import json
import re

import pytest
from report_cases import amber, corpus, green, hostile, red
from test_reporting_page import LOCATE

from kernjax.judge import Finding, Outcome, calibrate, judge
from kernjax.judge.simulate import Effect
from kernjax.reporting import load_verdict, render_markdown, render_text, verdict_line, write_files
from kernjax.reporting.summary import GATES, HEADLINES, changed, first_step, in_short


def manifest(**changes) -> dict:
    fields = {"attention.p": "bf16", "weights": "bf16"} | changes.pop("fields", {})
    base = {
        "policy": {"text": "bf16", "fields": fields, "overrides": []},
        "kernels": {},
        "engine": "jax",
        "versions": {"jax": "1", "kernjax": "2"},
        "device": "cpu",
        "commit": "a",
        "logits_dtype": "float32",
    }
    return base | changes


@functools.cache
def band():
    """Normal producers with manifests; the second one is what runs now."""
    made = [corpus().producer(name=f"normal {i}") for i in range(5)]
    texts = ("chunk32", "bf16", "block256", "p_f32", "window1024")
    return calibrate(
        None,
        [
            dataclasses.replace(
                one,
                candidate_manifest=manifest(
                    policy={**manifest()["policy"], "text": text}, commit=str(text)
                ),
            )
            for one, text in zip(made, texts, strict=True)
        ],
    )


def judged(candidate_manifest: dict, incumbent: dict | None = None):
    bad, main = corpus().producer(Effect("bad", ratio=4.0)), corpus().producer(name="main")
    return judge(
        dataclasses.replace(bad, candidate_manifest=candidate_manifest),
        band(),
        incumbent=incumbent and dataclasses.replace(main, candidate_manifest=incumbent),
    )


def test_the_change_is_against_what_runs_now():
    verdict = judged(manifest(fields={"attention.p": "fp8"}, commit="b"))
    assert verdict.changed_from == "bf16"
    assert verdict.changes == (("attention.p", "bf16", "fp8"),)  # not the commit
    assert (
        changed(verdict) == "attention.p: fp8 instead of bf16. All else is as in production (bf16)."
    )


def test_a_kernel_by_its_name_and_its_bytes():
    mine = {"attention.prefill": {"name": "mine:prefill", "sha256": "0123456789", "layers": "3"}}
    verdict = judged(manifest(kernels=mine))
    assert "attention.prefill: mine:prefill@layers=3 (01234567) instead of the built-in op" in (
        changed(verdict)
    )
    other = {"attention.prefill": {**mine["attention.prefill"], "sha256": "9876543210"}}
    verdict = judged(manifest(kernels=mine), manifest(kernels=other))
    assert verdict.changed_from.startswith("bf16 attention.prefill=mine:prefill")
    assert verdict.changes == (
        (
            "attention.prefill",
            "mine:prefill@layers=3 (98765432)",
            "mine:prefill@layers=3 (01234567)",
        ),
    )
    assert "All else is as in the incumbent" in changed(verdict)


def test_other_versions_are_a_change_and_many_fields_are_counted():
    one = judged(manifest(versions={"jax": "9", "kernjax": "2"}, device="tpu"))
    assert set(one.changes) == {("versions.jax", "1", "9"), ("device", "cpu", "tpu")}
    sites = [f"site{i}" for i in range(9)]
    many = judged(
        manifest(fields=dict.fromkeys(sites, "m7")), manifest(fields=dict.fromkeys(sites, "f32"))
    )
    assert "and 5 more fields" in changed(many)
    assert changed(judged(manifest())).startswith("Nothing that is recorded")


def test_a_field_that_is_younger_than_the_band_is_no_change_unless_asked_for():
    fields = {**manifest()["policy"]["fields"], "dequantise": "load"}
    policy = {**manifest()["policy"], "fields": fields}
    assert judged(manifest(policy=policy)).changes == ()
    policy = {
        **policy,
        "fields": {**fields, "dequantise": "layer"},
        "text": "bf16,dequantise=layer",
    }
    assert judged(manifest(policy=policy)).changes == (("dequantise", "None", "layer"),)


def test_without_a_manifest_of_production_it_says_so():
    assert red().changed_from.startswith("main") and amber().changed_from == ""
    assert changed(amber()).startswith("What runs now was not recorded")


def test_it_comes_back_from_the_file_and_older_files_do_without(tmp_path):
    verdict = judged(manifest(fields={"attention.p": "fp8"}))
    write_files(verdict, tmp_path)
    loaded, line = load_verdict(tmp_path)
    assert (loaded.changed_from, loaded.changes) == (verdict.changed_from, verdict.changes)
    del line["changes"], line["changed_from"]
    (tmp_path / "verdict.json").write_text(json.dumps(line))
    assert load_verdict(tmp_path)[0].changes == ()


@pytest.mark.parametrize("make", [red, amber, green, hostile])
def test_four_answers_in_every_format(make):
    verdict = make()
    answers = dict(in_short(verdict))
    assert list(answers) == ["What changed", "How sure", "Where", "What next"]
    text = render_markdown(verdict)
    assert text.splitlines()[2].startswith(f"**{HEADLINES[verdict.outcome]}**")
    assert text.count("\n- **What") == 2
    assert "  changed    " in render_text(verdict)


def test_how_sure_has_the_numbers_of_the_gate():
    verdict = judged(manifest())
    levels = [
        g for g in verdict.gates
        if g.name == "level" and g.context_len is None and g.outcome is Outcome.FAIL
    ]  # fmt: skip
    worst = min(levels, key=lambda g: g.p_value)
    text = dict(in_short(verdict))["How sure"]
    assert text.startswith(f"On {worst.kind} ") and f"{worst.observed:.2f} times" in text
    assert f"at least {worst.low:.2f} times; {worst.allowed:.4g} times is allowed" in text


def alone(name: str, outcome: Outcome = Outcome.FAIL, **changes):
    """A verdict that only rows of this gate decided."""
    verdict = judged(manifest())
    gates = [
        dataclasses.replace(g, outcome=outcome, **changes)
        if g.name == name
        else dataclasses.replace(g, outcome=Outcome.PASS)
        for g in verdict.gates
    ]
    return dataclasses.replace(verdict, gates=tuple(gates), outcome=outcome)


def untested():
    gates = [dataclasses.replace(g, outcome=Outcome.NOT_TESTED) for g in amber().gates]
    return dataclasses.replace(amber(), gates=tuple(gates))


@pytest.mark.parametrize(
    "make, words",
    [
        (red, r"Certain: values are NaN or infinite at [1-9]\d* recorded positions, and .*\."),
        (
            lambda: alone("confident_flips", observed=3.0),
            r"None of the band's 5 normal producers changes a first choice where the reference is "
            r"this clear \(margin >.*\); the candidate does, 3 times, which is no rounding's\. "
            r"Its distance as a whole \(KL\) is \d.* times normal on code and \d.* on prose\.",
        ),
        (
            lambda: alone("confident_flips", Outcome.INCONCLUSIVE, observed=1.0),
            r"None of .*; the candidate does, once, which may be chance\. Its distance .*\.",
        ),
        (
            lambda: alone("edges", p_value=0.004),
            r"The ratio to normal just after edges \(.*\): \d.* with 95 % bounds; \d.* is allowed\."
            r" Were no more than that true, at most 0\.4 % of runs would come out so\.",
        ),
        (
            lambda: alone("tail_mass", Outcome.INCONCLUSIVE),
            r"Probability that moves .* with 95 % bounds; ±\d.* is allowed\.",
        ),
        (amber, r"The numbers alone would pass: .* it is at most .*withholds the PASS\."),
        (green, r"Certain that nothing changed: .* equal to the last bit, at all \d+ positions.*"),
        (
            lambda: dataclasses.replace(amber(), outcome=Outcome.FAIL),
            r"It was counted, not estimated: there is no doubt of it\.",
        ),
        (untested, r"(\d+) of \1 gate rows could not be tested on these segments, .*\."),
    ],
)
def test_how_sure_is_no_repetition_of_the_headline(make, words):
    verdict = make()
    answer = dict(in_short(verdict))["How sure"]
    assert re.fullmatch(words, answer), answer
    assert answer not in verdict.reason and verdict.reason.rstrip(".") not in answer


def test_a_pass_names_its_bounds_and_its_depth():
    candidate = dataclasses.replace(
        corpus().producer(name="fine"), candidate_manifest=manifest(fields={"attention.p": "f32"})
    )
    verdict = dataclasses.replace(
        judge(candidate, band()), outcome=Outcome.PASS, findings=(), identical=False
    )
    answers = dict(in_short(verdict))
    for kind in ("code", "prose"):
        highs = [g.high for g in verdict.gates
                 if g.name == "level" and g.kind == kind and g.context_len is None]  # fmt: skip
        assert f"{max(highs):.2f} times ({kind})" in answers["How sure"]
    assert answers["What next"] == (
        f"Merge, if contexts up to {verdict.up_to_context} are what you serve."
    )


def test_where_names_growth_places_and_the_layer():
    grows = judge(corpus().producer(Effect("grows", per_doubling=1.6)), band())
    assert "It grows with the context" in dict(in_short(grows))["Where"]
    even = dict(in_short(judge(corpus().producer(Effect(ratio=3.0)), band())))["Where"]
    assert re.search(r"no more than normal with the context \(.*\) nor over the decode steps", even)
    edges = judge(corpus().producer(Effect("edges", edges=9.0)), band())
    assert "ust after edges" in dict(in_short(edges))["Where"]
    broken = dict(in_short(red(), LOCATE))
    assert "alues that are not finite" in broken["Where"]
    assert f"By layer: {LOCATE['sentence']}." in broken["Where"]
    assert broken["What next"].startswith("Fix it there, and check again.")


def test_what_was_located_is_not_to_be_located_again():
    locate = Finding("fail", "far", "Find it.", "python -m kernjax.locate --policy=fp8")
    near = Finding("inconclusive", "near", "Record more.")
    last = Finding("note", "main?", "Record it.", "python -m kernjax.check --incumbent=RECORDING")
    verdict = dataclasses.replace(red(), findings=(locate, near, last))
    assert first_step(verdict) is locate and first_step(verdict, located=True) is last
    assert dict(in_short(verdict))["What next"] == "Find it."
    answer = dict(in_short(verdict, LOCATE))["What next"]
    assert answer == "Fix it there, and check again. main? Record it."


def test_every_gate_is_explained():
    for make in (red, amber, green):
        assert {gate.name for gate in make().gates} <= set(GATES)
        line = verdict_line(make())
        assert line["changes"] == [list(row) for row in make().changes]


def test_where_names_the_edges():
    """ "Just after edges" alone does not lead to a document's first token."""
    verdict = red()
    far = [g for g in verdict.gates if g.name != "edges"]
    edges = dataclasses.replace(
        far[0], name="edges", stratum="document", kind=None, outcome=verdict.outcome
    )
    where = dict(in_short(dataclasses.replace(verdict, gates=(*far, edges))))["Where"]
    assert "ust after edges (document)" in where

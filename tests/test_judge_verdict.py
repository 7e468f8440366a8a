"""Every rule of the verdict, on synthetic candidates whose fault is known."""

from __future__ import annotations

import dataclasses
import json

import judge_recordings as made
import numpy as np
import pytest

import kernjax
from kernjax.base.errors import UserError
from kernjax.judge import Band, Outcome, calibrate, compare, judge
from kernjax.judge.band import content_sha256
from kernjax.judge.comparison import PREFILL, Comparison
from kernjax.judge.simulate import Corpus, Design, Effect
from kernjax.judge.strata import manifest_differences

DESIGN = Design(steps=64)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return Corpus(DESIGN, np.random.default_rng(11))


@pytest.fixture(scope="module")
def band(corpus):
    return calibrate(None, [corpus.producer(name=f"normal {i}") for i in range(5)])


@pytest.fixture(scope="module")
def good(corpus, band) -> Comparison:
    """A normal that this band passes (not every normal does: that is the simulation's test)."""
    for _ in range(20):
        candidate = corpus.producer(name="good")
        if judge(candidate, band).outcome is Outcome.PASS:
            return candidate
    raise AssertionError("none of 20 normals passed")


def texts(verdict, severity: str) -> str:
    return " | ".join(f.text for f in verdict.findings if f.severity == severity)


def outcome_of(verdict, gate: str) -> set[str]:
    return {str(g.outcome) for g in verdict.gates if g.name == gate}


def part(c: Comparison, keep: list[int]) -> Comparison:
    """The comparison of a run that covered these segments only."""
    rows = np.isin(c.segment, keep)
    arrays = {
        f.name: getattr(c, f.name)[rows]
        for f in dataclasses.fields(c)
        if isinstance(getattr(c, f.name), np.ndarray)
    }
    arrays["segment"] = np.searchsorted(keep, arrays["segment"])
    return dataclasses.replace(c, segments=tuple(c.segments[i] for i in keep), **arrays)


def test_pass_states_its_limit_and_its_depth(band, good):
    verdict = judge(good, band)
    assert verdict.outcome == "PASS" and verdict.exit_code == 0
    assert verdict.up_to_context == 16384
    assert "no worse than" in verdict.reason and "up to context 16384" in verdict.reason
    assert all(g.outcome is Outcome.PASS for g in verdict.gates)
    assert verdict.positions == 128 * DESIGN.steps and verdict.segments == 128
    assert not verdict.segments_to_decide


@pytest.mark.parametrize(
    ("effect", "gate"),
    [
        (Effect(ratio=2.0), "level"),
        (Effect(spikes=0.01), "level"),
        (Effect(per_doubling=1.15), "growth_context"),
        (Effect(late=1.6), "growth_decode"),
        (Effect(edges=4.0), "edges"),
        (Effect(rescored=2.0), "decode_vs_prefill"),
        (Effect(own=12.0), "decode_vs_prefill"),
        (Effect(nan=True), "nonfinite"),
    ],
)
def test_each_kind_of_fault_fails_its_own_gate(corpus, band, effect, gate):
    verdict = judge(corpus.producer(effect), band)
    assert verdict.outcome is Outcome.FAIL and verdict.exit_code == 1
    assert "FAIL" in outcome_of(verdict, gate)
    assert texts(verdict, "fail")


def test_all_gates_are_evaluated_after_a_failure(corpus, band):
    verdict = judge(corpus.producer(Effect(ratio=2.0, edges=4.0, nan=True)), band)
    assert {g.name for g in verdict.gates if g.outcome == "FAIL"} >= {"nonfinite", "level", "edges"}
    assert len(verdict.gates) == len(band.rows) + 2


def test_non_finite_everywhere_is_a_fail_and_no_crash(band, good):
    dead = dataclasses.replace(
        good,
        kl=np.full_like(good.kl, np.nan),
        self_kl=np.full_like(good.kl, np.nan),
        margin_change=np.full_like(good.kl, np.nan),
        tail_change=np.full_like(good.kl, np.nan),
        finite=np.zeros_like(good.finite),
        flipped=np.zeros_like(good.finite),
    )
    verdict = judge(dead, band)
    assert verdict.outcome is Outcome.FAIL
    assert "not finite" in verdict.reason
    assert verdict.kl["mean"] is None
    assert outcome_of(verdict, "level") == {"NOT TESTED"}


def test_one_nan_names_its_place(corpus, band):
    candidate = corpus.producer(Effect(nan=True))
    row = int(np.argmax(~candidate.finite))
    name = candidate.segments[candidate.segment[row]].id
    assert f"segment {name}, position {candidate.pos[row]}" in texts(judge(candidate, band), "fail")


def with_flips(c: Comparison, places: list[tuple[int, float]]) -> Comparison:
    """The comparison with a flip at the first row of each (segment, margin)."""
    flipped, margin = c.flipped.copy(), c.margin.copy()
    for segment, value in places:
        row = int(np.argmax((c.segment == segment) & (c.phase == 1)))
        flipped[row], margin[row] = True, value
    return dataclasses.replace(c, flipped=flipped, margin=margin)


def test_a_red_verdict_names_the_next_command(band, corpus):
    """The first finding says how to find the layer and op; the incumbent is a note."""
    kernel = {"name": "mine.py:decode", "sha256": "f", "layers": "3-5"}
    manifest = {
        "logits_dtype": "float32",
        "policy": {"text": "fp8"},
        "kernels": {"attention.decode": kernel},
    }
    red = dataclasses.replace(corpus.producer(Effect(ratio=2.0)), candidate_manifest=manifest)
    saved = dataclasses.replace(band, path="my band.json")
    verdict = judge(red, saved, flags={"model": "DIR"})
    first = verdict.findings[0]
    assert first.severity == "fail" and "which layer, op" in first.todo
    assert first.command == (
        "python -m kernjax.locate --reference=reference '--band=my band.json' --model=DIR "
        "--policy=fp8 --kernel=attention.decode=mine.py:decode@layers=3-5"
    )
    commands = [f.command for f in verdict.findings if f.command]
    assert len(commands) == 2 and commands[1].endswith("--incumbent=RECORDING")
    assert not any("kernjax.locate" in f.command for f in judge(corpus.producer(), band).findings)
    # Another engine's recording cannot be run again here.
    foreign = dataclasses.replace(red, candidate_manifest={**manifest, "engine": "vllm"})
    found = [f.command for f in judge(foreign, band).findings if f.command]
    assert found == [
        "python -m kernjax.check --reference=reference "
        f"'--candidate={red.candidate_name}' --incumbent=RECORDING"
    ]


def test_a_wrong_rescoring_alone_fails_while_decode_is_right(corpus, band):
    """Up to four times the normal KL used to pass: one-shot prefill and decode may differ so."""
    verdict = judge(corpus.producer(Effect(rescored=1.5)), band)
    failed = {(g.name, g.stratum) for g in verdict.gates if g.outcome is Outcome.FAIL}
    assert ("decode_vs_prefill", "rescored prose, geometric") in failed
    assert outcome_of(verdict, "level") == {"PASS"}
    row = next(g for g in verdict.gates if g.stratum == "rescored prose, geometric")
    assert row.observed == pytest.approx(1.5, rel=0.08)
    assert "On rescored" in texts(verdict, "fail")
    assert "times normal (geometric mean)" in texts(verdict, "fail")


def test_confident_flips(band, good):
    limit = band.margins["confident_margin"]
    far = 2 * band.margins["largest_flip_margin"]
    between = limit + 0.3 * (max(far, 1.5 * limit) - limit)
    assert limit < between < max(far, 1.5 * limit)
    below = judge(with_flips(good, [(0, 0.99 * limit), (1, 0.98 * limit)]), band)
    assert outcome_of(below, "confident_flips") == {"PASS"}
    if between < far:
        one = judge(with_flips(good, [(0, between)]), band)
        assert one.outcome is Outcome.INCONCLUSIVE
        assert outcome_of(one, "confident_flips") == {"INCONCLUSIVE"}
    two = judge(with_flips(good, [(0, between), (1, between)]), band)
    assert two.outcome is Outcome.FAIL
    assert "2 confident flips at 2 positions in 2 segments" in two.reason
    beyond = judge(with_flips(good, [(0, 1.01 * max(far, limit))]), band)
    assert beyond.outcome is Outcome.FAIL


def test_a_position_flipped_in_decode_and_in_rescoring_is_listed_once(band, good):
    margin = 3 * max(2 * band.margins["largest_flip_margin"], band.margins["confident_margin"])
    flipped, margins, pos = good.flipped.copy(), good.margin.copy(), good.pos.copy()
    first = int(np.argmax((good.segment == 0) & (good.phase == 1)))
    again = first + 1
    pos[again] = pos[first]
    flipped[[first, again]], margins[[first, again]] = True, margin
    reason = judge(dataclasses.replace(good, flipped=flipped, margin=margins, pos=pos), band).reason
    assert "2 confident flips at 1 position in 1 segment (decoded and rescored are two): " in reason
    assert reason.count(f"{good.segments[0].id} at") == 1


def test_two_confident_flips_in_one_segment_are_one_event(corpus, good):
    band = calibrate(None, [corpus.producer(name=f"normal {i}") for i in range(5)])
    band.margins.update(largest_flip_margin=0.5, confident_margin=0.5)
    same = with_flips(good, [(3, 0.6)])
    row = int(np.argmax(same.flipped & (same.margin == 0.6)))
    same.flipped[row + 1], same.margin[row + 1] = True, 0.7
    assert outcome_of(judge(same, band), "confident_flips") == {"INCONCLUSIVE"}


def test_identical_to_the_incumbent(corpus, band, good):
    verdict = judge(good, band, incumbent=dataclasses.replace(good, candidate_name="main"))
    assert verdict.outcome is Outcome.PASS and verdict.identical
    assert verdict.reason.startswith("identical")
    assert "is a PASS" in verdict.reason and "same code path?" in texts(verdict, "warning")


@pytest.mark.parametrize("effect", [Effect(ratio=2.0), Effect(nan=True), Effect(rescored=3.0)])
def test_equal_to_an_incumbent_that_is_wrong_is_as_wrong(corpus, band, effect):
    red = corpus.producer(effect)
    main = dataclasses.replace(red, candidate_name="main")
    same, alone = judge(red, band, incumbent=main), judge(red, band)
    assert same.outcome is alone.outcome is Outcome.FAIL and same.identical
    assert "identical to the incumbent, and both are wrong" in same.reason
    assert "the incumbent too: this change is not the cause" in texts(same, "warning")
    assert [f.text for f in alone.findings if f.severity == "fail"] == [
        f.text for f in same.findings if f.severity == "fail"
    ]


def test_equal_to_the_incumbent_decides_what_the_corpus_cannot():
    """A change that changes nothing is not held back by a corpus that is too small."""
    thin = Corpus(Design(per_cell=8, steps=64), np.random.default_rng(2))
    band = calibrate(None, [thin.producer(name=f"n{i}") for i in range(5)])
    candidate = thin.producer(Effect(ratio=0.8))
    main = dataclasses.replace(candidate, candidate_name="main")
    verdict = judge(candidate, band, incumbent=main)
    assert verdict.outcome is Outcome.PASS and verdict.identical
    assert "against the truth alone it would be INCONCLUSIVE" in verdict.reason
    assert "Coverage is thin" in texts(verdict, "warning")
    # The same recording under another name is no incumbent: nothing was changed at all.
    itself = [dataclasses.replace(c, candidate_identity="x") for c in (candidate, main)]
    same = judge(itself[0], band, incumbent=itself[1])
    assert same.outcome is Outcome.INCONCLUSIVE
    assert "two of the same producer" in texts(same, "warning")


def test_equal_to_an_incumbent_that_is_the_reference(band, good):
    nothing = dataclasses.replace(good, kl=np.zeros_like(good.kl), bitwise_reference=True)
    verdict = judge(nothing, band, incumbent=nothing)
    assert verdict.outcome is Outcome.INCONCLUSIVE and "own code path" in verdict.reason


def test_against_another_incumbent(corpus, band, good):
    verdict = judge(good, band, incumbent=corpus.producer(Effect(ratio=0.5)))
    assert not verdict.identical
    rows = {(r.kind, r.mean): r for r in verdict.incumbent}
    row = rows["prose", "geometric"]
    assert row.low < 2.0 < row.high * 1.05 and row.ratio == pytest.approx(2.0, rel=0.1)
    assert row.candidate / row.incumbent == pytest.approx(row.ratio, rel=0.02)
    assert "times the incumbent's" in texts(verdict, "warning")
    assert verdict.outcome is Outcome.PASS  # reported; the band decides


def test_partial_runs_never_pass_and_may_fail(corpus, band, good):
    keep = list(range(0, 128, 2))
    partial = judge(part(good, keep), band)
    assert partial.outcome is Outcome.INCONCLUSIVE
    assert "64 of 128 segments" in texts(partial, "inconclusive")
    assert partial.segments == 64
    bad = corpus.producer(Effect(ratio=3.0))
    assert judge(part(bad, keep), band).outcome is Outcome.FAIL
    same = judge(part(good, keep), band, incumbent=part(good, keep))
    assert same.outcome is Outcome.INCONCLUSIVE and not same.identical
    assert judge(part(good, [5]), band).outcome is Outcome.INCONCLUSIVE  # no interval, no crash


def test_thin_coverage_says_what_is_missing():
    thin = Corpus(Design(per_cell=8, steps=64), np.random.default_rng(2))
    band = calibrate(None, [thin.producer(name=f"n{i}") for i in range(5)])
    verdict = judge(thin.producer(Effect(ratio=0.8)), band)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "8 independent segments of code at context 16384" in texts(verdict, "inconclusive")
    assert verdict.segments_to_decide["coverage, prose, 16384"] == 8


def test_the_same_text_twice_is_one_segment(corpus, band, good):
    deep = [i for i, s in enumerate(good.segments) if s.kind == "prose" and s.context_len == 16384]
    target = good.reference_target.copy()
    first = target[good.segment == deep[0]]
    for i in deep[1:4]:
        target[good.segment == i] = first
    verdict = judge(dataclasses.replace(good, reference_target=target), band)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "13 independent segments of prose" in texts(verdict, "inconclusive")


@pytest.mark.parametrize(
    ("mass", "outcome", "severity"),
    [(0.1, "PASS", None), (0.3, "PASS", "warning"), (0.5, "INCONCLUSIVE", "inconclusive")],
)
def test_mass_outside_the_recorded_ids(band, good, mass, outcome, severity):
    verdict = judge(dataclasses.replace(good, tail_mass=np.full_like(good.tail_mass, mass)), band)
    assert verdict.outcome == outcome
    found = [f.severity for f in verdict.findings if "outside the recorded ids" in f.text]
    assert set(found) == ({severity} if severity else set())


def test_a_repeat_must_be_bitwise_equal(corpus, band, good):
    assert judge(good, band, repeat=good).outcome is Outcome.PASS
    verdict = judge(good, band, repeat=corpus.producer(name="good"))
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "not bitwise equal" in texts(verdict, "inconclusive")


def test_a_candidate_that_is_the_reference(band, good):
    nothing = dataclasses.replace(good, kl=np.zeros_like(good.kl), bitwise_reference=True)
    verdict = judge(nothing, band)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "own code path" in texts(verdict, "inconclusive")


def test_a_candidate_that_is_one_of_the_normals(corpus):
    members = [corpus.producer(name=f"member {i}") for i in range(5)]
    band = calibrate(None, members)
    ratios = [p["ratio"]["prose, geometric"] for p in band.producers]
    index = int(np.argmax(np.abs(np.log(ratios))))
    assert abs(np.log(ratios[index])) > 0.01
    verdict = judge(members[index], band)
    assert f"member {index}" in texts(verdict, "note")
    # Its own numbers are left out of what it is compared with: the leave-one-out ratio.
    row = next(g for g in verdict.gates if (g.name, g.stratum) == ("level", "prose, geometric"))
    assert row.observed == pytest.approx(ratios[index], rel=6e-4)


@pytest.mark.parametrize(
    ("deploy", "outcome"),
    [(None, "PASS"), (16384, "PASS"), (65536, "PASS"), (65537, "INCONCLUSIVE")],
)
def test_deployment_beyond_four_times_the_depth(band, good, deploy, outcome):
    verdict = judge(good, band, deploy_context=deploy)
    assert verdict.outcome == outcome
    assert verdict.up_to_context == 16384  # extrapolation never extends a PASS
    if deploy == 65536:
        assert "holds up to 16384" in texts(verdict, "warning")


def test_growth_that_would_leave_the_band_by_the_deployment(corpus, band):
    """Below normal at every depth measured, but not for long: no PASS for deeper.

    0.35 times 1.2 a doubling is 0.87 at 16384, five doublings on, and 1.25 at 65536.
    """
    candidate = corpus.producer(Effect(ratio=0.35, per_doubling=1.2))
    assert judge(candidate, band).outcome is Outcome.PASS
    verdict = judge(candidate, band, deploy_context=65536)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "at the deployment's 65536" in texts(verdict, "inconclusive")


def test_isolated_lens(corpus, band, good):
    small = corpus.producer(Effect(ratio=0.001, per_doubling=1.2))
    verdict = judge(good, band, isolated=small, deploy_context=65536)
    assert verdict.outcome is Outcome.PASS
    law = next(
        row for row in verdict.isolated_laws if (row.kind, row.mean) == ("prose", "geometric")
    )
    # KL grows 1.2 times per doubling: an exponent of log2(1.2) = 0.263.
    assert law.exponent == pytest.approx(np.log2(1.2), abs=0.03)
    assert law.at_context == 65536 and not law.leaves
    depths = [row for row in verdict.isolated if (row.kind, row.mean) == ("prose", "geometric")]
    assert [row.context_len for row in depths] == [512, 2048, 8192, 16384]
    assert depths[0].ratio == pytest.approx(1.001, abs=3e-4)

    growing = corpus.producer(Effect(ratio=0.01, per_doubling=1.5))
    here = judge(good, band, isolated=growing)
    deeper = judge(good, band, isolated=growing, deploy_context=65536)
    assert deeper.outcome is Outcome.INCONCLUSIVE
    assert "would leave the band" in texts(deeper, "inconclusive")
    fitted = next(
        row for row in deeper.isolated_laws if (row.kind, row.mean) == ("prose", "geometric")
    )
    # 0.01 * 1.5^d reaches T - 1 after d doublings of 512.
    doublings = np.log((fitted.allowed - 1) / 0.01) / np.log(1.5)
    assert fitted.leaves_at == pytest.approx(512 * 2**doublings, rel=0.25)
    assert here.isolated_laws[0].at_context == 16384
    assert here.outcome is Outcome.PASS  # measured in place up to there
    assert "In isolation the change grows on prose" in texts(here, "note")


def test_isolated_with_few_depths_is_not_extrapolated():
    shallow = Corpus(Design(contexts=(512, 2048), steps=64), np.random.default_rng(4))
    band = calibrate(None, [shallow.producer(name=f"n{i}") for i in range(5)])
    alone = shallow.producer(Effect(ratio=0.001))
    verdict = judge(shallow.producer(Effect(ratio=0.7)), band, isolated=alone, deploy_context=4096)
    assert verdict.isolated_laws[0].exponent is None
    assert "fewer than 4 depths" in texts(verdict, "warning")


def test_inconclusive_says_how_many_segments_would_decide(corpus, band):
    for _ in range(10):
        verdict = judge(corpus.producer(Effect(ratio=1.09)), band)
        if verdict.outcome is Outcome.INCONCLUSIVE and verdict.segments_to_decide:
            break
    assert verdict.exit_code == 2
    assert all(count > 0 for count in verdict.segments_to_decide.values())
    assert "would decide" in " ".join(f.todo for f in verdict.findings)


def test_a_single_strange_segment_is_named(band, good):
    kl = good.kl.copy()
    kl[(good.segment == 40) & (good.phase != PREFILL)] *= 50
    verdict = judge(dataclasses.replace(good, kl=kl), band)
    assert verdict.outcome is not Outcome.PASS
    assert good.segments[40].id in texts(verdict, "warning")


def scaled(c: Comparison, segments, factor: float, phase: int | None = None) -> Comparison:
    """The comparison with the KL of some segments multiplied, in one phase or in all."""
    kl = c.kl.copy()
    kl[np.isin(c.segment, segments) & ((c.phase == phase) | (phase is None))] *= factor
    return dataclasses.replace(c, kl=kl)


@pytest.mark.parametrize("phase", [1, 2])
def test_one_segment_far_from_normal_is_no_pass(band, good, phase):
    """A mean over 128 segments forgives one that is three times normal; a stale slot is that."""
    assert judge(scaled(good, [40], 1.3, phase), band).outcome is Outcome.PASS
    verdict = judge(scaled(good, [40], 4.0, phase), band)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    named = texts(verdict, "inconclusive")
    assert f"{good.segments[40].id} " in named and "no normal run comes near" in named


def test_segments_that_are_the_reference_do_not_make_up_for_others(corpus, band):
    """Half of the recording is the reference's own, the other half 1.5 times normal."""
    bad = corpus.producer(Effect(ratio=1.5))
    assert judge(bad, band).outcome is Outcome.FAIL
    half = judge(scaled(bad, range(0, 128, 2), 0.0), band)
    assert half.outcome is Outcome.INCONCLUSIVE
    assert "64 of 128 segments equal the reference to the last bit" in texts(half, "inconclusive")


def test_what_passes_for_the_wrong_reason_is_said(corpus, band, good):
    close = judge(scaled(good, range(128), 0.01), band)
    assert "times nearer to the truth than any normal" in texts(close, "warning")
    windows = {"prefill_window": 2048}
    other = dataclasses.replace(
        good,
        reference_manifest={**good.reference_manifest, **windows},
        candidate_manifest={**good.candidate_manifest, "prefill_window": 1024},
    )
    assert "1024 tokens long, the reference's 2048" in texts(judge(other, band), "warning")
    assert "without a known-bad recording" in texts(judge(good, band), "note")
    producer = {**band.producers[2], "digest": good.candidate_digest, "policy": {"text": "bf16"}}
    twins = dataclasses.replace(
        band, producers=[*band.producers[:2], producer, *band.producers[3:]]
    )
    changed = {**good.candidate_manifest, "policy": {"text": "bf16"}, "kernels": {"x": {}}}
    same = dataclasses.replace(good, candidate_manifest=changed)
    assert "the same code path?" in texts(judge(same, twins), "warning")


def test_an_isolated_run_of_another_model_is_refused(band, good):
    manifest = {"model": {"weights_sha256": "z"}}
    with pytest.raises(UserError, match="calibrated on model"):
        judge(good, band, isolated=dataclasses.replace(good, reference_manifest=manifest))


def test_bands_and_recordings_that_do_not_belong_together(band, good):
    cases = {
        "model": {"model": {"weights_sha256": "z"}},
        "corpus": {"corpus": {"sha256": "z"}},
        "tokenizer": {"tokenizer_sha256": "z"},
    }
    for message, fields in cases.items():
        manifest = {**good.reference_manifest, **fields}
        with pytest.raises(UserError, match=f"calibrated on {message}"):
            judge(dataclasses.replace(good, reference_manifest=manifest), band)
    with pytest.raises(UserError, match="calibrated against reference"):
        judge(dataclasses.replace(good, reference_identity="another"), band)
    with pytest.raises(UserError, match="logits in bfloat16"):
        judge(dataclasses.replace(good, candidate_manifest={"logits_dtype": "bfloat16"}), band)
    unknown = (dataclasses.replace(good.segments[0], id="other"), *good.segments[1:])
    with pytest.raises(UserError, match="does not know segment 'other'"):
        judge(dataclasses.replace(good, segments=unknown), band)
    with pytest.raises(UserError, match="covers other segments"):
        judge(good, band, incumbent=part(good, [1, 2]))


def test_another_logits_dtype_with_a_producer_of_it(corpus):
    producers = [corpus.producer(name=f"n{i}") for i in range(5)]
    producers[0] = dataclasses.replace(
        producers[0], candidate_manifest={"logits_dtype": "bfloat16"}
    )
    band = calibrate(None, producers)
    candidate = corpus.producer()
    other = dataclasses.replace(candidate, candidate_manifest={"logits_dtype": "bfloat16"})
    assert judge(other, band).outcome == judge(candidate, band).outcome


def test_end_to_end_from_recordings_at_package_level():
    """kernjax.compare and kernjax.judge, the latter being package and function at once."""
    parts = made.segments(per_cell=16, steps=8)
    logits = made.logits_of(parts)
    reference = made.recording(parts, logits)

    def run(seed: int, noise: float):
        moved = logits + np.random.default_rng(seed).normal(0, noise, logits.shape)
        return made.recording(parts, moved, reference, f"run {seed}")

    band = kernjax.judge.calibrate(reference, [run(seed, 0.02) for seed in range(5)])
    bad = kernjax.judge(kernjax.compare(reference, run(6, 0.04)), band)
    assert bad.outcome is Outcome.FAIL
    level = next(g for g in bad.gates if (g.name, g.stratum) == ("level", "prose, geometric"))
    assert level.observed == pytest.approx(4.0, rel=0.15)  # KL goes with the noise squared
    fine = kernjax.judge(compare(reference, run(7, 0.015)), band)
    assert fine.outcome is Outcome.PASS
    assert kernjax.judge(kernjax.compare(reference, run(0, 0.02)), band).findings[-1].text


def test_a_directory_name_is_no_difference_between_the_same_weights():
    model = {"name": "model", "weights_sha256": "a", "config_sha256": "b"}
    same = {"model": {**model, "name": "checkpoint"}, "policy": {"name": "bf16"}}
    other = {"model": {**model, "name": "other", "weights_sha256": "c"}}
    found = manifest_differences({"model": model, "policy": {"name": "f32"}}, same)
    assert found == [("policy.name", "f32", "bf16")]
    names = [name for name, _, _ in manifest_differences({"model": model}, other)]
    assert names == ["model.name", "model.weights_sha256"]


def late_nan(good: Comparison) -> Comparison:
    """Not finite in every segment from some decode step on, as after a state has overflowed."""
    finite, kl = good.finite.copy(), good.kl.copy()
    for segment in np.unique(good.segment):
        rows = np.flatnonzero((good.segment == segment) & (good.phase == 1))
        finite[rows[4:]], kl[rows[4:]] = False, np.nan
    return dataclasses.replace(good, finite=finite, kl=kl)


def test_a_kernel_that_becomes_nan_while_decoding_fails(band, good):
    verdict = judge(late_nan(good), band)
    assert verdict.outcome is Outcome.FAIL and "not finite" in verdict.reason
    judge(good, band, incumbent=late_nan(good))  # a broken incumbent is no crash


def test_nan_in_isolation_fails_however_good_the_rest_is(band, good):
    assert judge(good, band).outcome is Outcome.PASS
    verdict = judge(good, band, isolated=late_nan(good))
    assert verdict.outcome is Outcome.FAIL and "isolation" in verdict.reason


def test_equal_to_the_incumbent_is_no_pass_for_what_is_not_reproducible(band, good):
    again = dataclasses.replace(good, candidate_digest="other", kl=good.kl * 1.01)
    assert judge(good, band, incumbent=good).outcome is Outcome.PASS
    verdict = judge(good, band, incumbent=good, repeat=again)
    assert verdict.outcome is Outcome.INCONCLUSIVE and "twice" in verdict.reason
    lost = dataclasses.replace(late_nan(good), candidate_digest="other")
    assert "finite in one only" in judge(good, band, repeat=lost).reason


@pytest.mark.parametrize("value", [float("inf"), float("nan"), None])
def test_a_band_with_limits_that_are_no_numbers_is_refused(band, tmp_path, value):
    path = tmp_path / "band.json"
    band.save(path)
    data = json.loads(path.read_text())
    data["margins"]["confident_margin"] = value
    path.write_text(json.dumps({**data, "sha256": content_sha256(data)}))
    with pytest.raises(UserError, match="confident_margin"):
        Band.load(path)

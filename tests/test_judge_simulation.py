"""Synthetic truth in small: the full table is printed by `python -m kernjax.judge.simulate`."""

from __future__ import annotations

import numpy as np
import pytest

from kernjax.judge import simulate
from kernjax.judge.case import Case
from kernjax.judge.simulate import Corpus, Design, Effect, study


def test_normals_pass_and_planted_ratios_are_caught():
    effects = [Effect(), *(Effect(f"R {r}", ratio=r) for r in (1.3, 1.5, 2.0))]
    tallies, refused = study(20, seed=5, effects=effects, design=Design(steps=64))
    assert refused == 0
    assert tallies["normal"].outcomes["PASS"] >= 17
    assert tallies["normal"].outcomes["FAIL"] <= 2
    assert all(tallies[f"R {r}"].outcomes["PASS"] == 0 for r in (1.3, 1.5, 2.0))
    assert all(tallies[f"R {r}"].outcomes["FAIL"] >= 18 for r in (1.5, 2.0))


def test_the_detection_floor_is_what_it_says():
    """At the floor that a band claims, an effect fails about 95 times in a hundred."""
    failed = total = 0
    for seed in range(4):
        corpus = Corpus(Design(steps=64), np.random.default_rng([9, seed]))
        band = simulate.calibrate(None, [corpus.producer(name=f"n{i}") for i in range(5)])
        floor = max(band.detection_floor.values())
        for _ in range(6):
            verdict = simulate.judge(corpus.producer(Effect(ratio=floor)), band)
            assert verdict.outcome != "PASS"
            failed += verdict.outcome == "FAIL"
            total += 1
    assert failed >= 0.8 * total


def test_the_simulated_spread_is_that_of_real_runs():
    """sd of ln R per segment 0.04 to 0.25; KL heavy-tailed and clustered along positions."""
    corpus = Corpus(Design(), np.random.default_rng(1))
    band = simulate.calibrate(None, [corpus.producer(name=f"n{i}") for i in range(5)])
    candidate = corpus.producer()
    case = Case(candidate, band)
    assert 0.04 < np.std(case.evidence.statistics["geometric"]) < 0.25
    assert 0.04 < np.std(case.evidence.statistics["arithmetic"]) < 0.4
    decode = candidate.kl[candidate.phase == 1].reshape(128, -1)
    assert np.mean(decode) > 2 * np.median(decode)
    logs = np.log(decode) - np.log(decode).mean(axis=1, keepdims=True)
    assert np.mean(logs[:, 1:] * logs[:, :-1]) / np.mean(logs**2) > 0.3


def test_ties_and_empty_flip_bins():
    """A corpus without any flip, and one whose every flip is a tie, are judged all the same."""
    corpus = Corpus(Design(steps=32), np.random.default_rng(3))
    corpus.margin[:] = 5.0
    band = simulate.calibrate(None, [corpus.producer(name=f"n{i}") for i in range(5)])
    assert band.flip_bins == [] and band.margins["largest_flip_margin"] == 0.0
    verdict = simulate.judge(corpus.producer(Effect(ratio=0.8)), band)
    assert verdict.outcome == "PASS" and verdict.flips == 0


def test_ties_do_not_count_as_flips():
    corpus = Corpus(Design(steps=32, contexts=(512,), ties=0.1), np.random.default_rng(4))
    c = corpus.producer()
    assert c.tie_flipped.sum() > 0.3 * (c.margin == 0).sum() > 0
    assert not (c.flipped & (c.margin == 0)).any()


def test_the_bounds_hold_the_true_ratio_as_often_as_they_claim():
    """One-sided 95 % bounds of R with a known factor; 2 or 3 of 48 misses a side are expected."""
    design = Design(steps=16, contexts=(512, 2048))
    tallies, _ = study(12, seed=2, effects=[Effect(), Effect("R 1.5", ratio=1.5)], design=design)
    rows = sum(tally.rows for tally in tallies.values())
    assert rows == 12 * 2 * 2
    for held in ("below", "above"):
        assert sum(getattr(tally, held) for tally in tallies.values()) >= rows - 8


def test_the_command_prints_its_table(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["simulate", "--draws=1", "--per_cell=4"])
    monkeypatch.setattr(simulate, "study", lambda draws, *rest: ({"x": _tally(draws)}, 0))
    simulate.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["effect", "PASS", "FAIL"]
    # Of one draw: PASS, FAIL, the bound on FAIL, INCONCLUSIVE; no interval was looked at.
    assert lines[1].split()[:6] == ["x", "100.0", "0.0", "95.0", "0.0", "-"]


def test_a_few_effects_by_name(capsys, monkeypatch):
    asked = []

    def study(draws, seed, effects, design):
        asked.extend(effects)
        return {effect.name: _tally(draws) for effect in effects}, 0

    monkeypatch.setattr(simulate, "study", study)
    monkeypatch.setattr("sys.argv", ["simulate", "--draws=1", "--effects=normal,R 2"])
    simulate.main()
    assert [effect.ratio for effect in asked] == [1.0, 2.0]
    assert [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()[1:3]] == [
        "normal",
        "R 2",
    ]
    monkeypatch.setattr("sys.argv", ["simulate", "--effects=R 3"])
    with pytest.raises(SystemExit):
        simulate.main()
    assert "no effect is called R 3" in capsys.readouterr().err


def _tally(draws: int) -> simulate.Tally:
    tally = simulate.Tally()
    tally.outcomes["PASS"] += draws
    return tally


def test_tally_bounds():
    tally = simulate.Tally()
    tally.outcomes.update({"PASS": 97, "FAIL": 3})
    assert tally.share("FAIL") == pytest.approx(0.03)
    assert tally.upper("FAIL") == pytest.approx(0.0757, abs=1e-3)

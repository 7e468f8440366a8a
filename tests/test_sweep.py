"""sweep: the knee by a fixed sequence, its false alarms, and the command on the tiny model."""

from __future__ import annotations

import json

import numpy as np
import pytest
from instrument import run
from shown_commands import shown
from tiny_band import write_band

from kernjax import sweep
from kernjax.judge import calibrate
from kernjax.judge.simulate import Corpus, Design, Effect
from kernjax.judge.sweep import (
    KindRatio,
    Point,
    buckets,
    conclude,
    layer_differences,
    measure,
)
from kernjax.precision import parse_policy
from kernjax.reporting.sweep import has_matplotlib, plot_sweep, sweep_line, sweep_markdown
from kernjax.scoring.session import Session

DESIGN = Design(contexts=(512, 2048), steps=32)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return Corpus(DESIGN, np.random.default_rng(21))


@pytest.fixture(scope="module")
def band(corpus):
    return calibrate(None, [corpus.producer(name=f"normal {i}") for i in range(6)])


def point(name: str, above: bool | None) -> Point:
    ratios = (KindRatio("prose", "geometric", 1.5 if above else 1.0, 0.9, 1.6, 0.5, 16),)
    kl = dict.fromkeys(("median", "mean", "p99", "max"), 1e-5)
    return Point(name, f"bf16,x={name}", kl, 0, 0, () if above is None else ratios, above, ())


@pytest.mark.parametrize(
    ("above", "knee", "last_normal", "decided", "words"),
    [
        ([False, False, True, True], "m6", "m7", True, "the knee is at m6"),
        ([False, False, False, False], None, "m5", True, "no format down to m5"),
        ([True, True, True, True], "m8", None, True, "m8, the widest"),
        ([True, False, True, True], "m6", "m7", True, "By itself m8 is above too"),
        ([True, True, False, False], None, None, False, "no knee: m8, m7 are above"),
        ([False, None, True, True], None, None, False, "m7 has too few segments"),
        ([None, None, None, None], None, None, False, "m5 has too few segments"),
    ],
)
def test_the_knee(above, knee, last_normal, decided, words):
    names = ["m8", "m7", "m6", "m5"]
    found = conclude("x", "bf16", [point(n, a) for n, a in zip(names, above, strict=True)])
    assert (found.knee, found.last_normal, found.decided) == (knee, last_normal, decided)
    assert words in found.sentence and found.sentence.startswith("x on bf16: ")


def test_planted_ratios_have_their_knee(corpus, band):
    ratios = {"m8": 1.0, "m7": 1.0, "m6": 1.4, "m5": 2.0}
    points = [
        measure(corpus.producer(Effect(ratio=ratio), name), band, name, f"bf16,x={name}")
        for name, ratio in ratios.items()
    ]
    found = conclude("x", "bf16", points)
    assert found.knee == "m6" and found.last_normal == "m7"
    for entry in found.points[3].ratios:
        assert entry.low < 2.0 < entry.high
    text = sweep_markdown(found)
    assert text.startswith("x on bf16: the knee is at m6")
    assert "2-8" in text and "prefill" in text
    line = sweep_line(found, {"exit_code": 0})
    assert json.loads(json.dumps(line, allow_nan=False))["points"][2]["above"] is True


def test_a_normal_producer_is_seldom_above():
    """False alarms of one format: at most 5 % are meant; 6 of 36 would be odd."""
    alarms = 0
    for draw in range(6):
        drawn = Corpus(DESIGN, np.random.default_rng([4, draw]))
        band = calibrate(None, [drawn.producer(name=f"normal {i}") for i in range(5)])
        alarms += sum(bool(measure(drawn.producer(), band, "m8", "").above) for _ in range(6))
    assert alarms <= 5


def test_values_that_are_not_finite_are_above(corpus, band):
    found = measure(corpus.producer(Effect(nan=True)), band, "f16", "")
    assert found.non_finite == 1 and found.above


def test_buckets_hold_every_decoded_row_once(corpus):
    comparison = corpus.producer()
    found = buckets(comparison)
    assert [b.label for b in found] == ["prefill", "1", "2-8", "9-32"]
    decode = comparison.phase == 1
    assert sum(b.positions for b in found[1:]) == decode.sum()
    step = (
        comparison.pos - np.array([s.context_len for s in comparison.segments])[comparison.segment]
    )
    rows = decode & (step >= 1) & (step <= 7)  # steps 2 to 8, counted from 1
    assert found[2].kl_mean == pytest.approx(comparison.kl[rows].mean())


def test_layer_differences_are_relative_distances():
    rng = np.random.default_rng(0)
    base = {"stream": rng.normal(size=(2, 3, 5)), "state": rng.normal(size=(1, 3, 2, 4, 4))}
    ours = {"stream": base["stream"].copy(), "state": 1.5 * base["state"]}
    ours["stream"][1] *= 1.25
    layers = layer_differences([ours], [base], [1])
    assert layers[0].stream == 0.0 and layers[0].state is None
    assert layers[1].stream == pytest.approx(0.25) and layers[1].state == pytest.approx(0.5)


@pytest.fixture(scope="module")
def subject(instrument, tmp_path_factory):
    """Flags for the tiny model; its production run lies where the sweep would record it."""
    folder = tmp_path_factory.mktemp("sweep")
    session = Session.open(
        str(instrument.model), str(instrument.corpus), str(instrument.reference), batch_size=8
    )
    session.record(parse_policy("bf16"), folder / "out" / "f32")
    write_band(instrument.reference, folder / "out" / "f32", folder / "band.json")
    return [
        *instrument.subject, "--reference", str(instrument.reference),
        "--band", str(folder / "band.json"), "--output_dir", str(folder / "out"),
    ]  # fmt: skip


def test_the_command_finds_the_knee_of_the_state(subject, capsys):
    """That of the README, with two formats."""
    fewer = {"--bits=4..16": "--bits=2,23"}
    words = [fewer.get(word, word) for word in shown("sweep", "--site=delta_rule.state", *fewer)]
    code = run(sweep, *subject, *words, "--probe", "2")
    out = capsys.readouterr().out
    line = json.loads(out.splitlines()[-1])
    assert code == 0 == line["exit_code"]
    assert line["knee"] == "m2" and line["last_normal"] == "f32"
    assert out.startswith("delta_rule.state on bf16: the knee is at m2")
    unrounded, rounded = line["points"]
    assert all(layer["stream"] == 0 for layer in unrounded["layers"])
    # The first layer is recurrent: its state is a rounding to 2 bits away, |x| 2^-3 at most.
    assert 0.02 < rounded["layers"][0]["state"] < 0.125
    assert rounded["layers"][1]["state"] is None and rounded["layers"][1]["stream"] > 0
    folder = subject[-1]
    assert f"{folder}" and json.loads(open(f"{folder}/sweep.json").read())["knee"] == "m2"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--site", "delta_rule.state"], "--bits"),
        (["--site", "delta_rule.state", "--bits", "4..16", "--formats", "bf16"], "one only"),
        (["--site", "delta_rule.state", "--bits", "0..4"], "1 to 23"),
        (["--site", "delta_rule.state", "--bits", "many"], "many"),
        (["--site", "delta_rule.stat", "--bits", "4"], "delta_rule.state"),
        (["--site", "attention.row_sum", "--bits", "4"], "attention.row_sum"),
        (["--site", "delta_rule.state", "--formats", "m4,m4"], "twice"),
        (["--bits", "4"], "--site"),
    ],
)
def test_bad_flags(flags, message, capsys):
    assert run(sweep, *flags) == 3
    assert message in capsys.readouterr().err


def test_a_site_that_never_runs_is_refused(subject, capsys):
    """No prefill window ends before another in this corpus, and the rule is not chunked in f16."""
    assert run(sweep, *subject, "--site", "kv_cache.k@layers=0", "--bits", "7") == 3
    assert "layer 0" in capsys.readouterr().err


def test_a_plot_needs_matplotlib(corpus, band, tmp_path, capsys, monkeypatch):
    found = conclude("x", "bf16", [measure(corpus.producer(), band, "m8", "")])
    if has_matplotlib():
        assert plot_sweep(found, tmp_path / "plot.png").stat().st_size > 1000
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    flags = ["--site", "delta_rule.state", "--bits", "4", "--plot", str(tmp_path / "p.png")]
    assert run(sweep, *flags) == 3
    assert "kernjax[report]" in capsys.readouterr().err

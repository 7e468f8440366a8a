"""kernjax.selftest on a tiny model and corpus, and how results become exit codes and tables."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from instrument import Instrument, last_line, run
from shown_commands import shown
from tiny import make_corpus, write_checkpoint

from kernjax import record, selftest
from kernjax.faults import CATALOGUE
from kernjax.faults.measure import Size
from kernjax.faults.table import markdown
from kernjax.faults.trials import Result, Trials, is_below_floor
from kernjax.judge import Gate, Outcome, calibrate, compare
from kernjax.texts import write_corpus

LAYERS = {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A model, 16 short segments, their reference, and a band around a bf16 run.

    The other normals are that run with its KL moved by 5 % and margins that change each in its own
    way: what is tested is the command, and equally right producers of so small a model are equal
    bit for bit.
    """
    folder = tmp_path_factory.mktemp("selftest")
    model = write_checkpoint(folder / "model", **LAYERS)
    corpus = write_corpus(make_corpus({64: 8}), folder / "corpus")
    self = Instrument(folder, model, corpus, folder / "reference")
    assert self.record(record, "--out", str(self.reference)) == 0
    arguments = ("--reference", str(self.reference), "--policy", "bf16")
    assert self.record(record, *arguments, "--out", str(folder / "bf16")) == 0
    run_bf16 = compare(self.reference, folder / "bf16")
    rng = np.random.default_rng(0)
    normals = []
    for number in range(5):
        size = np.exp(0.05 * rng.standard_normal(run_bf16.kl.shape))
        normals.append(
            dataclasses.replace(
                run_bf16,
                kl=run_bf16.kl * size**2,
                margin_change=run_bf16.margin_change * rng.standard_normal(size.shape),
                candidate_digest=str(number),
            )
        )
    calibrate(None, normals).save(folder / "band.json")
    return self


def selftest_on(tiny: Instrument, *flags: str) -> int:
    band = ("--reference", str(tiny.reference), "--band", str(tiny.folder / "band.json"))
    return run(selftest, *tiny.subject, *band, *flags)


def test_a_fault_and_what_cannot_act_here(tiny, tmp_path, capsys):
    """The command of docs/faults.md, with three rows."""
    table = tmp_path / "table.md"
    (word,) = shown("selftest", "--markdown=docs/faults.md")
    markdown_flag = word.replace("docs/faults.md", str(table))
    ids = ["final_state_transposed", "window_1023", "positions_int16"]
    flags = (f"--only={','.join(ids)}", "--first_look=8", markdown_flag)
    code = selftest_on(tiny, *flags)
    report = last_line(capsys)
    rows = {row["id"]: row for row in report["rows"]}
    assert report["wrong"] == [] and set(rows) == set(ids) and code == report["exit_code"] == 0
    fault = rows["final_state_transposed"]
    assert fault["status"] == "red" and fault["verdict"] == "FAIL" and fault["gates"]
    assert fault["output_error"] == 0.0 and fault["state_error"] > 0.1  # decode alone sees it
    assert min(fault["ratio"].values()) > 2
    # No segment is 1023 tokens long: both are judged at the op.
    for name in ("window_1023", "positions_int16"):
        assert rows[name]["status"] == "red" and rows[name]["verdict"] == ""
        assert "at the op" in rows[name]["caught_by"]
    text = table.read_text()
    assert all(f"| `{name}` |" in text for name in ids)
    assert f"{report['detection_floor']['prose']:.4g} (prose)" in text


def test_a_right_kernel_is_a_fault_only_below_the_floor(tiny, capsys, monkeypatch):
    """The plain recurrence, listed as a control, as a fault that may hide, and as one that must
    show: the same numbers are right, right, and wrong."""
    control = next(row for row in CATALOGUE if row.id == "control_token_form")
    flags = ["--only=control_token_form", *shown("selftest", "--short")]  # that of the README
    for expected, status, exit_code in (
        ("green", "not red", 0),
        ("floor", "below the floor", 0),
        ("red", "below the floor", 1),
    ):
        row = dataclasses.replace(control, expected=expected)
        monkeypatch.setattr("kernjax.faults.catalogue.CATALOGUE", (row,))
        kept = str(tiny.folder / "kept")
        code = selftest_on(tiny, *flags, "--output_dir", kept)
        report = last_line(capsys)
        assert report["rows"][0]["status"] == status
        assert code == exit_code and bool(report["wrong"]) == bool(exit_code)


def result(expected: str, status: str) -> Result:
    return Result("some_row", ("attention.decode",), "what", "A1", expected, status, "FAIL",
                  gates=("level", "flips"), caught_by="level: prose, 9 of 1.1",
                  errors=Size(0.5, math.inf), ratios={"prose": (9.0, 8.0, 10.0)})  # fmt: skip


@pytest.mark.parametrize(
    "expected, status, is_right",
    [
        ("red", "red", True),
        ("red", "below the floor", False),
        ("red", "MISSED", False),
        ("floor", "red", True),
        ("floor", "below the floor", True),
        ("floor", "at the floor", True),
        ("red", "at the floor", False),
        ("green", "not red", True),
        ("green", "FALSE ALARM", False),
    ],
)
def test_what_a_row_has_to_come_to(tiny, capsys, monkeypatch, expected, status, is_right):
    row = result(expected, status)
    assert row.is_right is is_right
    monkeypatch.setattr(Trials, "fault", lambda self, fault: row)
    code = selftest_on(tiny, "--only=state_4_bits")
    captured = capsys.readouterr().out
    assert code == (0 if is_right else 1)
    assert ("some_row" in captured.splitlines()[-2]) is not is_right
    assert (f"**{status}**" in markdown([row], {"prose": 1.1}, "C", "T")) is not is_right


def test_the_table_names_size_ratio_and_gates():
    text = markdown([result("red", "red")], {"prose": 1.1}, "demo", "python -m kernjax.x --a=1")
    assert "on the corpus `demo`, made by\n\n```\npython -m kernjax.x --a=1\n```\n" in text
    assert "1 rows: 1 red." in text
    assert (
        "| `some_row` | attention.decode | what | A1 | 5.0e-01 / inf | prose 9 | red |"
        " level: prose, 9 of 1.1 (also flips) |" in text
    )


def gate(low: float, high: float, detectable: float, quantity: str = "ratio") -> Gate:
    return Gate(
        "level", "x", quantity, 1.0, low, high, 1.1, Outcome.PASS, detectable=detectable
    )  # fmt: skip


def test_below_the_floor_means_every_row():
    inside, outside = gate(0.9, 1.1, 1.2), gate(0.9, 1.3, 1.2)
    untested = Gate("flips", "x", "ratio", None, None, None, 2.0, Outcome.NOT_TESTED)
    assert is_below_floor([inside, untested]) and not is_below_floor([inside, outside])
    assert not is_below_floor([gate(-3e-4, 1e-5, 2e-4, "mass")])
    assert is_below_floor([gate(-1e-4, 1e-5, 2e-4, "mass")])


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--only=nothing_such"], "nothing_such"),
        (["--first_look=1"], "first_look"),
        (["--corpus=local"], "bundled"),
        (["--band=nowhere.json"], "nowhere.json"),
        (["stray"], "stray"),
    ],
)
def test_bad_flags(capsys, flags, message):
    assert run(selftest, *flags) == 3
    captured = capsys.readouterr()
    assert message in captured.err and "Traceback" not in captured.err

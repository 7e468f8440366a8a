"""kernjax.report: redraws, refuses, leaves nothing half-written."""

from __future__ import annotations

import importlib
import json

import pytest
from instrument import run
from report_cases import green, red
from test_reporting_page import LOCATE, SWEEP

from kernjax import report
from kernjax.reporting import render_markdown, write_files

FILES = {"verdict.json", "report.txt", "report.md", "junit.xml", "report.html"}


@pytest.fixture
def kept(tmp_path):
    folder = tmp_path / "kept"
    write_files(red(), folder, 3.0, {"command": "python -m kernjax.check --policy=fp8"})
    return folder


def test_it_redraws(tmp_path, kept, capsys):
    path = kept / "verdict.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"a_later_key": 7}))
    out = tmp_path / "out"
    assert run(report, f"--verdict={kept}", f"--output_dir={out}") == 0
    text = capsys.readouterr().out
    assert text.startswith("FAIL")
    assert {p.name for p in out.iterdir()} == FILES
    assert set(json.loads(text.splitlines()[-1])["files"]) == {str(out / name) for name in FILES}
    assert (out / "report.md").read_text() == render_markdown(red())
    assert json.loads((out / "verdict.json").read_text())["a_later_key"] == 7
    assert "--policy=fp8" in (out / "report.html").read_text()


def test_causes_and_no_page(tmp_path, kept):
    (tmp_path / "locate.json").write_text(json.dumps(LOCATE))
    (tmp_path / "sweep.json").write_text(json.dumps(SWEEP))
    flags = [f"--verdict={kept / 'verdict.json'}", f"--output_dir={kept}"]
    assert run(report, *flags, f"--locate={tmp_path}", f"--sweep={tmp_path / 'sweep.json'}") == 0
    html = (kept / "report.html").read_text()
    assert LOCATE["sentence"] in html and SWEEP["sentence"] in html
    other = tmp_path / "other"
    assert run(report, flags[0], f"--output_dir={other}", "--nopage") == 0
    assert {p.name for p in other.iterdir()} == FILES - {"report.html"}


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("verdict.json", '{"schema_version": 2}', "schema version 2"),
        ("verdict.json", "{", "is no JSON"),
        ("figures.json", '{"schema_version": 9}', "schema version 9"),
        ("figures.json", '{"schema_version": 1}', "lacks cdf"),
        ("locate.json", '{"schema_version": 1, "sentence": 3, "layers": []}', "holds 3"),
        ("sweep.json", '{"schema_version": 1, "sentence": "", "knee": "", "points": [1]}', "s 1"),
    ],
)
def test_files_it_cannot_read(tmp_path, kept, capsys, name, content, message):
    (kept / name).write_text(content)
    out = tmp_path / "out"
    causes = [f"--{name.split('.')[0]}={kept}"] if name[0] in "ls" else []
    assert run(report, f"--verdict={kept}", f"--output_dir={out}", *causes) == 3
    captured = capsys.readouterr()
    assert message in captured.err and "unexpected" not in captured.err
    assert json.loads(captured.out.splitlines()[-1])["exit_code"] == 3
    assert not out.exists()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"runs": [{"run": "x", "tokens": "many", "seconds": 1.0}]}, "holds 'many'"),
        ({"runs": [{"run": "x"}]}, "lacks seconds, tokens"),
        ({"cost": {"compile_s": "long"}}, "lacks peak_device_bytes"),
        ({"notes": "text"}, "holds 'text'"),
        ({"twin": [{"kind": "code"}]}, "lacks context_len"),
        ({"command": ["rm"]}, "holds ['rm']"),
        ({"wall_s": "3"}, "holds '3'"),
        ({"runs": None, "notes": None, "command": None, "twin": None, "cost": None}, None),
    ],
)
def test_what_a_run_knows_beside_the_verdict_is_checked(tmp_path, kept, capsys, change, message):
    path = kept / "verdict.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    out = tmp_path / "out"
    code = run(report, f"--verdict={kept}", f"--output_dir={out}")
    if message is None:
        assert code == 0
    else:
        captured = capsys.readouterr().err
        assert code == 3 and message in captured and "unexpected" not in captured
        assert not out.exists()


def test_numbers_that_no_check_writes(tmp_path, kept, capsys):
    path = kept / "verdict.json"
    line = json.loads(path.read_text())
    line["margin_bins"][1]["normal_flips"] = -1
    path.write_text(json.dumps(line))
    out = tmp_path / "out"
    assert run(report, f"--verdict={kept}", f"--output_dir={out}") == 3
    assert "cannot be drawn" in capsys.readouterr().err and not out.exists()


def test_a_folder_it_cannot_write(tmp_path, kept, capsys):
    (tmp_path / "file").write_text("")
    assert run(report, f"--verdict={kept}", f"--output_dir={tmp_path / 'file'}") == 3
    assert "Could not write" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name, flags, where",
    [
        ("check", ["--policy=fp8"], "output_dir"),
        ("locate", ["--policy=fp8"], "output_dir"),
        ("sweep", ["--site=attention.p", "--formats=bf16,fp8"], "output_dir"),
        ("selftest", ["--short"], "output_dir"),
        ("selftest", ["--short"], "markdown"),
        ("calibrate", [f"--normal={n}" for n in ("bf16", "chunk32", "block256", "p_f32")], "out"),
        ("report", ["--figures"], "output_dir"),
    ],
)
def test_a_folder_is_tried_before_the_model_runs(tmp_path, capsys, monkeypatch, name, flags, where):
    def opened(*args, **keywords):
        pytest.fail("the model was opened")

    monkeypatch.setattr("kernjax.scoring.session.Session.open", opened)
    (tmp_path / "file").write_text("")
    module = importlib.import_module(f"kernjax.{name}")
    path = tmp_path / "file" / ("" if where == "output_dir" else "name")
    assert run(module, *flags, f"--{where}={path}") == 3
    assert "Could not write to" in capsys.readouterr().err


def test_the_page_needs_its_extra(tmp_path, kept, capsys, monkeypatch):
    monkeypatch.setattr("kernjax.reporting.page.has_jinja", lambda: False)
    monkeypatch.setattr("kernjax.reporting.files.has_jinja", lambda: False)
    out = tmp_path / "out"
    assert run(report, f"--verdict={kept}", f"--output_dir={out}") == 3
    assert "pip install 'kernjax[report]'" in capsys.readouterr().err and not out.exists()
    assert run(report, f"--verdict={kept}", f"--output_dir={out}", "--nopage") == 0


def test_exit_0_whatever_the_verdict(tmp_path):
    write_files(green(), tmp_path)
    assert run(report, f"--verdict={tmp_path}", f"--output_dir={tmp_path}") == 0

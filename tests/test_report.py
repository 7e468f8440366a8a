"""kernjax.report: redraws, refuses, leaves nothing half-written."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from xml.etree import ElementTree as xml

import pytest
from instrument import run
from report_cases import EVIL, LONG, green, red
from test_reporting_page import LOCATE, SWEEP, check_harmless

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


EXAMPLE = Path(__file__).resolve().parent.parent / "docs" / "examples" / "red"
CLOSED = {
    "/verdict", "/deciding_phase", "/gates/outcome", "/findings/severity", "/strata/phase",
}  # fmt: skip
"""Texts that are one of a few words: another one is refused."""


def texts(value, path: str = "") -> dict[str, list]:
    """Every text of a JSON value: by its path without numbers, the places (holder, key)."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    found: dict[str, list] = {}
    for key, item in pairs:
        here = f"{path}/{key}" if isinstance(value, dict) else path
        if isinstance(item, dict | list):
            for name, places in texts(item, here).items():
                found.setdefault(name, []).extend(places)
        elif isinstance(item, str):
            found.setdefault(here, []).append((value, key))
    return found


@pytest.fixture
def hostile_files(tmp_path):
    """A function that writes the red example's files with EVIL, and 10 kB, at these paths."""
    files = ("verdict.json", "figures.json", "locate.json")
    whole = {name: json.loads((EXAMPLE / name).read_text(encoding="utf-8")) for name in files}
    kept = tmp_path / "kept"
    kept.mkdir()

    def write(wanted) -> tuple[Path, int]:
        count = 0
        for name in files:
            value = json.loads(json.dumps(whole[name]))
            for path, places in texts(value).items():
                if wanted(path):
                    count += 1
                    for holder, key in places:
                        holder[key] = EVIL + LONG
            (kept / name).write_text(json.dumps(value), encoding="utf-8")
        return kept, count

    return write


def test_every_free_text_of_the_files_may_be_hostile(hostile_files, tmp_path, capsys):
    kept, count = hostile_files(lambda path: path not in CLOSED)
    assert count > 40
    out = tmp_path / "out"
    code = run(report, f"--verdict={kept}", f"--locate={kept}", f"--output_dir={out}")
    said = capsys.readouterr()
    assert code == 0, said.err
    assert harmless(said.out) and harmless(said.err)
    page = (out / "report.html").read_text(encoding="utf-8")
    check_harmless(page)
    assert page.count("\\u202e") > 20  # long names lose their middle
    for made in ("report.md", "report.txt", "junit.xml"):
        assert harmless((out / made).read_text(encoding="utf-8")), made
    xml.parse(out / "junit.xml")


@pytest.mark.parametrize("closed", sorted(CLOSED))
def test_a_word_that_nobody_knows_is_refused(hostile_files, tmp_path, capsys, closed):
    kept, count = hostile_files(lambda path: path == closed)
    out = tmp_path / "out"
    assert count == 1 and run(report, f"--verdict={kept}", f"--output_dir={out}") == 3
    said = capsys.readouterr()
    assert "is no verdict of kernjax.check" in said.err and "unexpected" not in said.err
    assert harmless(said.err) and harmless(said.out) and not out.exists()


def harmless(text: str) -> bool:
    """Nothing that a terminal, or a reader of the bytes, would obey."""
    return all(char.isprintable() or char == "\n" for char in text)


@pytest.mark.parametrize("path", ["/proc/kernjax", "/dev/null/kernjax"])
def test_places_that_nobody_can_write(kept, capsys, path):
    if not Path(path).parent.exists():
        pytest.skip("another kind of machine")
    assert run(report, f"--verdict={kept}", f"--output_dir={path}") == 3
    assert f"Could not write to {path}" in capsys.readouterr().err

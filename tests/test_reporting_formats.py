"""Schema, JUnit XML, Markdown and annotations: complete, parseable, and safe with bad names."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import jsonschema
import pytest
from report_cases import LONG, amber, green, hostile, red

import kernjax.reporting
from kernjax.base.errors import UserError
from kernjax.base.files import check_writable
from kernjax.judge.case import Finding
from kernjax.judge.gates import Outcome
from kernjax.reporting import (
    annotations,
    load_verdict,
    render_junit,
    render_markdown,
    render_text,
    verdict_line,
    write_files,
)
from kernjax.reporting.annotations import wanted

SCHEMA = json.loads(
    (Path(kernjax.reporting.__file__).parent / "schemas" / "check-1.schema.json").read_text()
)
COLOURS = {"red": red, "amber": amber, "green": green}
MORE = {
    "command": "python -m kernjax.check --policy=fp8",
    "runs": [{"run": "candidate fp8", "tokens": 10, "seconds": 0.5}],
    "notes": ["a note"],
    "twin": [{"kind": "code", "context_len": 512, "kl_median": 1e-5, "kl_mean": 2e-5}],
}


def strict(node):
    """The schema with no room for keys that it does not name."""
    if isinstance(node, dict):
        node = {key: strict(value) for key, value in node.items()}
        if node.get("type") == "object" and "properties" in node:
            node["additionalProperties"] = False
        return node
    return [strict(item) for item in node] if isinstance(node, list) else node


@pytest.fixture(params=sorted(COLOURS))
def verdict(request):
    return COLOURS[request.param]()


# --- the JSON schema


def test_the_schema_is_one():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("more", [None, MORE])
def test_lines_follow_the_schema_and_it_names_every_key(verdict, more):
    line = json.loads(json.dumps(verdict_line(verdict, 1.5, more), allow_nan=False))
    jsonschema.validate(line, SCHEMA)
    jsonschema.validate(line, strict(copy.deepcopy(SCHEMA)))
    jsonschema.validate({**line, "some_later_key": 1}, SCHEMA)


@pytest.mark.parametrize(
    "change",
    [
        {"schema_version": 2},
        {"verdict": "FINE"},
        {"exit_code": 3},
        {"gates": [{}]},
        {"kl": {"median": "low"}},
        {"strata": None},
    ],
)
def test_the_schema_refuses(change):
    line = {**verdict_line(green()), **change}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(line, SCHEMA)


def test_the_line_of_an_error_follows_the_schema_too():
    jsonschema.validate({"exit_code": 3, "error": "no such file"}, SCHEMA)


# --- back from the file


def test_a_verdict_comes_back_from_its_file(tmp_path, verdict):
    write_files(verdict, tmp_path, 2.0, MORE)
    loaded, line = load_verdict(tmp_path)
    assert load_verdict(tmp_path / "verdict.json")[1] == line
    for render in (render_text, render_markdown, render_junit):
        assert render(loaded) == render(verdict)
    assert annotations(loaded) == annotations(verdict)
    again = verdict_line(loaded, 2.0, MORE)
    assert json.loads(json.dumps(again)) == line


@pytest.mark.parametrize(
    "change, message",
    [
        ({"schema_version": 2}, "schema version 2"),
        ({"schema_version": "1.7.0"}, None),
        ({"schema_version": "2.0.0"}, "schema version '2.0.0'"),
        ({"schema_version": None}, "no schema_version"),
        ({"schema_version": True}, "no schema_version"),
        ({"verdict": "FINE"}, "FINE"),
        ({"verdict": "FAIL"}, "exit_code"),
        ({"gates": [{"name": "level"}]}, "lacks"),
        ({"gates": {"a": 1}}, "Gate is str"),
        ({"strata": [3]}, "Stratum is int"),
        ({"flips": "many"}, "flips is 'many'"),
        ({"positions": True}, "positions is True"),
        ({"kl": {"median": "low"}}, "kl holds"),
        ({"perplexity": {"reference": [1.0]}}, "perplexity"),
        ({"differences": [["a", "b"]]}, "triples"),
        ({"candidate": "me"}, "candidate is str"),
        ({"a_later_key": [1]}, None),
    ],
)
def test_files_of_others(tmp_path, change, message):
    write_files(green(), tmp_path, 2.0)
    path = tmp_path / "verdict.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    if message is None:
        assert render_text(load_verdict(path)[0]) == render_text(green())
    else:
        with pytest.raises(UserError, match=re.escape(message)):
            load_verdict(path)


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "is no JSON"),
        (b"[" * 100_000, "is no JSON"),
        (b"\xff\xfe", "is no JSON"),
        (b"[1]", "no schema_version"),
        (b'{"schema_version": 1, "exit_code": 3, "error": "boom"}', "holds an error.*boom"),
    ],
)
def test_files_that_are_no_verdicts(tmp_path, content, message):
    (tmp_path / "verdict.json").write_bytes(content)
    with pytest.raises(UserError, match=message):
        load_verdict(tmp_path)


def test_no_file_at_all(tmp_path):
    with pytest.raises(UserError, match="There is no verdict at"):
        load_verdict(tmp_path)


def test_a_folder_is_tried_before_the_work(tmp_path):
    check_writable(tmp_path / "new")
    assert list((tmp_path / "new").iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="Could not write"):
        check_writable(tmp_path / "file")


def test_all_files_or_none(tmp_path):
    (tmp_path / "junit.xml").mkdir()  # the last one cannot take its name
    with pytest.raises(UserError, match="Is a directory"):
        write_files(green(), tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["junit.xml"]


# --- JUnit


def cases(verdict):
    root = ElementTree.fromstring(render_junit(verdict, 12.5))
    return root, root.find("testsuite").findall("testcase")


def test_one_case_for_the_verdict_and_one_a_gate_row(verdict):
    root, found = cases(verdict)
    assert len(found) == 1 + len(verdict.gates)
    assert found[0].get("name") == "verdict"
    names = [(case.get("classname"), case.get("name")) for case in found]
    assert len(set(names)) == len(names)
    assert names[1:] == [
        (f"kernjax.check.{g.name}", f"{g.name}: {g.stratum}") for g in verdict.gates
    ]
    tags = {Outcome.FAIL: "failure", Outcome.INCONCLUSIVE: "error", Outcome.NOT_TESTED: "skipped"}
    outcomes = [verdict.outcome, *(gate.outcome for gate in verdict.gates)]
    for case, outcome in zip(found, outcomes, strict=True):
        marks = [child.tag for child in case if child.tag != "system-out"]
        assert marks == ([tags[outcome]] if outcome in tags else [])
    for key, outcome in (("failures", "FAIL"), ("errors", "INCONCLUSIVE")):
        assert root.get(key) == str(sum(o == outcome for o in outcomes))
    assert root.get("tests") == str(len(outcomes)) and root.get("time") == "12.500"


def test_only_a_pass_is_all_green():
    for make in (red, amber):
        root, found = cases(make())
        assert int(root.get("failures")) + int(root.get("errors")) > 0
        assert found[0].find("system-out") is None
    assert cases(green())[1][0].find("system-out").text.startswith("PASS")


def test_a_failing_case_carries_its_numbers():
    gate = next(g for g in red().gates if g.name == "level" and g.outcome is Outcome.FAIL)
    _, found = cases(red())
    text = next(c for c in found if c.get("name") == f"level: {gate.stratum}").find("failure").text
    assert f"{gate.observed:.2f} [{gate.low:.2f}, {gate.high:.2f}]" in text


# --- Markdown


def test_markdown_says_the_verdict_first_and_what_to_do(verdict):
    text = render_markdown(verdict)
    assert text.startswith(f"## kernjax: {verdict.outcome}\n")
    for finding in verdict.findings[:8]:
        if finding.command:
            assert f"```\n{finding.command}\n```" in text
    for stratum in verdict.strata:
        if stratum.phase == "decode" and stratum.ratio is not None:
            assert f"{stratum.ratio:.2f} [" in text
    assert ("Gates that do not pass" in text) == any(
        gate.outcome is not Outcome.PASS for gate in verdict.gates
    )


def test_long_tables_are_cut():
    many = dataclasses.replace(
        red(), strata=red().strata * 40, findings=red().findings * 9, gates=red().gates * 20
    )
    text = render_markdown(many)
    assert "more rows" in text and "more findings" in text
    assert len(text) < 65_536


# --- annotations


def test_annotations_by_severity():
    first, *rest = annotations(red())
    assert first.startswith("::error title=kernjax%3A FAIL::")
    assert rest and all(line.startswith(("::error ", "::warning ", "::notice ")) for line in rest)
    assert annotations(amber())[0].startswith("::warning title=kernjax%3A INCONCLUSIVE::")
    assert annotations(green())[0].startswith("::notice title=kernjax%3A PASS::")


def test_the_runner_shows_ten():
    many = dataclasses.replace(red(), findings=(Finding("fail", "100 % bad"),) * 30)
    lines = annotations(many)
    assert sum(line.startswith("::error") for line in lines) == 10
    assert lines[-1].endswith("and 21 more findings")
    assert "::100%25 bad" in lines[1].replace(" %25", "%25")


def test_only_where_they_are_read():
    assert wanted({"GITHUB_ACTIONS": "true"})
    assert not wanted({}) and not wanted({"GITHUB_ACTIONS": "false"})


# --- bad names


def test_hostile_names_in_every_format(tmp_path):
    verdict = hostile()
    write_files(verdict, tmp_path, 1.0, {"command": LONG})
    for name in ("report.md", "report.txt", "junit.xml", "verdict.json"):
        text = (tmp_path / name).read_text(encoding="utf-8")
        assert all(char.isprintable() or char == "\n" for char in text), name
    assert render_text(load_verdict(tmp_path)[0]) == (tmp_path / "report.txt").read_text()


def test_no_name_starts_a_command_of_the_runner():
    """GitHub's runner reads `::name::` at the start of a line, and `##[name]` anywhere."""
    for name in ("::add-mask::x", "##[add-mask]x"):
        verdict = dataclasses.replace(
            red(), findings=(Finding("fail", f"{name} " * 40),), reason=f"{'w' * 88} {name}"
        )
        text = render_text(verdict)
        assert "add-mask" in text
        assert not any(line.lstrip().startswith("::") for line in text.splitlines())
        assert "##[" not in text


def test_hostile_names_in_markdown():
    text = render_markdown(hostile())
    assert len(text) < 65_536
    outside = re.sub(r"(?ms)^(`{3,})\n.*?\n\1$", "", text)  # code blocks show anything
    outside = re.sub(r"(`+)(?!`).*?[^`]\1(?!`)", "", outside)
    assert "<img" not in outside and "</script>" not in outside
    assert not re.search(r"(?<!\\)\[a", outside)
    assert not re.search(r"@octocat|#12", outside)
    assert not any(line.startswith("## PASS") for line in text.splitlines())
    for row in re.findall(r"(?m)^\|.*\|$", text):
        assert len(re.findall(r"(?<!\\)\|", row)) in (4, 5, 7, 9)


def test_hostile_names_in_xml_and_annotations():
    root, found = cases(hostile())
    assert len(found) == 1 + len(hostile().gates)
    assert "<img src=x" in found[1].get("name")
    for line in annotations(hostile()):
        assert line.startswith("::") and "\n" not in line and "\r" not in line
        assert len(line) < 2000

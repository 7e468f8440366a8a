"""What CI systems read of a report, by their own published rules.

None of them can be asked here. Each reader below is the part of one that matters, written from its
documentation: Jenkins's xUnit schema, GitLab's unit test reports, Buildkite's import, and the
command language of GitHub's runner, in which a log line can also be a command.
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml
from instrument import run
from report_cases import EVIL, LONG, amber, green, hostile, red

from kernjax import report
from kernjax.base import command
from kernjax.base.errors import UserError
from kernjax.judge.case import Finding
from kernjax.judge.gates import Outcome
from kernjax.reporting import annotations, render_junit, render_markdown, render_text

CASES = {"red": red, "amber": amber, "green": green, "hostile": hostile}
CI_PAGE = Path(__file__).resolve().parent.parent / "docs" / "ci.md"


@pytest.fixture(params=sorted(CASES))
def verdict(request):
    return CASES[request.param]()


# --- JUnit XML

# Of the xUnit schema (Jenkins): what an element may have, and what it must.
ATTRIBUTES = {
    "testsuites": ({"name", "time", "tests", "failures", "errors"}, set()),
    "testsuite": (
        {"name", "time", "tests", "failures", "errors", "skipped", "timestamp", "hostname", "id",
         "package", "file", "log", "url", "group"},
        {"name", "tests", "failures", "errors"},
    ),
    "testcase": ({"name", "time", "classname", "group"}, {"name"}),
    "property": ({"name", "value"}, {"name", "value"}),
    **dict.fromkeys(("failure", "error", "skipped"), ({"type", "message"}, set())),
    **dict.fromkeys(("properties", "system-out", "system-err"), (set(), set())),
}  # fmt: skip
CHILDREN = {
    "testsuites": {"testsuite"},
    "testsuite": {"testsuite", "properties", "testcase", "system-out", "system-err"},
    "testcase": {"skipped", "error", "failure", "system-out", "system-err"},
    "properties": {"property"},
}
TIME = re.compile(r"(([0-9]{0,3},)*[0-9]{3}|[0-9]{0,3})*(\.[0-9]*)?")


def check_schema(element: ElementTree.Element) -> None:
    allowed, required = ATTRIBUTES[element.tag]
    assert required <= set(element.attrib) <= allowed, (element.tag, element.attrib)
    if element.tag in ("testsuites", "testsuite"):
        assert TIME.fullmatch(element.get("time", ""))
    for child in element:
        assert child.tag in CHILDREN.get(element.tag, set()), (element.tag, child.tag)
        check_schema(child)


def test_junit_follows_the_schema_of_jenkins(verdict):
    text = render_junit(verdict, 1234.5)
    assert text.startswith('<?xml version="1.0" encoding="utf-8"?>\n') and "<!DOCTYPE" not in text
    root = ElementTree.fromstring(text)
    check_schema(root)
    suite = root.find("testsuite")
    for key, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        assert int(suite.get(key)) == len(suite.findall(f"testcase/{tag}"))
    assert int(suite.get("tests")) == len(suite.findall("testcase"))
    for case in suite.findall("testcase"):  # one mark at most: a second would be dropped
        assert len([c for c in case if c.tag in ("failure", "error", "skipped")]) <= 1


def test_junit_says_enough_where_gitlab_shows_it(verdict):
    """A merge request shows a case's name alone, then the text of its mark, not the message."""
    text = render_junit(verdict)
    assert len(text.encode()) < 30e6
    found = ElementTree.fromstring(text).iter("testcase")
    names = [case.get("name") for case in found]
    assert len(set(names)) == len(names)  # of equal names only the first is kept
    for name, gate in zip(names[1:], verdict.gates, strict=True):
        assert name.startswith(f"{gate.name}: ")
    for case in ElementTree.fromstring(text).iter("testcase"):
        assert case.get("classname")  # with the name, what Buildkite asks for
        for mark in case:
            assert mark.text.strip()
    # `[[ATTACHMENT|path]]` in a passing case's output is a link there.
    assert "[[ATTACHMENT" not in text


# --- GitHub's runner

LEVELS = ("error", "warning", "notice")
REGISTERED = {*LEVELS, "debug", "group", "endgroup", "add-mask", "add-matcher", "add-path", "echo",
              "remove-matcher", "save-state", "set-env", "set-output", "stop-commands"}  # fmt: skip


def runner_command(line: str) -> tuple[str, dict[str, str], str] | None:
    """(command, properties, data) as the runner finds them in a line of a log, or None."""
    text = line.lstrip()
    if text.startswith("::") and (end := text.find("::", 2)) >= 0:
        name, _, rest = text[2:end].partition(" ")
        if name in REGISTERED:
            pairs = (pair.partition("=") for pair in rest.strip().split(",") if pair)
            properties = {key: unescaped(value, ":,") for key, _, value in pairs}
            return name, properties, unescaped(text[end + 2 :])
    start = line.find("##[")
    if start >= 0 and (end := line.find("]", start)) >= 0:
        name = line[start + 3 : end].partition(" ")[0]
        if name in REGISTERED:
            return name, {}, line[end + 1 :]
    return None


def unescaped(text: str, more: str = "") -> str:
    for char in f"\r\n{more}%":
        text = text.replace(f"%{ord(char):02X}", char)
    return text


def test_annotations_are_what_the_runner_reads(verdict):
    lines = annotations(verdict)
    parsed = [runner_command(line) for line in lines]
    assert None not in parsed
    for (level, properties, data), line in zip(parsed, lines, strict=True):
        assert level in LEVELS and set(properties) == {"title"}
        assert properties["title"].startswith("kernjax") and len(properties["title"]) <= 255
        assert data and len(line.encode()) <= 4096  # what is longer is cut
    for level in LEVELS:
        assert sum(found[0] == level for found in parsed) <= 10
    assert parsed[0][1]["title"] == f"kernjax: {verdict.outcome}"
    assert len(lines) <= 50  # of a job


def test_an_annotation_says_what_was_said():
    text = "50 % worse, 100%25 sure: a,b::c\nd"
    lines = annotations(dataclasses.replace(red(), findings=(Finding("fail", text),)))
    assert runner_command(lines[1])[2] == "50 % worse, 100%25 sure: a,b::c\\x0ad"


def test_a_comment_and_a_summary_hold_it(verdict):
    text = render_markdown(verdict)
    assert len(text) <= 65_536  # characters of a comment
    assert len(text.encode()) <= 2**20  # bytes of a job's summary; a larger one is dropped whole


INJECTED = (
    "::add-mask::x",
    "##[add-matcher]x",
    "  ::stop-commands::x",
    "a\n::error::x\r::error::y",
)


@pytest.mark.parametrize("name", INJECTED)
def test_no_name_becomes_a_command(name, tmp_path, capsys):
    """Standard output and standard error, the JSON line and the messages of errors included."""

    def lines(text: str) -> list[str]:
        return re.split(r"[\r\n]", text)

    assert any(map(runner_command, lines(name)))
    verdict = dataclasses.replace(red(), reason=name, findings=(Finding("fail", name, name, name),))
    assert not any(map(runner_command, lines(render_text(verdict))))
    command.print_json({"reason": name, name: [name]})
    printed = capsys.readouterr().out
    assert not any(map(runner_command, lines(printed)))
    assert json.loads(printed) == {"reason": name, name: [name]}

    def fails() -> int:
        command.log.info("segment %s", name)
        raise UserError(f"{name}", name)

    assert command.guard(fails, "kernjax.check") == 3
    captured = capsys.readouterr()
    for text in captured:
        assert "\x1b" not in text and not any(map(runner_command, lines(text)))
    folder = tmp_path / re.sub(r"[/\r\n]", "_", name)
    assert run(report, f"--verdict={folder}", f"--output_dir={tmp_path / 'out'}") == 3
    assert not any(map(runner_command, lines("".join(capsys.readouterr()))))


def test_errors_do_not_move_a_terminals_cursor(capsys):
    def fails() -> int:
        raise UserError(f"The engine is {EVIL}{LONG}.")

    assert command.guard(fails, "kernjax.check") == 3
    shown = capsys.readouterr().err
    assert all(char.isprintable() or char == "\n" for char in shown)
    assert "\\x1b[2J" in shown and "\\u202e" in shown


# --- the workflows of the page


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", CI_PAGE.read_text(), re.M | re.S)


def test_the_workflow_of_the_page():
    found = [yaml.safe_load(block) for block in blocks("yaml")]
    (workflow,) = [one for one in found if "jobs" in one]
    assert "pull_request" in str(workflow[True])  # YAML 1.1 reads `on` as true, as GitHub does
    assert workflow["permissions"]["pull-requests"] == "write"
    (job,) = workflow["jobs"].values()
    steps = {step["name"]: step for step in job["steps"] if "name" in step}
    assert "kernjax.check" in steps["Judge the kernel"]["run"]
    for name, step in steps.items():
        if name != "Judge the kernel":  # a red one has a report too, a broken one may have none
            assert "always()" in step["if"]
            assert "uses" in step or "test -f out/report.md" in step["run"]
    (gitlab,) = [one["kernel"] for one in found if "kernel" in one]
    assert gitlab["artifacts"]["reports"]["junit"] == "out/junit.xml"
    assert gitlab["artifacts"]["when"] == "always"
    (buildkite,) = [one for one in found if "steps" in one]
    assert any("out/junit.xml" in str(step) for step in buildkite["steps"])
    assert set(map(str, Outcome)) - {"NOT TESTED"} <= set(
        re.findall("[A-Z]{4,}", CI_PAGE.read_text())
    )

"""The verdict as JUnit XML: one case for the verdict, one for every gate and stratum.

What a FAIL gate is, is a `failure`; INCONCLUSIVE is an `error` (the test could not decide), never
a pass or a skip, as no list of tests may look greener than the verdict; what was not tested is
`skipped`.

There is no one JUnit format. What is here is what its readers share: Jenkins's xUnit schema (in
which `skipped` is no attribute of `testsuites`), GitLab (which shows the text of a mark and not its
`message`, a case's `name` without its `classname`, and of equal names only the first), Buildkite
(`classname` and `name` are required).
"""

from __future__ import annotations

from xml.etree import ElementTree as Xml

from kernjax.judge.gates import Gate, Outcome
from kernjax.judge.verdict import Verdict
from kernjax.reporting.layout import interval, number, ratio, safe, shorten
from kernjax.reporting.summary import in_short

_SUITE = "kernjax.check"
_TAGS = {
    Outcome.FAIL: "failure",
    Outcome.INCONCLUSIVE: "error",
    Outcome.NOT_TESTED: "skipped",
}
_MESSAGE = 300


def render_junit(verdict: Verdict, wall_s: float | None = None) -> str:
    """The XML document, `wall_s` seconds being the whole run's."""
    seconds = f"{wall_s or 0.0:.3f}"
    root = Xml.Element("testsuites", name="kernjax")
    suite = Xml.SubElement(root, "testsuite", name=_SUITE)
    properties = Xml.SubElement(suite, "properties")
    for name in ("reference", "candidate", "band"):
        path = safe(verdict.parties.get(name, {}).get("path"))
        Xml.SubElement(properties, "property", name=name, value=path)
    _case(suite, _SUITE, "verdict", verdict.outcome, verdict.reason, _story(verdict), seconds)
    for gate in verdict.gates:
        text = _numbers(gate)
        name = f"{gate.name}: {gate.stratum}"
        _case(suite, f"{_SUITE}.{gate.name}", name, gate.outcome, text, text, "0.000")
    for element in (root, suite):
        element.set("tests", str(1 + len(verdict.gates)))
        for key, tag in (("failures", "failure"), ("errors", "error")):
            element.set(key, str(len(suite.findall(f"testcase/{tag}"))))
        element.set("time", seconds)
    suite.set("skipped", str(len(suite.findall("testcase/skipped"))))
    Xml.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + Xml.tostring(root, "unicode") + "\n"


def _case(
    suite: Xml.Element, group: str, name: str, outcome: Outcome, short: str, text: str, time: str
) -> None:
    case = Xml.SubElement(suite, "testcase", classname=safe(group), name=safe(name), time=time)
    if outcome in _TAGS:
        tag = _TAGS[outcome]
        message = shorten(safe(short), _MESSAGE)
        Xml.SubElement(case, tag, message=message, type=str(outcome)).text = text
    else:
        Xml.SubElement(case, "system-out").text = text


def _story(verdict: Verdict) -> str:
    """Every finding with what to do about it, a paragraph each."""
    lines = [f"{verdict.outcome}: {safe(verdict.reason)}"]
    lines += [f"{question}: {safe(answer)}" for question, answer in in_short(verdict)]
    for finding in verdict.findings:
        lines.append(f"{finding.severity}: {safe(finding.text)} {safe(finding.todo)}".rstrip())
        if finding.command:
            lines.append(f"    $ {safe(finding.command)}")
    return "\n".join(lines)


def _numbers(gate: Gate) -> str:
    if gate.quantity == "count":
        parts = [f"observed {number(gate.observed)}, allowed {number(gate.allowed)}"]
    else:
        show = number if gate.quantity == "mass" else ratio
        limit = number(gate.allowed, 4)
        parts = [f"{safe(gate.quantity)} {interval(gate.observed, gate.low, gate.high, show)}"]
        parts.append(f"allowed {'±' if gate.quantity == 'mass' else ''}{limit}")
    if gate.p_value is not None:
        parts.append(f"p {gate.p_value:.2g}")
    if gate.segments:
        parts.append(f"{gate.segments} segments")
    if gate.segments_needed:
        parts.append(f"{gate.segments_needed} would decide")
    if gate.note:
        parts.append(safe(gate.note))
    return ", ".join(parts)

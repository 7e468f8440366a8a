"""GitHub Actions annotations: the verdict and its findings beside the changed lines of a request.

Lines of the runner's command language, `::error title=...::text`. They are read from standard error
as well as from standard output, which stays the report.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from kernjax.judge.gates import Outcome
from kernjax.judge.verdict import Verdict
from kernjax.reporting.layout import safe, shorten
from kernjax.reporting.summary import changed

_LEVELS = {Outcome.FAIL: "error", Outcome.INCONCLUSIVE: "warning", Outcome.PASS: "notice"}
_SEVERITIES = {"fail": "error", "inconclusive": "warning", "warning": "warning"}
_MOST = 9  # the runner shows ten of a level and step; the verdict is one of them
_LENGTH = 900  # characters; the runner cuts a message at 4,096 bytes


def wanted(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether somebody reads annotations here."""
    return environment.get("GITHUB_ACTIONS") == "true"


def annotations(verdict: Verdict) -> list[str]:
    """The verdict, then what is worse than a note, worst first; one line each."""
    text = f"{verdict.reason} What changed: {changed(verdict)}"
    lines = [_line(_LEVELS[verdict.outcome], f"kernjax: {verdict.outcome}", text)]
    serious = [finding for finding in verdict.findings if finding.severity in _SEVERITIES]
    for finding in serious[:_MOST]:
        text = " ".join(part for part in (finding.text, finding.todo) if part)
        if finding.command:
            text += f" Next: {finding.command}"
        lines.append(_line(_SEVERITIES[finding.severity], f"kernjax: {finding.severity}", text))
    if len(serious) > _MOST:
        lines.append(_line("notice", "kernjax", f"and {len(serious) - _MOST} more findings"))
    return lines


def _line(level: str, title: str, text: str) -> str:
    # `safe` leaves no line break; what the language itself uses is escaped its way.
    message = shorten(safe(text), _LENGTH).replace("%", "%25")
    for char, escape in (("%", "%25"), (":", "%3A"), (",", "%2C")):
        title = title.replace(char, escape)
    return f"::{level} title={title}::{message}"

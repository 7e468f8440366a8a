"""Prints the parity table after the tests, in CI's log as well."""

from __future__ import annotations

import importlib.util

from .figures import table


def pytest_terminal_summary(terminalreporter) -> None:
    lines = table()
    if not lines:
        return
    terminalreporter.section("parity")
    missing = [name for name in ("torch", "transformers") if not importlib.util.find_spec(name)]
    if missing:
        what = "test_parity_float32.py and test_parity_bfloat16.py were skipped"
        terminalreporter.write_line(
            f"{what}: no {' and no '.join(missing)} (kernjax[transformers])"
        )
    for line in lines:
        terminalreporter.write_line(line)

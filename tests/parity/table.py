"""Runs the parity tests for the table they print: `python -m tests.parity.table`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

if __name__ == "__main__":
    sys.exit(pytest.main([str(Path(__file__).parent), "-rs"]))

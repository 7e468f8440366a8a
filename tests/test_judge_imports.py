"""Judging needs NumPy and the standard library; the package is callable and importable."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys

import kernjax
import kernjax.judge
from kernjax.judge.verdict import judge

_PROGRAM = """
import sys
import kernjax
import kernjax.reporting
from kernjax.judge import simulate
import numpy as np
corpus = simulate.Corpus(simulate.Design(steps=8, per_cell=4), np.random.default_rng(0))
band = kernjax.judge.calibrate(None, [corpus.producer(name=f"n{i}") for i in range(5)])
verdict = kernjax.judge(corpus.producer(), band)
kernjax.reporting.render_text(verdict)
heavy = {"jax", "jaxlib", "scipy", "flax", "torch", "tensorstore", "pallas_kernels"}
loaded = heavy & {name.split(".")[0] for name in sys.modules}
assert not loaded, loaded
print(verdict.outcome)
"""


def test_a_verdict_and_its_report_load_no_jax():
    result = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONWARNINGS": "error"},
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "INCONCLUSIVE"  # four segments a stratum are thin


def test_judge_is_package_and_function():
    assert kernjax.judge.Band.__name__ == "Band"
    assert inspect.signature(kernjax.judge) == inspect.signature(judge)
    assert kernjax.judge is sys.modules["kernjax.judge"]


def test_the_first_access_gives_the_package_too():
    program = "import kernjax; j = kernjax.judge; import kernjax.judge; assert kernjax.judge is j"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_checking_recordings_loads_no_jax():
    """The whole command, on what is bundled by default."""
    program = """
import sys
from kernjax import check
from kernjax.base import command
from kernjax.base.resources import demo_recording
argv = [f"--candidate={demo_recording('demo.chunk32.zip')}"]
code = command.execute(check.main, check.FLAGS, argv)
assert not {"jax", "flax", "pallas_kernels"} & {name.split(".")[0] for name in sys.modules}
sys.exit(code)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0 and result.stdout.startswith("PASS"), result.stderr

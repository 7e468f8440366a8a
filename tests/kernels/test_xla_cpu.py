"""XLA's CPU backend sums right under our flags; the control shows what the flag is for."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version

import jax.numpy as jnp

from pallas_kernels.xla_cpu import sums_are_right


def test_sums_are_right_here():
    assert sums_are_right()


def test_import_sets_the_flags_and_respects_a_users():
    def flags(given: str) -> list[str]:
        code = "import os, pallas_kernels; print(os.environ.get('XLA_FLAGS', ''))"
        env = {**os.environ, "XLA_FLAGS": given}
        run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
        return run.stdout.split()

    jaxlib = tuple(map(int, version("jaxlib").split(".")[:2]))
    right = ["--xla_cpu_experimental_ynn_fusion_type=-reduce"] if jaxlib < (0, 12) else []
    quick = ["--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=4"]
    quick = quick if jaxlib < (0, 11) else []
    assert flags("") == right + quick
    assert flags("--xla_foo=1") == ["--xla_foo=1", *right, *quick]
    own = "--xla_cpu_experimental_ynn_fusion_type=dot"
    assert flags(own) == [own, *quick]


def test_the_check_sees_wrong_sums(monkeypatch):
    """Negative control: one term short is what it must notice."""
    right = jnp.sum
    monkeypatch.setattr(jnp, "sum", lambda x, axis: right(x[:-1], axis=axis))
    assert not sums_are_right()

"""Strict arithmetic for every test, a quick compiler, and one compilation cache for the session."""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest

import pallas_kernels  # noqa: F401  sets XLA's flags before jax starts
from kernjax.scoring.compilation import use_compilation_cache

# Most of the tests' time is XLA's and LLVM's, on programs that run for milliseconds. What a test
# compiles itself is compiled at LLVM's lowest level and in one part, in subprocesses too; the
# commands' programs name their level (kernjax/scoring/programs.py) and keep it. A level that is in
# XLA_FLAGS already is taken as it is.
if "--xla_backend_optimization_level" not in os.environ.get("XLA_FLAGS", ""):
    _QUICK = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_QUICK}".strip()

# A silent promotion (bf16 + f32, say) is a rounding nobody asked for.
jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture(scope="session", autouse=True)
def _cache_dir(tmp_path_factory):
    """Nothing a test does reads or writes the user's cache; commands in subprocesses inherit it."""
    previous = os.environ.get("KERNJAX_CACHE_DIR")
    os.environ["KERNJAX_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))
    # Not only what producers compile: many tests build the same small program again.
    use_compilation_cache()
    yield
    if previous is None:
        del os.environ["KERNJAX_CACHE_DIR"]
    else:
        os.environ["KERNJAX_CACHE_DIR"] = previous


@pytest.fixture(scope="session")
def instrument(tmp_path_factory):
    """A tiny two-layer checkpoint, its corpus and its float32 reference: `Instrument`."""
    from instrument import Instrument

    return Instrument.make(tmp_path_factory.mktemp("instrument"))

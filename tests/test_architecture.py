"""The house rules of the design that a machine can check: imports go one way, rooms stay small."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "kernjax"

# room -> the rooms it may import from (besides itself, `base` and `pallas_kernels` where listed)
ALLOWED = {
    "base": set(),
    "pods": {"base"},
    "texts": {"base"},
    "recording": {"base"},
    "judge": {"base", "recording"},
    "reporting": {"base", "judge", "recording"},
    "precision": {"base", "pallas_kernels"},
    "plugins": {"base", "precision", "pallas_kernels"},
    "model": {"base", "precision", "pallas_kernels"},
    "weights": {"base", "pods", "model"},
    "scoring": {
        "base", "pods", "model", "weights", "precision", "plugins", "recording", "texts",
        "pallas_kernels",
    },
    "planning": {"base", "model", "weights", "precision", "scoring", "pallas_kernels"},
    "engines": {"base", "model", "scoring", "precision", "texts", "weights"},
    "faults": {
        "base", "model", "precision", "plugins", "scoring", "recording", "judge", "pallas_kernels",
    },
    "experiments": {
        "base", "model", "precision", "plugins", "scoring", "recording", "judge", "reporting",
        "texts", "pallas_kernels",
    },
    "demo": {
        "base", "model", "weights", "scoring", "precision", "texts", "recording", "judge",
        "pallas_kernels",
    },
}  # fmt: skip
NO_JAX = ("recording", "judge", "reporting", "texts")


def imported_modules(path: Path) -> set[str]:
    """Every module a file imports, at any depth of nesting."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules.add(node.module)
            if node.module == "kernjax":
                modules |= {f"kernjax.{alias.name}" for alias in node.names}
    return modules


def rooms() -> list[str]:
    return sorted(p.name for p in PACKAGE.iterdir() if (p / "__init__.py").is_file())


def test_every_room_is_in_the_table():
    assert set(rooms()) == set(ALLOWED)


@pytest.mark.parametrize("room", sorted(ALLOWED))
def test_imports_go_one_way(room):
    found = {}
    for path in (PACKAGE / room).rglob("*.py"):
        for module in imported_modules(path):
            parts = module.split(".")
            if parts[0] == "pallas_kernels":
                other = parts[0]
            elif parts[0] == "kernjax" and len(parts) > 1 and parts[1] != "__version__":
                other = parts[1]
            else:
                continue
            if other != room and other not in ALLOWED[room]:
                found.setdefault(other, []).append(str(path.relative_to(ROOT)))
    assert not found


def test_pallas_kernels_never_imports_kernjax():
    for path in (ROOT / "pallas_kernels").rglob("*.py"):
        assert not {m for m in imported_modules(path) if m.split(".")[0] == "kernjax"}, path


@pytest.mark.parametrize("room", NO_JAX)
def test_judging_never_imports_jax(room):
    code = f"import sys, kernjax.{room}; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_files_stay_readable():
    """No source file past 450 lines: one that must be wants a reason, here."""
    reasons: dict[str, str] = {}
    for folder in (PACKAGE, ROOT / "pallas_kernels"):
        for path in folder.rglob("*.py"):
            lines = len(path.read_text(encoding="utf-8").splitlines())
            assert lines <= 450 or str(path.relative_to(ROOT)) in reasons, f"{path}: {lines} lines"


def test_no_path_of_a_machine():
    homes = ("/ho" + "me/", "/ro" + "ot/", "/Us" + "ers/", "/wo" + "rk/")
    for folder in "kernjax pallas_kernels tests benchmarks configs corpora docs".split():
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in {".py", ".toml", ".md", ".tsv", ".sh", ".flags", ".jsonl"}:
                text = path.read_text(encoding="utf-8")
                assert not any(home in text for home in homes), path

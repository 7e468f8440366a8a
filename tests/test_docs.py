"""What the documents show is true: examples are as made now, links lead somewhere, errors exist."""

from __future__ import annotations

import ast
import functools
import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from instrument import run
from shown_commands import PAGES, ROOT

OWN_KERNEL = (ROOT / "docs" / "own_kernel.md").read_text(encoding="utf-8")
(PROGRAM,) = re.findall(r"^```python\n(import jax.*?)^```", OWN_KERNEL, re.M | re.S)


def test_the_twenty_lines_of_the_page_are_attention(monkeypatch):
    """Against the op's own float32, with grouped heads and garbage behind the sequences."""
    assert len(PROGRAM.strip().splitlines()) <= 20
    space = {}
    exec(compile(PROGRAM, "own_kernel.md", "exec"), space)
    rng = np.random.default_rng(5)
    q = rng.standard_normal((2, 5, 4, 8), np.float32)
    k, v = (rng.standard_normal((2, 12, 2, 8)).astype(np.float32) for _ in "kv")
    q_offset, kv_length = np.array([3, 0], np.int32), np.array([8, 4], np.int32)
    for sequence, length in enumerate(kv_length):
        k[sequence, length:] = v[sequence, length:] = np.nan
    keywords = {"q_offset": q_offset, "kv_length": kv_length, "k_scale": 1.5, "v_scale": 0.5}
    found = space["my_function"](q, k, v, **keywords, scale=None, formats=None)
    expected = np.zeros_like(q)
    for b, t, n in np.ndindex(2, 5, 4):
        last = min(q_offset[b] + t, kv_length[b] - 1)
        keys = 1.5 * k[b, : last + 1, n // 2].astype(np.float64)
        weights = np.exp(keys @ q[b, t, n] / np.sqrt(8))
        expected[b, t, n] = weights @ v[b, : last + 1, n // 2] * 0.5 / weights.sum()
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)


EXAMPLES = ROOT / "docs" / "examples"


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """A copy of docs/examples after `bash docs/examples/make.sh draw` beside it."""
    folder = tmp_path_factory.mktemp("drawn")
    shutil.copytree(EXAMPLES, folder / "docs" / "examples")
    for report in (folder / "docs" / "examples").glob("*/report.*"):
        report.unlink()
    (folder / "kernjax").symlink_to(ROOT / "kernjax")
    tools = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "docs/examples/make.sh", "draw"],
        cwd=folder,
        env={**os.environ, **tools, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return folder / "docs" / "examples"


@pytest.mark.parametrize("colour, code", [("red", 1), ("green", 0)])
def test_the_examples_are_as_reports_are_drawn_now(drawn, colour, code):
    """Where this fails: bash docs/examples/make.sh draw."""
    folder = EXAMPLES / colour
    assert {path.name for path in folder.iterdir()} == {p.name for p in (drawn / colour).iterdir()}
    for path in folder.iterdir():
        assert path.read_bytes() == (drawn / colour / path.name).read_bytes(), path.name
    line = json.loads((folder / "verdict.json").read_text(encoding="utf-8"))
    assert line["exit_code"] == code and line["reference"]["path"].startswith("kernjax/")
    page = (folder / "report.html").read_text(encoding="utf-8")
    for question in ("What changed", "How sure", "Where", "What next"):
        assert f"<dt>{question}</dt>" in page


def test_the_green_example_is_what_its_recording_is_judged_as(tmp_path, monkeypatch, capsys):
    """Where this fails: bash docs/examples/make.sh, as the rules or their words have changed."""
    monkeypatch.chdir(ROOT)
    kept = json.loads((EXAMPLES / "green" / "verdict.json").read_text(encoding="utf-8"))
    (candidate,) = [w for w in shlex.split(kept["command"]) if w.startswith("--candidate=")]
    check = importlib.import_module("kernjax.check")
    assert run(check, candidate, f"--output_dir={tmp_path}") == 0
    capsys.readouterr()
    made = json.loads((tmp_path / "verdict.json").read_text(encoding="utf-8"))
    for name in ("command", "wall_s"):
        del made[name], kept[name]
    assert flat(made) == near(flat(kept))
    figures = [
        json.loads((folder / "figures.json").read_text(encoding="utf-8"))
        for folder in (tmp_path, EXAMPLES / "green")
    ]
    assert flat(figures[0]) == near(flat(figures[1]))


def flat(value, path: str = "") -> dict:
    """Every leaf by its path."""
    if not isinstance(value, dict | list):
        return {path: value}
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    return {k: v for key, item in pairs for k, v in flat(item, f"{path}/{key}").items()}


def near(leaves: dict) -> dict:
    """Numbers to 1e-3: the last bits of a logarithm differ between processors."""
    return {
        path: pytest.approx(value, rel=1e-3, abs=1e-12) if type(value) in (int, float) else value
        for path, value in leaves.items()
    }


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives the headings of a page."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name}: {target}"
        if anchor:
            assert anchor in anchors(file), f"{page.name}: {target}"


@functools.cache
def messages() -> str:
    """Every text in the package's source; what a formatted string fills in is left out."""
    texts = []
    for path in (ROOT / "kernjax").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [v.value if isinstance(v, ast.Constant) else "\0" for v in node.values]
                texts.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(texts)


def test_the_errors_of_the_faq_exist():
    text = (ROOT / "docs" / "faq.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^## `(.*)`$", text, re.M)
    assert len(quoted) > 8
    for message in quoted:
        assert message in messages(), message

"""The documents as a site, and the page that other engines write recordings by."""

from __future__ import annotations

import importlib.util
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kernjax.recording import PHASES, SCHEMA_VERSION, TOP_K, build_manifest, load_recording
from kernjax.recording.layout import COLUMNS
from kernjax.recording.manifest import complete_manifest

ROOT = Path(__file__).resolve().parent.parent
SCHEMA = (ROOT / "docs" / "recording_schema.md").read_text(encoding="utf-8")


def table(first: str) -> dict[str, list[str]]:
    """The rows of the page's table whose header starts with `first`, by their first cell."""
    lines = SCHEMA.split(f"| {first} |")[1].splitlines()[2:]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines[: lines.index("")]
    ]
    return {cells[0].strip("`"): cells[1:] for cells in rows}


def test_the_arrays_of_the_schema_page():
    shown = {name: (dtype, shape) for name, (dtype, shape, _) in table("array").items()}
    assert shown == {
        name: (dtype, "[R, K]" if wide else "[R]") for name, (dtype, wide) in COLUMNS.items()
    }
    for number, name in enumerate(PHASES):
        assert f"{number} {name}" in SCHEMA
    assert f"Schema version: {SCHEMA_VERSION}." in SCHEMA and f"(at least {TOP_K})" in SCHEMA


def test_the_keys_of_the_schema_page():
    shown = table("key")
    # The last key is there only where experts were forced (`scoring.recorder.record_corpus`).
    manifest = build_manifest(model={}, corpus={}, policy={}, experts_of="identity")
    segment = {"id": "a", "kind": "b", "context_len": 1, "score_len": 0, "rows": 1}
    complete = complete_manifest(manifest, [segment])
    assert set(shown) == set(complete)
    keys = re.findall(r"`(\w+)`", shown["segments"][0])
    assert set(keys) == set(complete["segments"][0])
    # What a mapping holds is said where it is built.
    said = inspect.getdoc(build_manifest).replace("\n", " ")
    for key in ("model", "corpus", "policy"):
        (held,) = re.findall(rf"{key}: `\{{(.*?)\}}`", said)
        assert set(held.split(", ")) == set(re.findall(r"`(\w+)`", shown[key][0]))


def test_the_recording_of_the_schema_page(tmp_path, monkeypatch):
    """The page's program runs, and what it writes is a reference that judges itself clean."""
    (program,) = re.findall(r"^```python\n(.*?)^```", SCHEMA, re.M | re.S)
    monkeypatch.chdir(tmp_path)
    exec(compile(program, "recording_schema.md", "exec"), {})
    from kernjax.judge import compare

    found = compare("my-recording", "my-recording")
    assert (found.kl == 0).all() and len(found.kl) == 9
    assert load_recording("my-recording").manifest["engine"] == "my-engine"


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="mkdocs is not installed")
def test_the_site_builds_without_a_warning(tmp_path):
    """Strict: every link and anchor leads somewhere, every page is in the navigation."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    home = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert "recording_schema/" in home and "repository/README.md.txt" in home
    assert (tmp_path / "repository" / "README.md.txt").read_text(encoding="utf-8") == (
        ROOT / "README.md"
    ).read_text(encoding="utf-8")

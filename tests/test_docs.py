"""What the documents show is true: commands parse, some run, links lead somewhere."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import json
import re
import shlex
from pathlib import Path

import pytest
from instrument import run

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_SHELL = {"|", ">", ">>", "&&", "||", ";"}


def commands(page: Path) -> list[list[str]]:
    """The words after `python -m` of every kernjax command in a code block."""
    found = []
    for block in re.findall(r"^```\w*\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S):
        for line in block.replace("\\\n", " ").splitlines():
            line = line.strip().removeprefix("- ").removeprefix("$ ")
            if line.startswith("python -m kernjax"):
                words = shlex.split(line)[2:]
                stop = next((i for i, word in enumerate(words) if word in _SHELL), len(words))
                found.append(words[:stop])
    return found


SHOWN = [(page.name, words) for page in PAGES for words in commands(page)]


def test_there_are_commands():
    assert len(SHOWN) > 20


@pytest.mark.parametrize("page, words", SHOWN, ids=[f"{p}-{w[0]}" for p, w in SHOWN])
def test_shown_commands_parse(page, words):
    name, *argv = words
    if name == "kernjax":
        return
    assert importlib.util.find_spec(name), f"{page}: there is no {name}"
    flags = getattr(importlib.import_module(name), "FLAGS", None)
    if flags is not None:
        flags.parse(argv)  # UserError for an unknown flag or a value that cannot be read
        flags.unparse_flags()


def test_the_shown_commands_without_a_model_run(tmp_path, monkeypatch, capsys):
    """The tutorial's first verdict, and the report of it drawn again."""
    (tmp_path / "kernjax").symlink_to(ROOT / "kernjax")
    monkeypatch.chdir(tmp_path)
    ours = [
        words
        for page, words in SHOWN
        if page == "tutorial.md" and any(w.startswith("--candidate=kernjax/") for w in words)
    ]
    assert ours
    for name, *argv in ours:
        module = importlib.import_module(name)
        code = run(module, *argv)
        line = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert code == line["exit_code"] and code in (0, 2)
        (folder,) = [w.partition("=")[2] for w in argv if w.startswith("--output_dir=")]
        names = {path.name for path in Path(folder).iterdir()}
        for shown in ("report.html", "report.md", "junit.xml", "report.txt", "verdict.json"):
            assert shown in names
    report = importlib.import_module("kernjax.report")
    assert run(report, f"--verdict={folder}", "--output_dir=page") == 0


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

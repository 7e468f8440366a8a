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

import numpy as np
import pytest
from instrument import run

from kernjax.recording import Recording, load_recording
from kernjax.scoring.session import Session

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


def test_the_band_of_the_page_is_made_and_judges(tmp_path, monkeypatch, capsys):
    (tmp_path / "kernjax").symlink_to(ROOT / "kernjax")
    monkeypatch.chdir(tmp_path)
    (make, *flags), (check, *argv) = commands(ROOT / "docs" / "calibrate.md")[:2]
    assert run(importlib.import_module(make), *flags) == 0
    made = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert made["producers"] == 4 and made["band"] == "out/four.band.json"
    assert run(importlib.import_module(check), *argv) in (0, 2)  # a normal one is never red
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["band"]["producers"] == ["bf16", "chunk32", "block256", "p_f32"]
    assert line["changes"] == [["delta_rule.chunk", "64", "128"]]


# What stands for something else on the pages, and what a test has in its place.
PLACEHOLDERS = {
    "--model=DIR": "--model=demo",
    "--model=CONVERTED": "--model=demo",
    "--corpus=article": "--corpus=demo",
    "--reference=out/reference": "--reference={demo}/demo.f32.zip",
    "--reference=refs/f32": "--reference={demo}/demo.f32.zip",
    "--band=out/band.json": "--band={demo}/demo.band.json",
    "--band=refs/band.json": "--band={demo}/demo.band.json",
    "--band=out/four.band.json": "--band={demo}/demo.band.json",
}
DEMO = ROOT / "kernjax" / "demo" / "recordings"


def filled(words: tuple[str, ...]) -> list[str]:
    return [PLACEHOLDERS.get(word, word).format(demo=DEMO) for word in words]


@functools.cache
def recorded(corpus: str) -> Recording:
    """What stands for a run of the model: another normal producer's recording."""
    return load_recording(DEMO / f"{corpus}.chunk32.zip")


CHECKS = {tuple(w) for _, w in SHOWN if w[0] == "kernjax.check"}
OWN_KERNEL = (ROOT / "docs" / "own_kernel.md").read_text(encoding="utf-8")
(PROGRAM,) = re.findall(r"^```python\n(import jax.*?)^```", OWN_KERNEL, re.M | re.S)


@pytest.mark.parametrize("words", sorted(CHECKS), ids=" ".join)
def test_shown_checks_run(tmp_path, monkeypatch, capsys, words):
    """All of a check but the model: flags, policies, kernels, files, the judgement, the report."""
    package = tmp_path / "my_package"
    package.mkdir()
    (package / "my_module.py").write_text(PROGRAM, encoding="utf-8")
    for name in ("kernjax", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    asked = []

    def record(session, policy, out, kernels=None, **keywords):
        asked.append(kernels)
        return recorded(session.corpus.name)

    monkeypatch.setattr(Session, "record", record)
    name, *argv = filled(words)
    code = run(importlib.import_module(name), *argv)
    captured = capsys.readouterr()
    line = json.loads(captured.out.splitlines()[-1])
    assert code == line["exit_code"] != 3, captured.err
    assert bool(asked) != any(word.startswith("--candidate=") for word in argv)
    kernels = [
        word for word in argv if word.startswith("attention.prefill=") or "--kernel=" in word
    ]
    assert bool(asked and asked[0]) == bool(kernels)
    assert f"python -m {name}" in line["command"]


_LONG = ("kernjax.record", "kernjax.plan", "kernjax.convert")
RUNS = {tuple(w) for _, w in SHOWN if w[0] in _LONG and "SHARED" not in str(w)}


@pytest.mark.parametrize("words", sorted(RUNS), ids=" ".join)
def test_shown_runs_pass_their_own_check(tmp_path, monkeypatch, capsys, words):
    """`--only_check_args`: flags and files, and what the model makes of them."""
    monkeypatch.chdir(tmp_path)
    name, *argv = filled(words)
    assert run(importlib.import_module(name), *argv, "--only_check_args") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["checked"] is True


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


@pytest.mark.parametrize("colour, code", [("red", 1), ("green", 0)])
def test_the_examples_are_as_reports_are_drawn_now(tmp_path, colour, code):
    """Where this fails: bash docs/examples/make.sh draw."""
    folder = EXAMPLES / colour
    flags = [f"--verdict={folder}", f"--output_dir={tmp_path}"]
    flags += [f"--locate={folder}"] if colour == "red" else []
    assert run(importlib.import_module("kernjax.report"), *flags) == 0
    for name in ("report.html", "report.md", "junit.xml", "verdict.json", "figures.json"):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes(), name
    line = json.loads((folder / "verdict.json").read_text(encoding="utf-8"))
    assert line["exit_code"] == code and line["reference"]["path"].startswith("kernjax/")
    page = (folder / "report.html").read_text(encoding="utf-8")
    for question in ("What changed", "How sure", "Where", "What next"):
        assert f"<dt>{question}</dt>" in page


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

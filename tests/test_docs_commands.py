"""Every command that the documents show is run, page by page and in the page's order.

In a folder that looks like a checkout, with the demo's own files, and recordings in place of the
model's arithmetic (`recorded_model`). What is not run is named in NOT_RUN, with the reason, and its
flags are parsed by the command.
"""

from __future__ import annotations

import importlib
import json
import re
import shutil
import sys

import pytest
from instrument import run
from recorded_model import stand_in
from shown_commands import PAGES, ROOT, commands, lines

from kernjax import __main__ as listing
from kernjax.faults import find
from kernjax.judge import simulate
from kernjax.precision import policy_names

NOT_RUN = {
    "--coordinator_address=node0:8476": "two hosts; test_record_pods.py runs two processes",
    "kernjax.demo.train": "hours, on books that are not here; test_demo_train.py trains in small",
    "kernjax.demo.export": "exports that training; test_demo_train.py exports a small one",
}
"""A word of the command, and why it is not run. What its test runs instead is named there."""

ONLY_CHECKED = {
    "kernjax.plan": "minutes of the TPU's and GPU's compilers; CI's lanes run tests.compile.plan",
}
"""Run as far as `--only_check_args` goes: flags, files, and what the model makes of them."""

OTHER_LINES = {
    "pip install ": "network; CI installs these extras",
    "python3 -m venv ": "network; CI makes one",
    "python -m pytest": "runs this test",
    "bash docs/examples/make.sh": "test_docs.py runs `draw`; the others take minutes, or Chromium",
    "python -m tests.compile.": "real compilers; lanes of CI",
    "python benchmarks/kernels.py": "the TPU's compiler; a measurement, kept in benchmarks/results",
    "test -f out/report.md ": "needs GitHub: a job's summary, a request's comment",
}
"""Shown lines that are no command of kernjax, by how they start."""

PLACEHOLDERS = {
    "--corpus=article": "--corpus=demo",  # 72 files of the network
    "--reference=refs/f32": "--reference=kernjax/demo/recordings/demo.f32.zip",
    "--band=refs/band.json": "--band=kernjax/demo/recordings/demo.band.json",
    "--bits=4..16": "--bits=4,8,16",
    "--draws=300": "--draws=1",
    "--draws=100": "--draws=1",
    "--draws=8": "--draws=1",
}
"""What stands for something of the reader's, or takes long, and what is in its place."""

WITH_COMMANDS = [page for page in PAGES if commands(page)]
OWN_KERNEL = (ROOT / "docs" / "own_kernel.md").read_text(encoding="utf-8")
(PROGRAM,) = re.findall(r"^```python\n(import jax.*?)^```", OWN_KERNEL, re.M | re.S)


def reason_not_to_run(words: list[str]) -> str:
    return next((NOT_RUN[word] for word in words if word in NOT_RUN), "")


def test_every_shown_line_is_a_command_of_ours_or_has_a_reason():
    shown = [line for page in PAGES for line in lines(page)]
    ours = [words for page in PAGES for words in commands(page)]
    assert len(ours) > 60
    others = [line for line in shown if not line.startswith("python -m kernjax")]
    assert len(ours) + len(others) == len(shown)
    for line in others:
        assert any(line.startswith(start) for start in OTHER_LINES), line
    for start in OTHER_LINES:
        assert any(line.startswith(start) for line in others), f"{start} is shown nowhere"
    for word in {**NOT_RUN, **ONLY_CHECKED}:
        assert any(word in words for words in ours), f"{word} is shown nowhere"


NOT_RUN_COMMANDS = [words for page in PAGES for words in commands(page) if reason_not_to_run(words)]


@pytest.mark.parametrize("words", NOT_RUN_COMMANDS, ids=" ".join)
def test_what_is_not_run_is_parsed(words, monkeypatch):
    monkeypatch.chdir(ROOT)  # flag files are named from there
    flags = importlib.import_module(words[0]).FLAGS
    flags.parse(words[1:])  # UserError for an unknown flag or a value that cannot be read
    flags.unparse_flags()


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A folder that a command may write anywhere in: what is the repository's is a copy."""
    recordings = tmp_path / "kernjax" / "demo" / "recordings"
    shutil.copytree(ROOT / "kernjax" / "demo" / "recordings", recordings)
    for name in ("examples", "configs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("docs", "my_package"):
        (tmp_path / name).mkdir()
    (tmp_path / "my_package" / "my_module.py").write_text(PROGRAM, encoding="utf-8")
    (tmp_path / "DIR").symlink_to(ROOT / "kernjax" / "demo" / "model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("my_package", "my_package.my_module"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield tmp_path
    for name in ("kernjax", "out"):  # tens of megabytes, for every page
        shutil.rmtree(tmp_path / name, ignore_errors=True)


@pytest.fixture(scope="module")
def ran():
    """What another page has run already, of commands that leave no file and need none."""
    return set()


@pytest.fixture
def smaller(monkeypatch):
    """Fewer rows and policies, and small drawn corpora, where a command has many."""
    rows = tuple(find(["state_4_bits", "control_chunk_form"]))
    monkeypatch.setattr("kernjax.faults.CATALOGUE", rows)
    monkeypatch.setattr("kernjax.faults.SHORT", tuple(row.id for row in rows))
    monkeypatch.setattr("kernjax.faults.NORMALS", ("bf16", "bf16,prefill_window=512"))
    monkeypatch.setattr("kernjax.precision.policy_names", lambda: policy_names()[:2])
    few = {**simulate.Design().__dict__, "contexts": (512, 2048), "steps": 16}
    monkeypatch.setattr(simulate, "Design", lambda **given: simulate_design(**{**few, **given}))
    stress = list(simulate.STRESS.items())[:1]
    monkeypatch.setattr(simulate, "STRESS", {name: simulate_design(**few) for name, _ in stress})


simulate_design = simulate.Design


def run_shown(words: list[str], monkeypatch, capsys) -> dict:
    """Runs a command in this process; its JSON line, {} of those that have none."""
    name, *argv = [PLACEHOLDERS.get(word, word) for word in words]
    if name in ONLY_CHECKED:
        argv.append("--only_check_args")
    if name == "kernjax":
        assert listing.dispatch(argv) == 0
        return {}
    if name == "kernjax.judge.simulate":
        monkeypatch.setattr("sys.argv", [name, *argv])
        simulate.main()
        assert "bands refused" in capsys.readouterr().out
        return {}
    code = run(importlib.import_module(name), *argv)
    said = capsys.readouterr()
    if "--help" in argv:
        assert code == 0 and "--" in said.out
        return {}
    line = json.loads(said.out.splitlines()[-1])
    assert code != 3, said.err
    assert line.get("exit_code", code) == code
    return line


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_of_the_page_run(page, ran, checkout, smaller, monkeypatch, capsys):
    titles = stand_in(monkeypatch)
    for words in map(list, dict.fromkeys(map(tuple, commands(page)))):
        if (
            tuple(words) in ran
            or reason_not_to_run(words)
            or words[:2] == ["kernjax.corpus", "fetch"]
        ):
            continue
        titles.clear()
        if page.name == "ci.md" and words[0] == "kernjax.check":
            shutil.rmtree("out", ignore_errors=True)  # of another CI system: a fresh checkout
        line = run_shown(words, monkeypatch, capsys)
        if not any(re.search(r"(^|=)out(/|$)|^--(out|work_dir|markdown)", word) for word in words):
            ran.add(tuple(words))
        for word in words:
            flag, _, value = word.partition("=")
            if flag in ("--output_dir", "--out", "--markdown") and value:
                assert (checkout / value).exists(), f"{words} left nothing at {value}"
        if words[0] == "kernjax.check" and line:
            check_the_check(words, line, titles, checkout)
    assert (checkout / "DIR" / "config.json").samefile(ROOT / "kernjax/demo/model/config.json")


def check_the_check(words, line, titles, checkout):
    """The verdict's command, its files, and that the kernel or the policy is what ran."""
    assert line["command"].startswith("python -m kernjax.check ")
    is_run = not any(word.startswith("--candidate=") for word in words)
    assert bool(titles) == is_run
    kernels = [word for word in words if ":" in word and word.startswith(("attention.", "--kern"))]
    for kernel in kernels:
        name = kernel.rpartition("=")[2]
        assert f"candidate {name} on bf16" in titles, titles
        assert {"run": f"candidate {name} on bf16"}.items() <= line["runs"][0].items()
    folder = next((w.partition("=")[2] for w in words if w.startswith("--output_dir=")), None)
    if folder:
        names = {path.name for path in (checkout / folder).iterdir()}
        assert {"report.html", "report.md", "junit.xml", "report.txt", "verdict.json"} <= names


def test_fetch_takes_what_is_there(tmp_path, monkeypatch, capsys):
    """The shown command but for the corpus: of two files, which a mirror has brought before."""
    from test_corpus import house as _house

    folder = _house.__wrapped__(tmp_path)
    monkeypatch.setenv("KERNJAX_CACHE_DIR", str(tmp_path / "cache"))
    (words,) = {tuple(w) for page in PAGES for w in commands(page) if w[1:2] == ["fetch"]}
    words = ["kernjax.corpus", "fetch", *words[2:]]
    monkeypatch.setitem(PLACEHOLDERS, "--corpus=article", f"--corpus={folder}/pair.toml")
    first = run_shown([*words, f"--mirror={folder}/mirror"], monkeypatch, capsys)
    again = run_shown(words, monkeypatch, capsys)
    assert first["mirror"] == again["present"] == 2 and again["network"] == 0


def test_the_band_of_the_page_judges(checkout, monkeypatch, capsys):
    make, check = commands(ROOT / "docs" / "calibrate.md")[:2]
    made = run_shown(make, monkeypatch, capsys)
    assert made["producers"] == 4 and made["band"] == "out/four.band.json"
    line = run_shown(check, monkeypatch, capsys)
    assert line["verdict"] != "FAIL"  # a normal one
    assert line["band"]["producers"] == ["bf16", "chunk32", "block256", "p_f32"]
    assert line["changes"] == [["delta_rule.chunk", "64", "128"]]

"""The commands that the documents show: in code blocks, and in the text where they are whole."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "pallas_kernels" / "README.md",
]
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
_SHELL = {"|", ">", ">>", "&&", "||", ";"}
_STARTS = re.compile(r"(?:python3?|pip|bash|mkdocs|gh|test|git|[A-Z_]+=\S+) ")


def lines(page: Path) -> list[str]:
    """What somebody would type: lines of code blocks, and `python -m ... --flag` in the text."""
    text = page.read_text(encoding="utf-8")
    found = []
    for language, block in _BLOCK.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            line = line.strip().removeprefix("- ").removeprefix("run: ").removeprefix("$ ")
            line = re.sub(r"^steps \{ sh '(.*)' \}$", r"\1", line.removeprefix("command: "))
            if language != "python" and _STARTS.match(line):
                found.append(" ".join(line.split()))
    inline = re.findall(r"`([^`]+)`", _BLOCK.sub("", text))
    found += [
        " ".join(code.split())
        for code in inline
        if code.startswith("python -m kernjax.") and "--" in code and "NAME" not in code
    ]
    return found


def shown(name: str, *words: str) -> list[str]:
    """The flags of the first shown command of this name that has these words."""
    every = (found for page in PAGES for found in commands(page))
    return next(f[1:] for f in every if f[0] == f"kernjax.{name}" and {*words} <= {*f})


def commands(page: Path) -> list[list[str]]:
    """The words after `python -m` of every kernjax command, in the order of the page."""
    found = []
    for line in lines(page):
        words = shlex.split(line, comments=True)
        if words[:2] == ["python", "-m"] and words[2].partition(".")[0] == "kernjax":
            stop = next((i for i, word in enumerate(words) if word in _SHELL), len(words))
            found.append(words[2:stop])
    return found

"""The files of a report, all of them or none: `check --output_dir` and `kernjax.report`."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kernjax.base.files import cannot_write
from kernjax.judge.verdict import Verdict
from kernjax.reporting.comment import render_markdown
from kernjax.reporting.json import plain, verdict_line
from kernjax.reporting.junit import render_junit
from kernjax.reporting.loading import FIGURES_FILE, VERDICT_FILE
from kernjax.reporting.page import Extras, has_jinja, render_page
from kernjax.reporting.text import render_text

log = logging.getLogger("kernjax")

TEXT_FILE = "report.txt"
MARKDOWN_FILE = "report.md"
JUNIT_FILE = "junit.xml"
PAGE_FILE = "report.html"


def write_files(
    verdict: Verdict,
    output_dir: str | os.PathLike[str],
    wall_s: float | None = None,
    more: Mapping[str, Any] | None = None,
    figures: Mapping[str, Any] | None = None,
    *,
    page: bool = True,
    **causes: Mapping[str, Any] | None,
) -> list[Path]:
    """Writes the verdict into a directory: JSON, text, Markdown, JUnit XML and the HTML page.

    `more` goes into the JSON file; `figures` into one of their own and onto the page, where
    `locate` and `sweep`, the lines of these commands, are drawn too. Without jinja2 there is no
    page, and the log says what to install. UserError when the directory cannot be written; the
    files that were there are then as before.
    """
    line = verdict_line(verdict, wall_s, more)
    texts = {
        VERDICT_FILE: _json(line),
        TEXT_FILE: render_text(verdict),
        MARKDOWN_FILE: render_markdown(verdict),
        JUNIT_FILE: render_junit(verdict, wall_s),
    }
    if figures:
        texts[FIGURES_FILE] = json.dumps(plain(figures), allow_nan=False) + "\n"
    if page and has_jinja():
        texts[PAGE_FILE] = render_page(verdict, Extras(figures, line, **causes))
    elif page:
        log.info(f"{PAGE_FILE} is not written: it needs jinja2, pip install 'kernjax[report]'")
    return write_together(Path(output_dir), texts)


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=1, allow_nan=False) + "\n"


def remove_files(output_dir: str | os.PathLike[str]) -> None:
    """Removes the report of an earlier run: what cannot be judged now must not look judged."""
    for name in (VERDICT_FILE, TEXT_FILE, MARKDOWN_FILE, JUNIT_FILE, PAGE_FILE, FIGURES_FILE):
        try:
            (Path(output_dir) / name).unlink(missing_ok=True)
        except OSError as error:
            raise cannot_write(Path(output_dir), error) from error


def write_together(folder: Path, texts: Mapping[str, str]) -> list[Path]:
    """Writes the files; all lie complete on the disk before the first takes its name."""
    # Half a character (a lone surrogate) must not cost the report: its escape is written.
    contents = {name: text.encode("utf-8", "backslashreplace") for name, text in texts.items()}
    staged: list[tuple[Path, Path]] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            staged.append((folder / f".{name}.{os.getpid()}", folder / name))
            with open(staged[-1][0], "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        for _, path in staged:
            if path.is_dir():
                raise IsADirectoryError(21, "Is a directory", str(path))
        for temporary, path in staged:
            os.replace(temporary, path)
    except OSError as error:
        raise cannot_write(folder, error) from error
    finally:
        for temporary, _ in staged:
            try:
                temporary.unlink(missing_ok=True)
            except OSError:
                pass  # the folder is no folder: said above
    return [path for _, path in staged]

"""Links from a page to a file beside docs/ lead to a copy of it in the site.

On a code host such a link leads to the file itself; a site holds only what lies in docs/. A link to
a file that does not exist stays as it is, and fails the build.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.structure.files import File

_OUTSIDE = re.compile(r"\]\(((?:\.\./)+)([^)#\s]+)\)")
_FOLDER = "repository"


def _copied(page: File, match: re.Match, config) -> tuple[Path, str] | None:
    """The linked file and what it is called in the site; None for one that docs/ holds."""
    target = (Path(config.docs_dir) / page.src_uri).parent / (match[1] + match[2])
    root = Path(config.docs_dir).resolve().parent
    path = target.resolve()
    inside = path.is_relative_to(Path(config.docs_dir).resolve())
    if inside or not path.is_file() or not path.is_relative_to(root):
        return None
    # As text: a Markdown file from elsewhere has links of its own.
    return path, f"{_FOLDER}/{path.relative_to(root).as_posix()}.txt"


def on_files(files, *, config):
    """Adds the files that pages link to."""
    for page in list(files.documentation_pages()):
        for match in _OUTSIDE.finditer(page.content_string):
            if found := _copied(page, match, config):
                path, name = found
                if files.get_file_from_path(name) is None:
                    text = path.read_text(encoding="utf-8")
                    files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown, *, page, config, files):
    """Points the links at the copies."""
    up = "../" * page.file.src_uri.count("/")

    def link(match: re.Match) -> str:
        found = _copied(page.file, match, config)
        return match[0] if found is None else f"]({up}{found[1]})"

    return _OUTSIDE.sub(link, markdown)

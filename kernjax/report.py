"""Redraws a report from the files of a check, without a model and without recordings.

  python -m kernjax.report --verdict=out/fp8 --output_dir=out/fp8
  python -m kernjax.report --verdict=out/fp8/verdict.json --output_dir=out/page \\
      --locate=out/where --sweep=out/p

--verdict is the directory that `kernjax.check --output_dir` wrote, or its verdict.json;
figures.json beside it holds what the charts of single positions need. Written are report.html (one
file, no network, light and dark), report.md (for a comment or a job's summary), junit.xml (one case
for the verdict, one a gate and stratum), report.txt and verdict.json. All of them, or none.

--locate and --sweep put the layer map and the knee of these commands on the page.

The page needs jinja2: pip install 'kernjax[report]'; --nopage leaves it out.

The first word on standard output is the verdict, the last line one JSON object with the files.
Exit codes: 0 written, whatever the verdict · 3 could not read or write.
"""

from __future__ import annotations

from pathlib import Path

from kernjax.base import command
from kernjax.base.errors import UserError

FLAGS = command.Flags("report", __doc__)
_VERDICT = FLAGS.string(
    "verdict", None, "A verdict.json, or the directory that check wrote.", required=True
)
_OUTPUT_DIR = FLAGS.string("output_dir", None, "Where the files go.", required=True)
_LOCATE = FLAGS.string("locate", None, "A locate.json, or its directory: adds the layer map.")
_SWEEP = FLAGS.string("sweep", None, "A sweep.json, or its directory: adds the knee.")
_PAGE = FLAGS.boolean("page", True, "Also the HTML page; --nopage: the other files only.")


def main(args: list[str]) -> int:
    del args
    from kernjax.reporting import load_verdict, write_files
    from kernjax.reporting.loading import load_cause, load_figures
    from kernjax.reporting.page import has_jinja

    if _PAGE.value and not has_jinja():
        raise UserError(
            "jinja2 is not installed, so there is no HTML page.",
            todo="pip install 'kernjax[report]', or --nopage for the other files.",
        )
    verdict, line = load_verdict(_VERDICT.value)
    paths = write_files(
        verdict,
        _OUTPUT_DIR.value,
        line.get("wall_s"),
        line,  # as it is, with keys of later versions
        load_figures(_VERDICT.value),
        page=_PAGE.value,
        locate=load_cause(_LOCATE.value, "locate") if _LOCATE.value else None,
        sweep=load_cause(_SWEEP.value, "sweep") if _SWEEP.value else None,
    )
    print(f"{verdict.outcome}: drawn again from {Path(_VERDICT.value)}")
    command.print_json({"verdict": str(verdict.outcome), "files": [str(path) for path in paths]})
    return command.EXIT_PASS


if __name__ == "__main__":
    command.run(main, FLAGS)

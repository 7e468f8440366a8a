"""Redraws a report from the files of a check, or draws the article's figures for a checkpoint.

  python -m kernjax.report --verdict=out/fp8 --output_dir=out/fp8
  python -m kernjax.report --verdict=out/fp8/verdict.json --output_dir=out/page \\
      --locate=out/where --sweep=out/p
  python -m kernjax.report --figures --corpus=demo-deep --output_dir=out/figures
  python -m kernjax.report --figures --model=DIR --corpus=MANIFEST --reference=out/ref \\
      --recordings=out/article --record --output_dir=out/figures

--verdict is the directory that `kernjax.check --output_dir` wrote, or its verdict.json;
figures.json beside it holds what the charts of single positions need. Written are report.html (one
file, no network, light and dark), report.md (for a comment or a job's summary), junit.xml (one case
for the verdict, one a gate and stratum), report.txt and verdict.json. All of them, or none. Neither
a model nor recordings are read.

--locate and --sweep put the layer map and the knee of these commands on the page.

The page needs jinja2: pip install 'kernjax[report]'; --nopage leaves it out.

--figures draws, of any checkpoint: the distribution of the normal difference by kind; the first
attention layer's error and the logits' by P format; the state after one decode step by bits; KL by
depth and P format, absolute and over production; margin against KL and flips by margin for an
equally right implementation, direct fp8 and a state of 4 bits; where greedy texts part. Recordings
below --recordings are found by their policy (those of `kernjax.demo.table`, say), and so are the
demo's bundled ones. What nobody recorded is named and not drawn; --record makes it (production, P
in f32 and two formats, three variants: six runs of the corpus at most), below --recordings or in
OUTPUT_DIR/recordings. Three short runs need the model, --nomodel_runs leaves them out. Written are
article.md, article.json and the pictures (SVG).

The first word on standard output is the verdict (or FIGURES), the last line one JSON object with
the files. Exit codes: 0 written, whatever the verdict · 3 could not read or write.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from kernjax.base import command, shared_flags
from kernjax.base.errors import UserError

log = logging.getLogger("kernjax")

FLAGS = command.Flags("report", __doc__)
_VERDICT = FLAGS.string("verdict", None, "A verdict.json, or the directory that check wrote.")
_OUTPUT_DIR = FLAGS.string("output_dir", None, "Where the files go.", required=True)
_LOCATE = FLAGS.string("locate", None, "A locate.json, or its directory: adds the layer map.")
_SWEEP = FLAGS.string("sweep", None, "A sweep.json, or its directory: adds the knee.")
_PAGE = FLAGS.boolean("page", True, "Also the HTML page; --nopage: the other files only.")
FLAGS.heading("The article's figures")
_FIGURES = FLAGS.boolean("figures", False, "Draws them instead of a verdict.")
_RECORDINGS = FLAGS.string("recordings", None, "Directory of recordings; default: the demo's own.")
_RECORD = FLAGS.boolean("record", False, "Makes the recordings that are missing.")
_MODEL = shared_flags.model(FLAGS)
_CORPUS = shared_flags.corpus(FLAGS)
_REFERENCE = shared_flags.reference(FLAGS)
_PRODUCTION = FLAGS.string("production_policy", "bf16", "What the formats are a change of.")
_LIMIT = FLAGS.integer("limit", None, "Records at most so many segments per kind and depth.",
                       lower_bound=1)  # fmt: skip
_RUNS = FLAGS.boolean("model_runs", True, "Also what needs the model; --nomodel_runs: files only.")
_GREEDY = FLAGS.integer("greedy", 256, "Tokens of the greedy texts; 0: none.", lower_bound=0)
_BATCH_SIZE = shared_flags.batch_size(FLAGS)
_MIRROR = shared_flags.mirror(FLAGS)


def main(args: list[str]) -> int:
    del args
    if bool(_VERDICT.value) == _FIGURES.value:
        raise UserError(
            "Of --verdict and --figures one is needed, and one only.",
            "--verdict=DIR redraws a check's report, --figures draws the article's figures.",
        )
    return _draw_figures() if _FIGURES.value else _redraw()


def _redraw() -> int:
    from kernjax.reporting import load_verdict, write_files
    from kernjax.reporting.loading import load_cause, load_figures
    from kernjax.reporting.page import has_jinja

    verdict, line = load_verdict(_VERDICT.value)
    if _PAGE.value and not has_jinja():
        raise UserError(
            "jinja2 is not installed, so there is no HTML page.",
            todo="pip install 'kernjax[report]', or --nopage for the other files.",
        )
    causes = {
        name: load_cause(flag.value, name)
        for name, flag in (("locate", _LOCATE), ("sweep", _SWEEP))
        if flag.value
    }
    figures = load_figures(_VERDICT.value)
    try:
        paths = write_files(
            verdict,
            _OUTPUT_DIR.value,
            line.get("wall_s"),
            line,  # as it is, with keys of later versions
            figures,
            page=_PAGE.value,
            **causes,
        )
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        # Of the right types, and still nothing that check writes: a negative count, 1e308.
        raise UserError(
            f"{_VERDICT.value} cannot be drawn: {error}.",
            "Expected the files as kernjax.check wrote them.",
            "Run check with --output_dir once more.",
        ) from error
    print(f"{verdict.outcome}: drawn again from {Path(_VERDICT.value)}")
    command.print_json({"verdict": str(verdict.outcome), "files": [str(path) for path in paths]})
    return command.EXIT_PASS


def _made_in() -> Path:
    """Where recordings are made that are missing."""
    return Path(_RECORDINGS.value or Path(_OUTPUT_DIR.value) / "recordings")


def _places() -> list[Path]:
    """Where recordings are looked for; UserError for a directory that is not there."""
    from kernjax.base.resources import demo_recording

    if _RECORDINGS.value and not _RECORD.value and not Path(_RECORDINGS.value).is_dir():
        raise UserError(
            f"--recordings={_RECORDINGS.value}: there is no such directory.",
            "One with recordings of this model on this corpus, made with --reference.",
            "Look at its name, or let --record make the recordings there.",
        )
    bundled = [] if _REFERENCE.value else [demo_recording("")]
    return [_made_in(), *bundled]


def _draw_figures() -> int:
    from kernjax.base.files import check_writable
    from kernjax.base.progress import Meter
    from kernjax.experiments import article as model
    from kernjax.precision import parse_policy
    from kernjax.reporting.article import article_markdown, numbers
    from kernjax.reporting.article_charts import article_drawings
    from kernjax.reporting.files import write_together
    from kernjax.reporting.pictures import picture
    from kernjax.scoring.defaults import default_reference
    from kernjax.scoring.session import Session

    places = _places()
    check_writable(_OUTPUT_DIR.value)
    production = parse_policy(_PRODUCTION.value)
    session = Session.open(
        _MODEL.value,
        _CORPUS.value,
        _REFERENCE.value or default_reference(_MODEL.value, _CORPUS.value),
        batch_size=_BATCH_SIZE.value,
        mirror=_MIRROR.value,
    )
    found = model.roles(
        session,
        production,
        places,
        _made_in() if _RECORD.value else None,
        _LIMIT.value,
        lambda title: Meter(title, "tok"),
    )
    data = numbers(session.reference, found)
    if _RUNS.value:
        log.info("running the model: its first layer, its state, its greedy texts (--nomodel_runs)")
        data |= model.measured(session, production, _GREEDY.value)
    drawings = article_drawings(data)
    texts = {f"{name}.svg": picture(drawing) for name, drawing in drawings.items()}
    text = article_markdown(data, {name: f"{name}.svg" for name in drawings})
    texts["article.md"] = text
    texts["article.json"] = json.dumps(data, allow_nan=False) + "\n"
    paths = write_together(Path(_OUTPUT_DIR.value), texts)
    print(f"FIGURES: {len(drawings)} pictures of {session.model.name} on {session.corpus.name}\n")
    print(text)
    command.print_json({"files": [str(path) for path in paths]})
    return command.EXIT_PASS


if __name__ == "__main__":
    command.run(main, FLAGS)

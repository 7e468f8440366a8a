"""Tries the instrument on planted faults, on controls, and on pairs of normal producers.

  python -m kernjax.selftest
  python -m kernjax.selftest --short
  python -m kernjax.selftest --only=state_transposed,control_v_new_bf16
  python -m kernjax.selftest --model=DIR --corpus=article --reference=out/ref \\
      --band=out/band.json --markdown=docs/faults.md

Each row of the catalogue (kernjax/faults/catalogue.py) replaces one op by one that is wrong in one
place: public accuracy bugs of inference kernels, small enough to read. The model runs with it on
production precision, and the verdict is what `kernjax.check` would have said. A fault has to be
red; a small one may be proven below the floor of the corpus, which is printed, or lie at it
(INCONCLUSIVE). A control (a difference that engines may have) and a normal producer must not be
red.

--short runs one or two rows for every op, two controls and the bundled normal producers, on three
segments of each kind and depth and without local sizes: minutes, for CI. The whole catalogue takes
the better part of an hour on two cores.

The last line of standard output is one JSON object. Exit codes: 0 every row came to what it should
· 1 a fault was missed, or something right was flagged · 3 could not run.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from kernjax.base import command, shared_flags

FLAGS = command.Flags("selftest", __doc__)
_ONLY = FLAGS.comma_list("only", [], "Ids of the rows to run; default: all of them.")
_SHORT = FLAGS.boolean("short", False, "Named faults and controls only, without local sizes.")
FLAGS.heading("What it runs on")
_MODEL = shared_flags.model(FLAGS)
_CORPUS = shared_flags.corpus(FLAGS)
_REFERENCE = shared_flags.reference(FLAGS)
_BAND = FLAGS.string("band", None, "The normal difference; default: the demo's.")
FLAGS.heading("How it runs")
_FIRST_LOOK = FLAGS.integer(
    "first_look", 4, "Segments per kind and depth that a fault is tried on first.", lower_bound=2
)
_BATCH_SIZE = shared_flags.batch_size(FLAGS)
_MESH = shared_flags.mesh(FLAGS)
_MIRROR = shared_flags.mirror(FLAGS)
FLAGS.heading("What it writes")
_MARKDOWN = FLAGS.string("markdown", None, "File for the table, in Markdown.")
_OUTPUT_DIR = FLAGS.string("output_dir", None, "Keeps the recordings; a stopped run goes on there.")


def main(args: list[str]) -> int:
    del args
    began = time.monotonic()
    from kernjax.base.files import check_writable, write_text
    from kernjax.base.progress import Meter
    from kernjax.faults import CATALOGUE, NORMALS, SHORT, find
    from kernjax.faults.table import line, markdown, plain
    from kernjax.faults.trials import Trials
    from kernjax.judge import Band
    from kernjax.precision import parse_policy
    from kernjax.scoring.defaults import default_band, default_reference
    from kernjax.scoring.session import Session

    for folder in (_OUTPUT_DIR.value, _MARKDOWN.value and Path(_MARKDOWN.value).parent):
        if folder:
            check_writable(folder)
    rows = find(_ONLY.value) if _ONLY.value else find(list(SHORT)) if _SHORT.value else CATALOGUE
    reference = _REFERENCE.value or default_reference(_MODEL.value, _CORPUS.value)
    band = Band.load(_BAND.value or default_band(_MODEL.value, _CORPUS.value))
    session = Session.open(
        _MODEL.value,
        _CORPUS.value,
        reference,
        batch_size=_BATCH_SIZE.value,
        mesh=_MESH.value,
        mirror=_MIRROR.value,
    )
    with tempfile.TemporaryDirectory() as scratch:
        trials = Trials(
            session,
            band,
            parse_policy(band.production_policy),
            Path(_OUTPUT_DIR.value or scratch),
            min(_FIRST_LOOK.value, 3) if _SHORT.value else _FIRST_LOOK.value,
            _SHORT.value,
            lambda title: Meter(title, "tok"),
        )
        results = []
        if not _ONLY.value:
            for name, recorded in _normals(NORMALS, _SHORT.value).items():
                results.append(trials.normal(name, recorded))
                print(line(results[-1]), flush=True)
        for row in trials.fitting(rows):
            results.append(trials.fault(row))
            print(line(results[-1]), flush=True)
    wrong = [result for result in results if not result.is_right]
    floor = band.detection_floor
    if _MARKDOWN.value:
        page = markdown(results, floor, _CORPUS.value, FLAGS.as_typed("output_dir"))
        write_text(Path(_MARKDOWN.value), page)
    print(_summary(results, wrong, floor))
    command.print_json(
        {
            "exit_code": command.EXIT_FAIL if wrong else command.EXIT_PASS,
            "rows": [plain(result) for result in results],
            "wrong": [result.id for result in wrong],
            "detection_floor": floor,
            "wall_s": round(time.monotonic() - began, 1),
        }
    )
    return command.EXIT_FAIL if wrong else command.EXIT_PASS


def _normals(names: tuple[str, ...], is_short: bool) -> dict[str, Path | None]:
    """Equally right producers: those bundled as recordings, and policies that have to be run."""
    from kernjax.base.resources import demo_recording

    found: dict[str, Path | None] = {}
    if _MODEL.value == "demo":
        start, end = f"{_CORPUS.value}.", ".zip"
        for path in sorted(demo_recording("").glob(f"{start}*{end}")):
            name = path.name.removeprefix(start).removesuffix(end)
            if name != "f32":
                found[name] = path
    return found | ({} if is_short else {name: None for name in names if name not in found})


def _summary(results: list[Any], wrong: list[Any], floor: dict[str, float]) -> str:
    counts: dict[str, int] = {}
    for result in results:
        counts[result.status] = counts.get(result.status, 0) + 1
    told = ", ".join(f"{count} {status}" for status, count in counts.items())
    smallest = ", ".join(f"{value:.4g} on {kind}" for kind, value in floor.items())
    lines = [f"{len(results)} rows: {told}.", f"The floor, the smallest R detected: {smallest}."]
    if wrong:
        lines.append("Not as they should be: " + ", ".join(result.id for result in wrong) + ".")
    return "\n".join(lines)


if __name__ == "__main__":
    command.run(main, FLAGS)

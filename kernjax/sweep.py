"""How coarse may one site be rounded? One format after another, and where the knee is.

  python -m kernjax.sweep --site=delta_rule.state --bits=4..16
  python -m kernjax.sweep --site=attention.p --formats=f32,bf16,f16,fp8*448,fp8
  python -m kernjax.sweep --site=delta_rule.state@layers=0-5 --bits=10,7,4 --limit=4
  python -m kernjax.sweep --model=DIR --corpus=article --reference=out/ref --band=out/band.json \\
      --site=kv_cache.v --formats=bf16,fp8

--policy is what the site's rounding is a change of. Every format is recorded at the reference's
ids, one after another, on weights that are loaded once. The knee is the first format, from the
widest on, whose ratio to the normal difference (the band) is above 1 with 95 % confidence: above
what one more equally right producer would do. Formats are taken in the order they are given, the
widest first; --bits puts itself in that order.

Tables: R by kind; KL by decode step; and, after one decode step, how far each layer's recurrent
state and residual stream are from the same policy without this rounding (--probe segments of the
shallowest depth; 0 leaves it out).

--output_dir keeps sweep.md, sweep.json, sweep.png (where matplotlib is installed, the extra
`report`) and the recordings; a sweep that was stopped goes on there. --plot=FILE draws the plot
elsewhere.

The first line is the finding, the last one JSON object. Exit codes: 0 done · 2 the knee cannot be
told (too few segments, or no order in the formats) · 3 could not run.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kernjax.base import command, shared_flags
from kernjax.base.errors import UserError

FLAGS = command.Flags("sweep", __doc__)
_SITE = FLAGS.string("site", None, "A policy's field, e.g. delta_rule.state.", required=True)
_BITS = FLAGS.string("bits", None, "Mantissa bits: 4..16, or 16,13,10,7,4.")
_FORMATS = FLAGS.comma_list("formats", [], "Formats instead of bits, the widest first.")
_POLICY = FLAGS.string("policy", "bf16", "The policy that the rounding is added to.")
FLAGS.heading("What it is judged against")
_MODEL = shared_flags.model(FLAGS)
_CORPUS = shared_flags.corpus(FLAGS)
_REFERENCE = shared_flags.reference(FLAGS)
_BAND = FLAGS.string("band", None, "The normal difference; default: the demo's.")
FLAGS.heading("How it runs")
_OUTPUT_DIR = FLAGS.string("output_dir", None, "Keeps tables, plot and recordings.")
_PLOT = FLAGS.string("plot", None, "Draws the plot into this file (png, svg, pdf).")
_LIMIT = FLAGS.integer("limit", None, "At most so many segments per kind and depth.", lower_bound=1)
_PROBE = FLAGS.integer("probe", 4, "Segments of the layer table; 0: no table.", lower_bound=0)
_BATCH_SIZE = shared_flags.batch_size(FLAGS)
_MESH = shared_flags.mesh(FLAGS)
_MIRROR = shared_flags.mirror(FLAGS)


def main(args: list[str]) -> int:
    del args
    began = time.monotonic()
    formats = _formats()
    from kernjax.base.files import check_writable, write_text
    from kernjax.judge import Band, compare
    from kernjax.judge.sweep import conclude, measure
    from kernjax.precision import parse_policy
    from kernjax.reporting.sweep import has_matplotlib, plot_sweep, sweep_line, sweep_markdown
    from kernjax.scoring.defaults import default_band, default_reference
    from kernjax.scoring.session import Session

    if _PLOT.value and not has_matplotlib():
        raise UserError(
            "--plot needs matplotlib, which is not installed.",
            todo="pip install 'kernjax[report]', or leave --plot out.",
        )
    for folder in (_OUTPUT_DIR.value, _PLOT.value and Path(_PLOT.value).parent):
        if folder:
            check_writable(folder)
    base = parse_policy(_POLICY.value)
    policies = [(name, _at(base, name)) for name in formats]
    reference = _REFERENCE.value or default_reference(_MODEL.value, _CORPUS.value)
    band_path = _BAND.value or default_band(_MODEL.value, _CORPUS.value)
    band = Band.load(band_path)
    session = Session.open(
        _MODEL.value,
        _CORPUS.value,
        reference,
        batch_size=_BATCH_SIZE.value,
        mesh=_MESH.value,
        mirror=_MIRROR.value,
    )
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(_OUTPUT_DIR.value or scratch)
        layers_of = _prober(session, base)
        points = []
        for name, policy in policies:
            producer = session.producer(policy)
            recording = session.record(
                producer, folder / _folder(name), limit=_LIMIT.value, on_progress=_meter(policy)
            )
            comparison = compare(session.reference, recording)
            points.append(measure(comparison, band, name, str(policy), layers_of(producer)))
    sweep = conclude(_SITE.value, str(base), points)
    markdown = sweep_markdown(sweep)
    code = command.EXIT_PASS if sweep.decided else command.EXIT_INCONCLUSIVE
    line = sweep_line(
        sweep,
        {
            "exit_code": code,
            "reference": {"path": reference, "identity": session.reference.identity},
            "band": {"path": band_path, "producers": len(band.producers)},
            "wall_s": time.monotonic() - began,
        },
    )
    print(markdown)
    if _OUTPUT_DIR.value:
        import json

        write_text(folder / "sweep.md", markdown)
        write_text(folder / "sweep.json", json.dumps(line, indent=1, allow_nan=False) + "\n")
        if has_matplotlib():
            plot_sweep(sweep, folder / "sweep.png")
        else:
            print("No plot: matplotlib is not installed (pip install 'kernjax[report]').")
    if _PLOT.value:
        plot_sweep(sweep, _PLOT.value)
    command.print_json(line)
    return code


def _formats() -> list[str]:
    """The formats by name, the widest first; UserError unless one of --bits, --formats is given."""
    if bool(_BITS.value) == bool(_FORMATS.value):
        raise UserError(
            "Of --bits and --formats one is needed, and one only.",
            "--bits=4..16 sweeps mantissa bits, --formats=bf16,fp8 the formats it names.",
        )
    if _FORMATS.value:
        names = [name.strip() for name in _FORMATS.value]
    else:
        names = [_bits_name(bits) for bits in sorted(_bits(_BITS.value), reverse=True)]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise UserError(f"{', '.join(sorted(repeated))} is named twice.", "Each format once.")
    return names


def _bits(text: str) -> list[int]:
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,2})(?:\.\.(\d{1,2}))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        low, high = min(first, last), max(first, last)
        if not match or low < 1 or high > 23:
            raise UserError(
                f"--bits={text}: {part.strip()!r} is no number of mantissa bits.",
                "From 1 to 23 (float32), as in --bits=4..16 or --bits=16,10,7,4.",
            )
        found += range(low, high + 1)
    return found


def _bits_name(bits: int) -> str:
    return "f32" if bits == 23 else f"m{bits}"


def _at(base: Any, name: str) -> Any:
    """`base` with the site at this format."""
    from kernjax.precision.grammar import parse_setting
    from kernjax.precision.policy import apply

    site, at, layers = _SITE.value.partition("@")
    return apply([parse_setting(f"{site}={name}{at}{layers}")], base)


def _folder(name: str) -> str:
    """A directory's name for a format: fp8*448 would be a pattern to a shell."""
    return name.replace("*", "x")


def _meter(policy: Any) -> Any:
    from kernjax.base.progress import Meter

    return Meter(f"sweep {policy}", "tok")


def _prober(session: Any, base: Any) -> Callable[[Any], list[Any]]:
    """A function from a producer to its layers' distances from `base` without the rounding."""
    import numpy as np

    from kernjax.judge.sweep import layer_differences
    from kernjax.precision import parse_policy
    from kernjax.precision.fields import FIELDS, show
    from kernjax.scoring.probe import Probe

    depth = min(s.context_len for s in session.corpus.segments)
    at_depth = [s for s in session.corpus.segments if s.context_len == depth and s.score_len]
    kinds = dict.fromkeys(s.kind for s in at_depth)
    turns = [[s for s in at_depth if s.kind == kind] for kind in kinds]
    # One of each kind in turn, so that few segments still show every kind.
    mixed = [group[i] for i in range(len(at_depth)) for group in turns if i < len(group)]
    chosen = mixed[: _PROBE.value]
    if not chosen:
        return lambda producer: []
    tokens = np.stack([s.tokens[: depth + 1] for s in chosen])
    truth = FIELDS[_SITE.value.partition("@")[0]].get(parse_policy("f32"))
    unrounded = Probe(session.producer(_at(base, show(truth)))).after_one_step(tokens, depth)

    def differences(producer: Any) -> list[Any]:
        kinds = producer.config.layer_types
        recurrent = [i for i, kind in enumerate(kinds) if kind == "linear_attention"]
        return layer_differences(
            [Probe(producer).after_one_step(tokens, depth)], [unrounded], recurrent
        )

    return differences


if __name__ == "__main__":
    command.run(main, FLAGS)

"""Which layer, op and site carries a red: the candidate is put in place part by part.

  python -m kernjax.locate --policy=fp8
  python -m kernjax.locate --policy=fla --full_map
  python -m kernjax.locate --kernel attention.prefill=my_package.my_module:my_function
  python -m kernjax.locate --policy=bf16,delta_rule.v_new=m2@layers=4 --noisolated

The candidate (a policy, or kernels on the production policy) is substituted into the base layer by
layer and change by change; a part's share is its mean KL against the base over the whole
candidate's. Layers are searched by halves: a part with at least --share of the whole is cut on.
--full_map runs every layer and every change at every layer. One compiled program serves all runs.

Where a layer stands out, it is run by itself on the base's own inputs, under the base's plan and
under the candidate's: its local error, position by position, stands beside its share.

--isolated (the default): the base is float32, so that the errors are the candidate's own; a kernel
sits behind the door of the production's activations, as in check. --noisolated: the base is the
production policy; its own rounding answers every change, which blurs shares.

An effect shows from where its KL exceeds the normal difference's 99th percentile (--band), or a
tenth of its largest where there is no band.

The first line is the finding, the last one JSON object. Exit codes: 0 one layer and change, or
what is outside the layers, carries at least half of it · 2 spread, or no change at all · 3 could
not run.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from kernjax.base import command, shared_flags
from kernjax.base.errors import UserError

FLAGS = command.Flags("locate", __doc__)
_POLICY = FLAGS.string("policy", None, "The candidate's policy, e.g. fp8.")
_KERNEL = FLAGS.multi_string("kernel", "OP=module:function; may be repeated.")
_FULL_MAP = FLAGS.boolean("full_map", False, "Every layer and change instead of a search.")
_SHARE = FLAGS.number(
    "share", 0.25, "Of the whole: from here on a part is cut on.", lower_bound=0.01, upper_bound=1.0
)
_ISOLATED = FLAGS.boolean("isolated", True, "On float32; --noisolated: on the production policy.")
FLAGS.heading("What it is a change of")
_MODEL = shared_flags.model(FLAGS)
_CORPUS = shared_flags.corpus(FLAGS)
_REFERENCE = shared_flags.reference(FLAGS)
_BAND = FLAGS.string("band", None, "The normal difference; default: the demo's, or none.")
_PRODUCTION = FLAGS.string("production_policy", "bf16", "What the candidate is a change of.")
FLAGS.heading("How it runs")
_OUTPUT_DIR = FLAGS.string("output_dir", None, "Keeps locate.md and locate.json.")
_LIMIT = FLAGS.integer("limit", 2, "At most so many segments per kind and depth.", lower_bound=1)
_BATCH_SIZE = shared_flags.batch_size(FLAGS)
_MESH = shared_flags.mesh(FLAGS)
_MIRROR = shared_flags.mirror(FLAGS)

_DETAILED = 3  # layers of a search that are run by themselves


def main(args: list[str]) -> int:
    del args
    began = time.monotonic()
    if not (_POLICY.value or _KERNEL.value):
        raise UserError(
            "There is no candidate.",
            "Expected --policy or --kernel.",
            "For example: python -m kernjax.locate --policy=fp8",
        )
    if _FULL_MAP.value:
        FLAGS.refuse(
            ["share"], "beside --full_map", "It says where a search goes on; a map has no search."
        )
    from kernjax.base.files import check_writable, write_text
    from kernjax.plugins import load_kernels
    from kernjax.precision import parse_policy
    from kernjax.reporting.locate import locate_line, locate_markdown
    from kernjax.scoring.defaults import default_reference
    from kernjax.scoring.session import Session
    from kernjax.scoring.substitution import Substitution

    if _OUTPUT_DIR.value:
        check_writable(_OUTPUT_DIR.value)
    production = parse_policy(_PRODUCTION.value)
    policy = parse_policy(_POLICY.value) if _POLICY.value else production
    kernels = load_kernels(_KERNEL.value)
    band = _band()
    reference = _REFERENCE.value or default_reference(_MODEL.value, _CORPUS.value)
    session = Session.open(
        _MODEL.value,
        _CORPUS.value,
        reference,
        batch_size=_BATCH_SIZE.value,
        mesh=_MESH.value,
        mirror=_MIRROR.value,
    )
    substitution = Substitution(
        session, policy, production, kernels, isolated=_ISOLATED.value, limit=_LIMIT.value
    )
    found = _attribute(substitution, band)
    markdown = locate_markdown(found)
    code = command.EXIT_PASS if found.located else command.EXIT_INCONCLUSIVE
    line = locate_line(
        found,
        {
            "exit_code": code,
            "candidate": {
                "policy": str(policy),
                "kernels": {op: kernel.to_dict() for op, kernel in kernels.items()},
            },
            "base": str(substitution.base.policy),
            "reference": {"path": reference, "identity": session.reference.identity},
            "segments": [segment.id for segment in substitution.segments],
            "wall_s": time.monotonic() - began,
        },
    )
    print(markdown)
    if _OUTPUT_DIR.value:
        import json

        folder = Path(_OUTPUT_DIR.value)
        write_text(folder / "locate.md", markdown)
        write_text(folder / "locate.json", json.dumps(line, indent=1, allow_nan=False) + "\n")
    command.print_json(line)
    return code


def _band() -> Any:
    """The band that was named, the demo's own, or None."""
    from kernjax.judge import Band
    from kernjax.scoring.defaults import default_band

    if _BAND.value:
        return Band.load(_BAND.value)
    try:
        return Band.load(default_band(_MODEL.value, _CORPUS.value))
    except UserError:
        return None


def _attribute(substitution: Any, band: Any) -> Any:
    """Runs the search and the local errors; an `Attribution`."""
    from kernjax.judge import attribution as judged

    base = substitution.run(substitution.chosen(()))
    runs = 1

    def effect(layers: tuple[int, ...], variant: int = 1) -> float:
        nonlocal runs
        runs += 1
        rows = substitution.run(substitution.chosen(layers, variant))
        kl = judged.mean_kl(base.cells, rows.cells)
        command.log.info("locate: %s: KL %.3g", judged.layers_label(layers), kl)
        return kl

    whole = substitution.run_whole()
    runs += 1
    kl = judged.row_kl(base.cells, whole.cells)
    total = judged.mean_kl(base.cells, whole.cells)
    command.log.info("locate: the whole candidate: KL %.3g", total)
    first = judged.first_place(
        kl,
        base.segment,
        base.pos,
        [segment.id for segment in substitution.segments],
        _limits(substitution, base, kl, band),
    )
    layers, sites, cells, parts = substitution.layers, [], [], []
    inside = 0.0 if substitution.outside and not layers else total
    if total > 0 and layers:
        if substitution.outside:
            inside = effect(layers)
        several = len(substitution.sites) > 1
        for site in substitution.sites:
            alone = effect(site.layers, site.variant) if several else inside
            share = judged.share_of(alone, total)
            sites.append(judged.SiteShare(site.name, site.change, site.layers, alone, share))
        known = {tuple(layers): inside}
        parts = judged.search(
            layers,
            total,
            lambda chosen: known[chosen] if chosen in known else effect(chosen),
            _SHARE.value,
            _FULL_MAP.value,
        )
        cells = _cells(substitution, parts, total, kl, base, effect)
    return judged.conclude(total, sites, parts, cells, substitution.outside, inside, first, runs)


def _cells(
    substitution: Any, parts: list[Any], total: float, kl: Any, base: Any, effect: Any
) -> list[Any]:
    """Every change at the layers that stand out, with its error on the base's inputs."""
    import numpy as np

    from kernjax.judge import attribution as judged
    from kernjax.scoring.local_error import LayerBench

    single = [part for part in parts if len(part.layers) == 1]
    if not _FULL_MAP.value:
        single = [part for part in single if part.share >= _SHARE.value]
        single = sorted(single, key=lambda part: -part.share)[:_DETAILED]
    if not single:
        return []
    by_segment = [kl[base.segment == i].max() for i in range(len(substitution.segments))]
    segment = substitution.segments[int(np.argmax(by_segment))]
    bench = LayerBench(
        substitution.base, substitution.execution, segment.tokens, segment.context_len
    )
    several = len(substitution.sites) > 1
    cells = []
    for part in single:
        (layer,) = part.layers
        for site in substitution.sites:
            if layer not in site.layers:
                continue
            alone = effect((layer,), site.variant) if several else part.kl
            error = bench.error(layer, substitution.variants[site.variant - 1].layers[layer])
            prefill, decode = _summary(error.prefill), _summary(error.decode)
            cells.append(
                judged.Cell(
                    layer,
                    substitution.config.layer_types[layer],
                    substitution.op_of(site),
                    site.name,
                    site.change,
                    alone,
                    judged.share_of(alone, total),
                    *prefill,
                    *decode,
                    judged.first_position(error.by_position),
                    segment.id,
                )
            )
    return cells


def _summary(error: Any) -> tuple[float | None, float | None]:
    """Median and maximum; inf where a value is not finite."""
    import numpy as np

    if not error.size:
        return None, None
    error = np.where(np.isfinite(error), error, np.inf)
    return float(np.median(error)), float(error.max())


def _limits(substitution: Any, rows: Any, kl: Any, band: Any) -> Any:
    """[R] the KL above which a row shows the effect."""
    import numpy as np

    from kernjax.judge.comparison import PHASES

    if band is None:
        finite = kl[np.isfinite(kl)]
        return np.full(len(kl), 0.1 * float(finite.max(initial=0.0)))
    known = {(s["kind"], s["context_len"], s["phase"]): s["p99"] for s in band.strata}
    segments = [substitution.segments[i] for i in rows.segment]
    return np.array(
        [
            known.get((segment.kind, segment.context_len, PHASES[phase]), np.inf)
            for segment, phase in zip(segments, rows.phase, strict=True)
        ]
    )


if __name__ == "__main__":
    command.run(main, FLAGS)

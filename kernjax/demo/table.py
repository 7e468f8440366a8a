"""The demo's table: every named policy by kind and depth, in place and isolated.

  python -m kernjax.demo.table --corpus=demo --work_dir=out/table --out=docs/demo_table.md

For each policy: KL median, R (geometric, over the normals on the same rows) with its interval, the
isolated effect on the same scale, flips, and the verdict. A stopped run goes on. The numbers in
docs/demo_table.md are this command's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kernjax.base import command, shared_flags
from kernjax.base.errors import UserError

FLAGS = command.Flags("demo.table", __doc__)
_CORPUS = FLAGS.string("corpus", "demo", "One of the bundled corpora.")
_POLICIES = FLAGS.comma_list("policies", [], "Which named policies; default: all but f32.")
_EXTRA = FLAGS.multi_string("policy", "A further policy in the grammar of --policy.")
_WORK = FLAGS.string("work_dir", None, "Keeps the recordings.", required=True)
_OUT = FLAGS.string("out", None, "The Markdown file.", required=True)
_LIMIT = FLAGS.integer("limit", None, "At most so many segments per kind and depth.", lower_bound=1)
_BATCH_SIZE = shared_flags.batch_size(FLAGS)


def main(args: list[str]) -> int:
    del args
    from kernjax.base.progress import Meter
    from kernjax.judge import Band, compare, judge
    from kernjax.precision import parse_policy, policy_names
    from kernjax.scoring.defaults import default_band, default_reference
    from kernjax.scoring.lenses import Lenses, run_lenses
    from kernjax.scoring.session import Session

    reference = default_reference("demo", _CORPUS.value)
    band = Band.load(default_band("demo", _CORPUS.value))
    session = Session.open("demo", _CORPUS.value, reference, batch_size=_BATCH_SIZE.value)
    # The f32 policies are the reference's own neighbours: no changes of the production policy.
    named = [name for name in policy_names() if not name.startswith("f32")]
    verdicts, refused = {}, {}
    for name in [*(_POLICIES.value or named), *_EXTRA.value]:
        runs = run_lenses(
            session,
            parse_policy(name),
            parse_policy("bf16"),
            Path(_WORK.value) / _CORPUS.value / name,
            lenses=Lenses(limit=_LIMIT.value, isolated_limit=4),
            announce=lambda title: Meter(title, "tok"),
        )
        try:
            verdicts[name] = judge(
                compare(session.reference, runs.candidate),
                band,
                isolated=compare(*runs.isolated) if runs.isolated else None,
            )
        except UserError as error:  # a band cannot judge everything: another dtype of the logits
            refused[name] = error
            command.log.info("%s: not judged: %s", name, error)
            continue
        command.log.info("%s: %s", name, verdicts[name].outcome)
    Path(_OUT.value).write_text(_markdown(_CORPUS.value, verdicts, refused), encoding="utf-8")
    print(f"{_OUT.value}: {len(verdicts)} policies on {_CORPUS.value}")
    command.print_json({name: str(verdict.outcome) for name, verdict in verdicts.items()})
    return command.EXIT_PASS


def _markdown(corpus: str, verdicts: dict[str, Any], refused: dict[str, UserError]) -> str:
    lines = [
        f"# The demo's policies on `{corpus}`",
        "",
        "Made by the command that [demo.md](demo.md) shows. R: geometric ratio of the KL to"
        " that of the normal producers on the same rows, with its 95 % interval; isolated: the"
        " ratio that the change alone predicts, 1 + KL isolated / KL normal.",
        "",
        "| policy | verdict | kind | context | KL median | R | isolated | flips | normal |",
        "| --- | --- | --- | ---: | ---: | --- | --- | ---: | ---: |",
    ]
    for name, verdict in verdicts.items():
        alone = {(d.kind, d.context_len): d for d in verdict.isolated if d.mean == "geometric"}
        for row in (s for s in verdict.strata if s.phase == verdict.deciding_phase):
            iso = alone.get((row.kind, row.context_len))
            lines.append(
                f"| `{name}` | {verdict.outcome} | {row.kind} | {row.context_len} |"
                f" {row.kl_median:.2e} | {_ratio(row.ratio, row.ratio_low, row.ratio_high)} |"
                f" {'-' if iso is None else _ratio(iso.ratio, iso.low, iso.high)} |"
                f" {row.flips} | {row.normal_flips:.1f} |"
            )
    if refused:
        lines += ["", "Not judged by this band:", ""]
        lines += [f"- `{name}`: {error}" for name, error in refused.items()]
    return "\n".join(lines) + "\n"


def _ratio(value: float | None, low: float | None, high: float | None) -> str:
    return "-" if value is None else f"{value:.2f} [{low:.2f}, {high:.2f}]"


if __name__ == "__main__":
    command.run(main, FLAGS)

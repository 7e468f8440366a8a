"""May this kernel be merged? Runs or reads a candidate, judges it against the truth, reports.

  python -m kernjax.check --policy=fp8_scaled
  python -m kernjax.check --policy=fp8 --output_dir=out/fp8
  python -m kernjax.check --kernel attention.prefill=my_package.my_module:my_function
  python -m kernjax.check --model=DIR --corpus=article --reference=out/ref --band=out/band.json \\
      --policy=bf16,delta_rule.state=m6 --incumbent=out/main
  python -m kernjax.check --reference=out/ref --band=out/band.json --candidate=out/theirs

The candidate is a policy, kernels put in place of ops (on the production policy unless --policy
says otherwise), or a finished recording. It sees the reference's tokens, is scored at the
reference's ids, and its KL is set against what equally right implementations differ by (the band).

Lenses: in place (the candidate as it is, against the ground truth) decides. Isolated: float32 but
for what the candidate changes; it shows what the change does by itself and may withhold a PASS.
--twin adds the production policy with only the changed sites undone, as reference: for diagnosis.
--force_routes (mixtures of experts, a reference recorded with --routes=all) adds the candidate on
the reference's experts: what is left of a difference then is of values, not of choices.
--incumbent sets the candidate beside what runs now. --repeat runs the candidate twice, --again
names a second recording of it: the two must be bitwise equal.

Footnotes that decide nothing: perplexity; a bound on accuracy where the reference was recorded with
--full_vocabulary; --greedy=256, the first token at which greedy texts part from the ground truth's.

The first word of the report is the verdict; the last line of standard output is one JSON object.
Exit codes: 0 PASS · 1 FAIL · 2 INCONCLUSIVE · 3 could not judge.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from kernjax.base import command, shared_flags
from kernjax.base.errors import UserError
from kernjax.base.showing import for_logs

FLAGS = command.Flags("check", __doc__)
_POLICY = FLAGS.string("policy", None, "The candidate's policy, e.g. fp8_scaled.")
_KERNEL = FLAGS.multi_string("kernel", "OP=module:function; may be repeated.")
_CANDIDATE = FLAGS.string("candidate", None, "A finished recording instead of a run.")
FLAGS.heading("What it is judged against")
_MODEL = shared_flags.model(FLAGS)
_CORPUS = shared_flags.corpus(FLAGS)
_REFERENCE = shared_flags.reference(FLAGS)
_BAND = FLAGS.string("band", None, "The normal difference; default: the demo's.")
_INCUMBENT = FLAGS.string("incumbent", None, "Recording of what runs now.")
_PRODUCTION = FLAGS.string(
    "production_policy", None, "What the candidate is a change of; default: the band's."
)
_DEPLOY = FLAGS.integer("deploy_context", None, "Depth it will serve, in tokens.", lower_bound=1)
FLAGS.heading("Lenses")
_ISOLATED = FLAGS.boolean("isolated", True, "Also run the change alone, on float32.")
_ISOLATED_LIMIT = FLAGS.integer(
    "isolated_limit", 4, "Segments per kind and depth of the isolated run.", lower_bound=2
)
_TWIN = FLAGS.boolean("twin", False, "Also compare with production less the change.")
_FORCE_ROUTES = FLAGS.boolean(
    "force_routes",
    False,
    "Also run the candidate on the experts that the reference chose.",
)
_REPEAT = FLAGS.boolean("repeat", False, "Run the candidate twice; it must be bitwise equal.")
_AGAIN = FLAGS.string("again", None, "A second recording of --candidate.")
_GREEDY = FLAGS.integer(
    "greedy", 0, "Greedy tokens to compare (a footnote; 0: none).", lower_bound=0
)
FLAGS.heading("How it runs")
_OUTPUT_DIR = FLAGS.string("output_dir", None, "Keeps report, verdict and recordings.")
_LIMIT = FLAGS.integer("limit", None, "At most so many segments per kind and depth.", lower_bound=1)
_BATCH_SIZE = shared_flags.batch_size(FLAGS)
_MESH = shared_flags.mesh(FLAGS)
_MIRROR = shared_flags.mirror(FLAGS)

_OF_A_RUN = (
    "isolated isolated_limit twin force_routes repeat greedy limit batch_size mesh mirror"
    " production_policy"
).split()
_GREEDY_PROMPTS = 4  # of each kind


def main(args: list[str]) -> int:
    del args
    began = time.monotonic()
    from kernjax.base.files import check_writable
    from kernjax.judge import Band, compare, judge
    from kernjax.judge.routes import route_changes
    from kernjax.recording import load_recording
    from kernjax.reporting import (
        remove_files,
        render_text,
        verdict_line,
        write_files,
    )
    from kernjax.reporting.annotations import annotations, wanted
    from kernjax.reporting.figures import figures
    from kernjax.reporting.layout import table
    from kernjax.scoring.runs import Runs

    _check_flags()
    if _OUTPUT_DIR.value:
        check_writable(_OUTPUT_DIR.value)
        remove_files(_OUTPUT_DIR.value)
    reference_path, band_path = _REFERENCE.value, _BAND.value
    if reference_path is None or band_path is None:
        from kernjax.scoring.defaults import default_band, default_reference

        reference_path = reference_path or default_reference(_MODEL.value, _CORPUS.value)
        band_path = band_path or default_band(_MODEL.value, _CORPUS.value)
    band = Band.load(band_path)  # one that cannot be read is found out before anything runs
    production = _PRODUCTION.value or band.production_policy
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(_OUTPUT_DIR.value or scratch)
        reference = load_recording(reference_path)
        if _CANDIDATE.value:
            again = load_recording(_AGAIN.value) if _AGAIN.value else None
            runs = Runs(load_recording(_CANDIDATE.value), again)
        else:
            runs = _run_candidate(reference_path, folder, production)
        incumbent = load_recording(_INCUMBENT.value) if _INCUMBENT.value else None
        comparison = compare(reference, runs.candidate)
        verdict = judge(
            comparison,
            band,
            isolated=compare(*runs.isolated) if runs.isolated else None,
            incumbent=compare(reference, incumbent) if incumbent else None,
            repeat=compare(reference, runs.repeat) if runs.repeat else None,
            deploy_context=_DEPLOY.value,
            flags=_asked(production),
        )
        twin = _twin_table(compare(*runs.twin)) if runs.twin else None
        changes = route_changes(reference, runs.candidate)
        if changes:
            runs.notes.append(_routes_note(changes))
        forced = runs.same_experts and _twin_table(compare(reference, runs.same_experts))
    wall_s = time.monotonic() - began
    more: dict[str, Any] = {"command": FLAGS.as_typed(), "runs": runs.costs, "notes": runs.notes}
    if runs.cost:
        more["cost"] = runs.cost
    if twin is not None:
        more["twin"] = twin
    if changes:
        more["routes"] = changes.to_dict()
    if forced:
        more["force_routes"] = forced
    if _OUTPUT_DIR.value:
        drawn = figures(comparison, band, reference, runs.candidate, _text_of(reference))
        write_files(verdict, _OUTPUT_DIR.value, wall_s, more, drawn)
    print(render_text(verdict))
    for note in runs.notes:
        print(note)
    for title, rows in (
        ("Against the twin (production less the change)", twin),
        ("On the reference's experts (decides nothing)", forced),
    ):
        if rows:
            print(f"{title}: KL by kind and depth")
            lines = [
                [row["kind"], str(row["context_len"])]
                + [f"{row[k]:.2e}" for k in ("kl_median", "kl_mean")]
                for row in rows
            ]
            print(for_logs(table(["kind", "context", "median", "mean"], lines)))
    if wanted():
        sys.stdout.flush()
        print(*annotations(verdict), sep="\n", file=sys.stderr)
    line = verdict_line(verdict, wall_s, more)
    command.print_json(line)
    return verdict.exit_code


def _asked(production: str) -> dict[str, str]:
    """What the commands that findings name need beside reference, band and candidate."""
    flags = {"model": _MODEL, "corpus": _CORPUS, "mesh": _MESH, "mirror": _MIRROR}
    asked = {name: str(flag.value) for name, flag in flags.items() if flag.value != flag.default}
    # kernjax.locate may run without a band: its own default is bf16.
    return asked | ({} if production == "bf16" else {"production_policy": production})


def _text_of(reference: Any) -> Any:
    """Token id to text by the model's tokenizer, or None: there is none here, or another one."""
    from kernjax.base.resources import model_directory
    from kernjax.texts.tokenizing import load_tokenizer

    directory = model_directory(_MODEL.value)
    if not (directory / "tokenizer.json").is_file():
        return None
    tokenizer = load_tokenizer(directory)
    if tokenizer.sha256 != reference.manifest.get("tokenizer_sha256"):
        return None
    return lambda token: tokenizer.decode([token])


def _check_flags() -> None:
    if _CANDIDATE.value and (_POLICY.value or _KERNEL.value):
        raise UserError(
            "--candidate is given beside --policy or --kernel.",
            "Expected one candidate.",
            "A recording is judged as it is; drop the others.",
        )
    if not (_CANDIDATE.value or _POLICY.value or _KERNEL.value):
        raise UserError(
            "There is no candidate.",
            "Expected --policy, --kernel or --candidate.",
            "For example: python -m kernjax.check --policy=fp8_scaled",
        )
    if _CANDIDATE.value:
        FLAGS.refuse(
            _OF_A_RUN,
            "beside --candidate",
            "They say how a candidate is run, or what beside it; a recording is judged as it is.",
            "Drop them, or name the candidate by --policy or --kernel.",
        )
        _check_subject()
    elif not _ISOLATED.value:
        FLAGS.refuse(
            ["isolated_limit"], "beside --noisolated", "It is the length of the isolated run."
        )
    for flag, other in (("again", _AGAIN.value), ("incumbent", _INCUMBENT.value)):
        if other and _CANDIDATE.value and Path(other).resolve() == Path(_CANDIDATE.value).resolve():
            raise UserError(
                f"--{flag} and --candidate are the same recording, {other}.",
                "A recording says nothing about itself.",
                f"Name another for --{flag}, or drop it.",
            )
    if _AGAIN.value and not _CANDIDATE.value:
        raise UserError(
            "--again is a second recording of --candidate, which is missing.",
            todo="--repeat runs a policy or a kernel twice.",
        )


def _check_subject() -> None:
    """UserError where --model or --corpus is none, or not what --reference was made of.

    They choose the demo's reference and band; beside recordings that are named they are what the
    commands of the report name.
    """
    if not (_REFERENCE.value and _BAND.value):
        return
    from kernjax.base.hashing import sha256_file
    from kernjax.base.resources import model_directory
    from kernjax.recording import load_recording
    from kernjax.texts import find_manifest, read_manifest

    manifest = load_recording(_REFERENCE.value).manifest
    made = {key: manifest.get(key) or {} for key in ("model", "corpus")}
    found = {}
    if _MODEL.value != _MODEL.default:
        config = model_directory(_MODEL.value) / "config.json"
        if not config.is_file():
            raise UserError(f"--model={_MODEL.value} has no config.json.")
        found["model"] = sha256_file(config), made["model"].get("config_sha256")
    if _CORPUS.value != _CORPUS.default:
        corpus = read_manifest(find_manifest(_CORPUS.value))
        by = "sha256" if corpus.sha256 else "name"  # texts have a hash as ids only
        found["corpus"] = getattr(corpus, by), made["corpus"].get(by)
    for name, (ours, theirs) in found.items():
        if ours != theirs:
            raise UserError(
                f"--{name}={FLAGS[name].value} is not what {_REFERENCE.value} was made of: "
                f"{str(ours)[:12]}, and there {str(theirs)[:12]}.",
                "A verdict is on one model and one corpus.",
                f"Drop --{name}, or name the reference's own.",
            )


def _run_candidate(reference_path: str, folder: Path, production_policy: str) -> Any:
    from kernjax.base.progress import Meter
    from kernjax.plugins import load_kernels
    from kernjax.precision import parse_policy
    from kernjax.scoring.cost import Cost
    from kernjax.scoring.lenses import Lenses, run_lenses
    from kernjax.scoring.session import Session

    cost = Cost()
    production = parse_policy(production_policy)
    policy = parse_policy(_POLICY.value) if _POLICY.value else production
    kernels = load_kernels(_KERNEL.value)
    session = Session.open(
        _MODEL.value,
        _CORPUS.value,
        reference_path,
        batch_size=_BATCH_SIZE.value,
        mesh=_MESH.value,
        mirror=_MIRROR.value,
    )
    lenses = Lenses(
        _LIMIT.value,
        _ISOLATED.value,
        _ISOLATED_LIMIT.value,
        _TWIN.value,
        _REPEAT.value,
        _FORCE_ROUTES.value,
    )
    meters: list[Meter] = []

    def announce(title: str) -> Meter:
        meters.append(Meter(title, "tok"))
        return meters[-1]

    runs = run_lenses(session, policy, production, folder, kernels, lenses, announce)
    runs.costs = [
        {"run": meter.title, "tokens": meter.tokens, "seconds": meter.seconds}
        for meter in meters
        if meter.tokens
    ]
    if _GREEDY.value:
        runs.notes += _greedy_notes(session, policy, production, kernels)
    runs.cost = cost.to_dict()
    return runs


def _greedy_notes(session: Any, policy: Any, production: Any, kernels: Any) -> list[str]:
    """Where greedy texts after the shallowest prompts part from the ground truth's."""
    import numpy as np

    from kernjax.precision import parse_policy
    from kernjax.scoring.greedy import continued, first_differences

    depth = min(s.context_len for s in session.corpus.segments)
    groups = [group for (_, d), group in session.corpus.strata().items() if d == depth]
    prompts = np.stack([s.tokens[:depth] for group in groups for s in group[:_GREEDY_PROMPTS]])
    texts = {
        name: continued(session.producer(one, plugged), prompts, _GREEDY.value)
        for name, one, plugged in (
            ("truth", parse_policy("f32"), None),
            ("production", production, None),
            ("candidate", policy, kernels),
        )
    }
    notes = []
    for name in ("production", "candidate"):
        parted = [p for p in first_differences(texts["truth"], texts[name]) if p is not None]
        text = f"Greedy, {name} (decides nothing): {len(parted)} of {len(prompts)} texts part "
        text += f"from the ground truth's within {_GREEDY.value} tokens"
        if parted:
            step, margin = min(parted)
            text += f", the first at token {step + 1}, at a margin of {margin:.2g}"
        notes.append(text + ".")
    return notes


def _routes_note(changes: Any) -> str:
    """What the candidate's mixtures of experts chose otherwise."""
    text = f"Experts (decides nothing): {changes.choices:.2%} of the choices differ from the"
    text += f" reference's, in {changes.rows:.1%} of the rows"
    if changes.rows:
        text += f"; the clearest of them it had made by {changes.largest_gap:.2g}"
    return text + "."


def _twin_table(comparison: Any) -> list[dict[str, Any]]:
    import numpy as np

    rows = []
    for key in dict.fromkeys((s.kind, s.context_len) for s in comparison.segments):
        chosen = [i for i, s in enumerate(comparison.segments) if (s.kind, s.context_len) == key]
        inside = np.isin(comparison.segment, chosen) & (comparison.phase == 1)
        kl = comparison.kl[inside]
        rows.append(
            {
                "kind": key[0],
                "context_len": key[1],
                "kl_median": float(np.median(kl)),
                "kl_mean": float(np.mean(kl)),
            }
        )
    return rows


if __name__ == "__main__":
    command.run(main, FLAGS)

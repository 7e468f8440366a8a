"""Makes a band: what equally right implementations differ by, on one corpus of one model.

  python -m kernjax.calibrate --model=demo --corpus=demo --reference=out/reference \\
      --normal=bf16 --normal=chunk32 --normal=block256 --normal=row_sum_rounded \\
      --bad=bf16,delta_rule.state=m4 --out=out/demo.band.json

A normal producer is an equally right implementation: another chunk length, another tile, P in
float32, another engine. --normal and --bad name a policy (it is recorded at the reference's ids)
or a recording made with `kernjax.record --reference`. Four or more normals are needed; each is
vetted against the reference and against its peers, and an outlier is refused. The corpus is
vetted as `kernjax.corpus vet` does it: one that can carry no verdict is refused. What the band
allows must lie below every --bad, or the band is refused with the gap printed; --bad also takes a
planted fault by its id (kernjax/faults/catalogue.py): --bad=state_transposed.

--recordings_dir keeps what was recorded (NAME per policy); a stopped run goes on there.

The table is on standard output, its last line one JSON object. Exit codes: 0 written, 3 refused.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kernjax.base import command, shared_flags

FLAGS = command.Flags("calibrate", __doc__)
_MODEL = shared_flags.model(FLAGS)
_CORPUS = shared_flags.corpus(FLAGS)
_REFERENCE = shared_flags.reference(FLAGS)
_NORMAL = FLAGS.multi_string("normal", "A policy or a recording; four or more.", required=True)
_BAD = FLAGS.multi_string("bad", "A policy, recording or planted fault: known to be wrong.")
_OUT = FLAGS.string("out", None, "The band's file (JSON).", required=True)
_OVERWRITE = FLAGS.boolean("overwrite", False, "Replace a band that is there already.")
FLAGS.heading("What the band is for")
_PRODUCTION = FLAGS.string("production_policy", "bf16", "The policy candidates are changes of.")
_DEPLOY = FLAGS.integer("deploy_context", None, "Depth it will serve, in tokens.", lower_bound=1)
FLAGS.heading("How it runs")
_DIR = FLAGS.string("recordings_dir", None, "Keeps the recordings made here, one folder a policy.")
_BATCH_SIZE = shared_flags.batch_size(FLAGS)
_MESH = shared_flags.mesh(FLAGS)
_MIRROR = shared_flags.mirror(FLAGS)


def main(args: list[str]) -> int:
    del args
    from kernjax.base.errors import UserError
    from kernjax.base.files import check_writable
    from kernjax.judge import calibrate
    from kernjax.recording import load_recording

    _check_flags()
    out = Path(_OUT.value)
    if out.exists() and not _OVERWRITE.value:
        raise UserError(f"--out={out} exists.", todo="Pass --overwrite to replace it.")
    check_writable(out.parent)
    reference_path = _REFERENCE.value
    if reference_path is None:
        from kernjax.scoring.defaults import default_reference

        reference_path = default_reference(_MODEL.value, _CORPUS.value)
    reference = load_recording(reference_path)
    remarks = _vet(reference)
    record = _recorder(reference_path)

    def recording(name: str, folder: Path) -> Any:
        if _is_recording(name):
            return load_recording(name)
        return record(name, folder)

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(_DIR.value or scratch)
        normals = [recording(name, folder) for name in _NORMAL.value]
        bad = [recording(name, folder) for name in _BAD.value]
        band = calibrate(
            reference,
            normals,
            bad,
            production_policy=_PRODUCTION.value,
            deploy_context=_DEPLOY.value,
        )
    band.save(out)
    for remark in remarks:
        print(f"corpus {remark.name}: {remark.text}")
    for producer, name in zip(band.producers, _NORMAL.value, strict=True):
        print(f"normal {name}: ratio to its peers {producer['ratio']}")
    for entry, name in zip(band.bad, _BAD.value, strict=True):
        print(f"bad    {name}: {entry}")
    print(f"smallest ratio detected with 95 % power: {band.detection_floor}")
    command.print_json(
        {
            "band": str(out),
            "producers": len(band.producers),
            "bad": len(band.bad),
            "detection_floor": band.detection_floor,
            "reference": band.reference["identity"],
        }
    )
    return command.EXIT_PASS


def _is_recording(name: str) -> bool:
    return Path(name).exists() or name.startswith("gs://")


def _is_fault(name: str) -> bool:
    from kernjax.faults import CATALOGUE

    return name in {fault.id for fault in CATALOGUE}


def _check_flags() -> None:
    """UserError for too few normals, for what is no policy, and for flags of runs where none is."""
    from kernjax.judge.calibrate import check_enough
    from kernjax.precision import parse_policy

    # Before the first of them runs: the last may be hours away.
    check_enough(len(_NORMAL.value))
    parse_policy(_PRODUCTION.value)
    for name in (*_NORMAL.value, *_BAD.value):
        if not _is_recording(name) and not _is_fault(name):
            parse_policy(name)
    if all(_is_recording(name) for name in (*_NORMAL.value, *_BAD.value)):
        FLAGS.refuse(
            ["recordings_dir", "batch_size", "mesh"],
            "beside finished recordings only",
            "They say how policies are recorded.",
        )


def _recorder(reference_path: str) -> Callable[[str, Path], Any]:
    """A function that records a policy, or the production policy with a planted fault, by name."""
    from kernjax.base.progress import Meter
    from kernjax.faults import find
    from kernjax.plugins import load_kernels
    from kernjax.precision import parse_policy
    from kernjax.scoring.session import Session

    @functools.cache
    def session() -> Session:
        return Session.open(
            _MODEL.value,
            _CORPUS.value,
            reference_path,
            batch_size=_BATCH_SIZE.value,
            mesh=_MESH.value,
            mirror=_MIRROR.value,
        )

    def record(name: str, folder: Path) -> Any:
        text, kernels = name, {}
        if _is_fault(name):
            (fault,) = find([name])
            text = ",".join(filter(None, (_PRODUCTION.value, fault.settings)))
            kernels = load_kernels(fault.specs)
        policy = parse_policy(text)
        meter = Meter(f"record {name}", "tok")
        return session().record(policy, folder / name, kernels, on_progress=meter)

    return record


def _vet(reference: Any) -> list[Any]:
    """Remarks on the corpus and the reference's rows on it; UserError where one is a refusal."""
    from kernjax.base.errors import UserError
    from kernjax.base.resources import model_directory
    from kernjax.texts import load_corpus
    from kernjax.texts.vetting import vet_recording, vet_tokens

    directory = model_directory(_MODEL.value)
    tokenizer = directory if (directory / "tokenizer.json").is_file() else None
    corpus = load_corpus(_CORPUS.value, tokenizer, mirror=_MIRROR.value)
    remarks = [*vet_tokens(corpus), *vet_recording(corpus, reference)[0]]
    if refusals := [remark for remark in remarks if remark.is_refusal]:
        raise UserError(
            f"Corpus {corpus.name} can carry no verdict: "
            + " ".join(f"[{remark.name}] {remark.text}" for remark in refusals),
            todo="`kernjax.corpus vet` shows the profile; take other text, or a trained model.",
        )
    return remarks


if __name__ == "__main__":
    command.run(main, FLAGS)

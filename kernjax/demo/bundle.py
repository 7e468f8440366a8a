"""Makes the demo's bundled reference, normal recordings and band, for one of its corpora.

  python -m kernjax.demo.bundle --corpus=demo --work_dir=out/bundle --out=kernjax/demo/recordings

Records the ground truth (float32, with the decoded tokens scored a second time by prefill), the
normal producers and the known-bad ones at its ids, calibrates, and packs everything into --out:
CORPUS.f32.zip, CORPUS.POLICY.zip for every normal, CORPUS.band.json. A stopped run goes on.
"""

from __future__ import annotations

from pathlib import Path

from kernjax.base import command, shared_flags

# Equally right: each changes the order of sums or how much is rounded where nothing depends on it.
NORMALS = ("bf16", "chunk32", "chunk128", "block256", "p_f32", "row_sum_rounded")
BAD = ("bf16,delta_rule.state=m4", "fp8_lazy_rescale")

FLAGS = command.Flags("demo.bundle", __doc__)
_MODEL = shared_flags.model(FLAGS)
_CORPUS = FLAGS.string("corpus", "demo", "The corpus (name or manifest).")
_WORK = FLAGS.string("work_dir", None, "Keeps the recordings while they are made.", required=True)
_OUT = FLAGS.string("out", None, "Directory of the bundle.", required=True)
_NORMALS = FLAGS.comma_list("normals", NORMALS, "Policies of the normal producers.")
_BAD = FLAGS.multi_string("bad", f"Policies known to be wrong; default: {' and '.join(BAD)}.")
_BATCH_SIZE = shared_flags.batch_size(FLAGS)


def main(args: list[str]) -> int:
    del args
    from kernjax.base.progress import Meter
    from kernjax.base.resources import model_directory
    from kernjax.judge import calibrate
    from kernjax.precision import parse_policy
    from kernjax.recording import load_recording, pack_recording
    from kernjax.scoring.producer import JaxProducer
    from kernjax.scoring.recorder import record_corpus
    from kernjax.scoring.session import Session
    from kernjax.texts import load_corpus

    model = model_directory(_MODEL.value)
    corpus = load_corpus(_CORPUS.value, model)
    work, out = Path(_WORK.value) / corpus.name, Path(_OUT.value)
    out.mkdir(parents=True, exist_ok=True)

    def is_recorded(name: str) -> bool:
        return (work / name / "complete.json").is_file()

    if not is_recorded("f32"):
        record_corpus(
            JaxProducer(model, parse_policy("f32")),
            corpus,
            work / "f32",
            batch_size=_BATCH_SIZE.value,
            rescore=True,
            on_progress=Meter("reference", "tok"),
        )
    session = Session(model, corpus, load_recording(work / "f32"), _BATCH_SIZE.value)
    bad = _BAD.value or list(BAD)
    for name in (*_NORMALS.value, *bad):
        if not is_recorded(name):
            session.record(parse_policy(name), work / name, on_progress=Meter(name, "tok"))
    band = calibrate(
        session.reference,
        [load_recording(work / name) for name in _NORMALS.value],
        [load_recording(work / name) for name in bad],
    )
    for name in ("f32", *_NORMALS.value):
        target = out / f"{corpus.name}.{name}.zip"
        target.unlink(missing_ok=True)
        pack_recording(work / name, target)
    band.save(out / f"{corpus.name}.band.json")
    size = sum(path.stat().st_size for path in out.glob(f"{corpus.name}.*"))
    print(f"{out}: {corpus.name}, {len(_NORMALS.value)} normals, {size / 1e6:.1f} MB")
    command.print_json(
        {"bundle": out, "corpus": corpus.name, "bytes": size, "floor": band.detection_floor}
    )
    return command.EXIT_PASS


if __name__ == "__main__":
    command.run(main, FLAGS)

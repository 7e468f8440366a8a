"""Records what a model says on a corpus: the ground truth, or a candidate at a reference's ids.

  python -m kernjax.record --model=demo --corpus=demo --policy=f32 --out=out/reference
  python -m kernjax.record --model=DIR --corpus=article --policy=f32 --out=gs://bucket/reference
  python -m kernjax.record --model=demo --corpus=demo --policy=bf16,delta_rule.state=m7 \\
      --reference=out/reference --out=out/state_m7

Every segment of the corpus is prefilled in windows and then decoded token by token on its own
text (teacher forcing). At each scored position the top-20 logprobs, the mass of the rest, the
target's logprob, the top-1 id and the margin are kept, in float32, about 200 bytes a position.
Without --reference the 20 ids are the run's own (a reference); with it they are the reference's.

--policy says what is rounded where: `NAME[,field=value[@layers=3,7]]...`
(`bf16,attention.p=fp8*448`). `f32` with highest-precision dots is the ground truth.
--kernel OP=module:function puts your function in place of an op; the recording names it and the
hash of its file. OP is one of attention.prefill, attention.decode, delta_rule.chunked,
delta_rule.recurrent.
--routes keeps the experts that mixtures of experts chose, and how nearly others; --routes=all, of
every token (0.3 to 3 KB each), so that --force_routes can send another run's tokens to the same.
--engine=transformers records the vendor's own modelling code instead (policies f32 and bf16).

A run that was stopped, or killed, goes on with the same command. The same command twice gives the
same bytes.

Many hosts make one recording: the same command on each, with --coordinator_address. --mesh over the
devices of all of them shards one model; over those of one host, or without it, every host has a
model of its own and takes every n-th batch. When one is lost, all end with 3.

The result is on standard output, its last line one JSON object; exit codes: 0 recorded, 3 could
not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kernjax.base import command, shared_flags
from kernjax.base.resources import model_directory
from kernjax.pods import Pod, PodFlags

FLAGS = command.Flags("record", __doc__)
_MODEL = shared_flags.model(FLAGS)
_CORPUS = shared_flags.corpus(FLAGS)
_POLICY = FLAGS.string("policy", "f32", "Precision policy; see above.")
_KERNEL = FLAGS.multi_string("kernel", "OP=module:function; may be repeated.")
_OUT = FLAGS.string(
    "out", None, "Where the recording is written (directory or gs://).", required=True
)
_REFERENCE = FLAGS.string("reference", None, "Recording at whose ids the rows are scored.")
FLAGS.heading("How it runs")
_ENGINE = FLAGS.enum("engine", "jax", ["jax", "transformers"], "Whose code computes.")
_ATTENTION = FLAGS.enum("attn_implementation", "eager", ["eager", "sdpa"], "Of transformers.")
_WINDOW = FLAGS.integer(
    "prefill_window", None, "Tokens a prefill call; default: the policy's.", lower_bound=1
)
_BATCH_SIZE = shared_flags.batch_size(FLAGS)
_MESH = shared_flags.mesh(FLAGS)
_LIMIT = FLAGS.integer("limit", None, "At most so many segments per kind and depth.", lower_bound=1)
_RESCORE = FLAGS.boolean("rescore", False, "Also score the decoded tokens by one prefill call.")
_HIDDEN = FLAGS.boolean("hidden", False, "Also keep a sketch of the residual stream per layer.")
_FULL = FLAGS.boolean(
    "full_vocabulary", False, "Also keep every token's logprob, 4 bytes each: small corpora only."
)
_ROUTES = FLAGS.enum(
    "routes", None, ["rows", "all"], "Also keep the experts of every row; all: of every token."
)
_FORCE_ROUTES = FLAGS.string(
    "force_routes", None, "Recording made with --routes=all whose experts every token is sent to."
)
_OVERWRITE = FLAGS.boolean("overwrite", False, "Replace a recording that is there already.")
_MIRROR = shared_flags.mirror(FLAGS)
_ONLY_CHECK = FLAGS.boolean(
    "only_check_args", False, "Check flags and files, then stop; needs none of the devices."
)
_PODS = PodFlags(
    FLAGS, "Start the same command on all hosts again: it goes on at the segments that are missing."
)


def main(args: list[str]) -> int:
    del args
    if _ONLY_CHECK.value:
        _PODS.settings()
        return _record(Pod())
    return _PODS.run(_record)


def _record(pod: Pod) -> int:
    from kernjax.base.files import check_writable
    from kernjax.base.progress import Meter
    from kernjax.precision import parse_policy
    from kernjax.recording import load_recording
    from kernjax.scoring.recorder import limited, record_corpus
    from kernjax.texts import load_corpus

    model = model_directory(_MODEL.value)
    settings = _POLICY.value
    if _WINDOW.value is not None:
        settings += f",prefill_window={_WINDOW.value}"
    policy = parse_policy(settings)
    reference = load_recording(_REFERENCE.value) if _REFERENCE.value else None
    tokenizer = model if (model / "tokenizer.json").is_file() else None
    corpus = limited(load_corpus(_CORPUS.value, tokenizer, mirror=_MIRROR.value), _LIMIT.value)
    if _ONLY_CHECK.value:
        _check(model, policy)
        command.print_json({"checked": True, "segments": len(corpus.segments)})
        return command.EXIT_PASS
    if "://" not in _OUT.value:
        check_writable(Path(_OUT.value).parent)
    identity = record_corpus(
        _producer(model, policy, pod),
        corpus,
        _OUT.value,
        reference=reference,
        experts_of=load_recording(_FORCE_ROUTES.value) if _FORCE_ROUTES.value else None,
        batch_size=_BATCH_SIZE.value,
        rescore=_RESCORE.value,
        overwrite=_OVERWRITE.value,
        pod=pod,
        on_progress=Meter(f"record {policy}", "tok") if pod.is_first else lambda progress: None,
    )

    def result() -> dict[str, Any]:
        recording = load_recording(_OUT.value)
        return {
            "recording": _OUT.value,
            "identity": identity,
            "segments": len(recording.segments),
            "rows": len(recording),
            "non_finite": int(recording.non_finite.sum()),
            "policy": str(policy),
            "engine": _ENGINE.value,
        }

    made = pod.broadcast("result", result)
    if pod.is_first:
        print(f"{_OUT.value}: {made['segments']} segments, {made['rows']:,} rows, {policy}")
    command.print_json(made)
    return command.EXIT_PASS


def _check(model: Path, policy: Any) -> None:
    """What can be said of the model's files, the policy, the kernels and the mesh without a run."""
    from kernjax.model import ModelConfig
    from kernjax.plugins import load_kernels
    from kernjax.scoring.producer import check_fits
    from kernjax.scoring.routes import check_routes
    from kernjax.weights import check_mesh, check_readable

    config = ModelConfig.from_directory(model)
    check_readable(model, config)
    mesh = check_mesh(config, _MESH.value) if _MESH.value else None
    check_fits(config, policy, load_kernels(_KERNEL.value), mesh)
    check_routes(config, _ROUTES.value)


def _producer(model: Path, policy: Any, pod: Pod) -> Any:
    from kernjax.base.errors import UserError
    from kernjax.plugins import load_kernels
    from kernjax.scoring.producer import JaxProducer
    from kernjax.weights import parse_mesh

    if _ENGINE.value == "jax":
        kernels = load_kernels(_KERNEL.value)
        return JaxProducer(
            model,
            policy,
            kernels,
            mesh=parse_mesh(_MESH.value) if _MESH.value else None,
            hidden=_HIDDEN.value,
            full=_FULL.value,
            routes=_ROUTES.value,
            progress=True,
            pod=pod,
        )
    ours = (_KERNEL, _MESH, _HIDDEN, _FULL, _ROUTES, _FORCE_ROUTES)
    if any(flag.value for flag in ours):
        raise UserError(
            "--kernel, --mesh, --hidden, --full_vocabulary, --routes and --force_routes go with"
            " --engine=jax.",
            todo="Drop them: the vendor's code runs as it is.",
        )
    from kernjax.engines.transformers import TransformersProducer

    return TransformersProducer(model, policy, attn_implementation=_ATTENTION.value)


if __name__ == "__main__":
    command.run(main, FLAGS)

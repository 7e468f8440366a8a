"""Writes a model once as a sharded checkpoint that any mesh reads straight into its devices.

  python -m kernjax.convert --model=DIR --out=CONVERTED
  python -m kernjax.convert --model=DIR --mesh=fsdp=8 --out=CONVERTED
  python -m kernjax.record --model=CONVERTED --corpus=article --policy=f32 --out=out/reference

An HF directory lies in the layout of its framework: a device that holds a part of a matrix reads a
row here and a row there. Converted (by Orbax), it reads chunks. Every command takes the new
directory as --model; config.json and the tokenizer travel with it. The numbers are the same bits,
and the weights' identity is that of the HF weights, so recordings of either are of one model.

Quantised weights are dequantised, exactly, into the smallest dtype that holds their values: FP8
with float32 scales becomes float32, four times the size. Leave those as they are: only an HF
directory can be kept quantised in memory (--policy=...,dequantise=layer).

A conversion that was interrupted does not load; the same command begins it anew. A model too large
for one host is converted by many, with --mesh over the devices of all of them. The result is on
standard output, its last line one JSON object; exit codes: 0 converted, 3 could not.
"""

from __future__ import annotations

from kernjax.base import command
from kernjax.base.resources import model_directory
from kernjax.pods import Pod, PodFlags

FLAGS = command.Flags("convert", __doc__)
_MODEL = FLAGS.string(
    "model", None, "HF directory of the model (or gs://, hf://), or `demo`.", required=True
)
_OUT = FLAGS.string("out", None, "Directory to write.", required=True)
_MESH = FLAGS.string("mesh", None, "Devices that hold it meanwhile, e.g. fsdp=8; default: one.")
_OVERWRITE = FLAGS.boolean("overwrite", False, "Replace a conversion that is there already.")
_ONLY_CHECK = FLAGS.boolean(
    "only_check_args", False, "Check flags and files, then stop; needs none of the devices."
)
_PODS = PodFlags(FLAGS, "Start the same command on all hosts again: it begins anew.")


def main(args: list[str]) -> int:
    del args
    if _ONLY_CHECK.value:
        _PODS.settings()
        return _check()
    return _PODS.run(_convert)


def _check() -> int:
    from kernjax.model import ModelConfig
    from kernjax.weights import check_mesh, check_readable

    model = model_directory(_MODEL.value)
    config = ModelConfig.from_directory(model)
    check_readable(model, config)
    if _MESH.value:
        check_mesh(config, _MESH.value)
    command.print_json({"checked": True})
    return command.EXIT_PASS


def _convert(pod: Pod) -> int:
    from kernjax.base.errors import UserError
    from kernjax.weights import convert_checkpoint, parse_mesh

    mesh = parse_mesh(_MESH.value) if _MESH.value else None
    if pod.count > 1 and not (mesh is not None and mesh.is_multi_process):
        raise UserError(
            f"--mesh={_MESH.value} with {pod.count} processes.",
            "Expected a mesh over the devices of all hosts: together they write one checkpoint.",
            "Give one, or convert on one host.",
        )
    identity = convert_checkpoint(
        model_directory(_MODEL.value),
        _OUT.value,
        mesh=mesh,
        overwrite=_OVERWRITE.value,
        progress=pod.is_first,
        pod=pod,
    )
    if pod.is_first:
        print(f"{_OUT.value}: {_MODEL.value}, converted")
    command.print_json({"checkpoint": _OUT.value, "weights_sha256": identity})
    return command.EXIT_PASS


if __name__ == "__main__":
    command.run(main, FLAGS)

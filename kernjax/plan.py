"""Says whether a model fits a slice of TPUs or a host of GPUs, by the real compiler; needs neither.

  python -m kernjax.plan --model=qwen3.8-27b --topology=v5e:2x4 --context=131072
  python -m kernjax.plan --model=kimi-k3 --topology=v5p:2x4x4 \\
      --policy=f32,weights=bf16,dequantise=layer
  python -m kernjax.plan --model=DIR --topology=v5p:2x2x1 --topology=v6e:2x4 \\
      --mesh=fsdp=2,tensor=4 --policy=bf16 --out=plan.md

Compiles, from the config alone, what a recording runs: one prefill window and one decode step, with
weights, key/value cache and states sharded over --mesh. No weights are read or made. Printed per
device: bytes of arguments (weights, cache), temporaries, peak and code; whether it fits the HBM;
the processor's seconds to compile; and a time that no implementation can beat (bytes over
bandwidth, or FLOPs over peak, without communication).

--topology is a generation and its grid of chips: v5e:2x4 and v6e:2x4 are 8 chips, v5p:2x2x1 is 4,
tpu7x:2x2x1 is 4 chips that jax sees as 8 devices; h100:8 is a host of 8 GPUs.
--model is an HF directory of which only config.json is read, `demo`, or a bundled name.
--format says how the checkpoint holds its matrices, where not as its config declares: `plain` (not
quantised), `fp8` (blocks of 128 x 128), `mxfp4`. Quantised ones are planned as values, in the
policy's `weights`, unless the policy has dequantise=layer: then as they are in the file.
The ops are compiled in their XLA form unless the policy names another (for instance
attention.prefill.implementation=mosaic_tpu): it partitions over any mesh.

The TPU compiler is libtpu, which the extra `tpu` brings: pip install 'kernjax[tpu]'. That of GPUs
is in jax's CUDA plugin. What they take is compiled, not run. The last line of standard output is
one JSON object; exit codes: 0 everything fits, 1 something does not, 3 could not be planned.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from kernjax.base import command
from kernjax.base.errors import UserError

if TYPE_CHECKING:
    from kernjax.model import ModelConfig
    from kernjax.planning.chips import Topology
    from kernjax.planning.report import Plan
    from kernjax.precision import Policy
    from kernjax.weights.quantisation import Scheme

FLAGS = command.Flags("plan", __doc__)
_MODEL = FLAGS.string("model", None, "HF directory, `demo`, or a bundled name.", required=True)
_TOPOLOGY = FLAGS.multi_string("topology", "GENERATION:GRID, in chips", required=True)
_MESH = FLAGS.string(
    "mesh", None, "Devices by axis, e.g. fsdp=2,tensor=4. Default: no KV head is held twice."
)
_CONTEXT = FLAGS.integer("context", 131072, "Tokens of a sequence.", lower_bound=1)
_BATCH_SIZE = FLAGS.integer("batch_size", 1, "Sequences at a time.", lower_bound=1)
_POLICY = FLAGS.multi_string("policy", "Precision policy, as for kernjax.record; default: bf16")
_FORMAT = FLAGS.enum(
    "format",
    "published",
    ["published", "plain", "fp8", "mxfp4"],
    "How the checkpoint holds its matrices.",
)
_WINDOW = FLAGS.integer(
    "prefill_window", None, "Tokens a prefill call; default: the policy's.", lower_bound=1
)
_OUT = FLAGS.string("out", None, "Markdown file to write the table to.")
_APPEND = FLAGS.boolean("append", False, "Add the table to the file that is there.")
_ONLY_CHECK = FLAGS.boolean("only_check_args", False, "Check flags and config, then stop.")


def main(args: list[str]) -> int:
    del args
    from kernjax.planning.chips import parse_topology
    from kernjax.planning.compiler import prepare

    topologies = [parse_topology(text) for text in _TOPOLOGY.value]
    if not _ONLY_CHECK.value:
        prepare(topologies)
    from kernjax.planning import report
    from kernjax.planning.models import read_format, read_model
    from kernjax.precision import parse_policy

    config, quantised = read_model(_MODEL.value), read_format(_MODEL.value, _FORMAT.value)
    policies = {text: parse_policy(_policy_text(text)) for text in _POLICY.value or ["bf16"]}
    for policy in policies.values():
        policy.validate_layers(config.num_layers, config.layer_types)
        if policy.dequantise == "layer" and quantised is None:
            raise UserError(
                f"--policy={policy} keeps weights quantised, but {_MODEL.value} is not.",
                "Expected a config with a quantization_config, or --format.",
                "Leave dequantise=layer out, or name --format=fp8 or mxfp4.",
            )
    if config.max_position_embeddings < _CONTEXT.value:
        raise UserError(
            f"--context={_CONTEXT.value} is longer than the model's"
            f" {config.max_position_embeddings} positions.",
            f"Expected at most {config.max_position_embeddings}.",
        )
    if _ONLY_CHECK.value:
        command.print_json({"checked": True, "topologies": [t.text for t in topologies]})
        return command.EXIT_PASS
    plans = []
    for topology, (text, policy) in itertools.product(topologies, policies.items()):
        plans.append(_plan(config, quantised, text, policy, topology))
        print(report.text(plans[-1]), flush=True)
    if _OUT.value:
        with open(_OUT.value, "a" if _APPEND.value else "w", encoding="utf-8") as file:
            file.write(_section(report.markdown(plans)))
    fits = all(plan.fits for plan in plans)
    code = command.EXIT_PASS if fits else command.EXIT_FAIL
    command.print_json({"exit_code": code, "fits": fits, "plans": list(map(report.data, plans))})
    return code


def _policy_text(text: str) -> str:
    """The policy with this command's window, and XLA where it leaves the implementation open."""
    from pallas_kernels.ops import OPS

    if _WINDOW.value is not None:
        text += f",prefill_window={_WINDOW.value}"
    for op in OPS:
        if f"{op}.implementation=" not in text:
            text += f",{op}.implementation=xla"
    return text


def _plan(
    config: ModelConfig,
    quantised: Scheme | None,
    policy_text: str,
    policy: Policy,
    topology: Topology,
) -> Plan:
    from kernjax.planning import bounds, programs
    from kernjax.planning.compiler import compile_program, devices_of
    from kernjax.planning.models import default_mesh
    from kernjax.planning.report import Phase, Plan
    from kernjax.weights import format_mesh, parse_mesh

    devices = devices_of(topology)
    mesh = parse_mesh(_MESH.value or default_mesh(config, len(devices)), devices)
    setup = programs.Setup(config, policy, mesh, _CONTEXT.value, _BATCH_SIZE.value, quantised)
    context, window = setup.context, f"prefill of {setup.window}"
    parts = {
        window: bounds.prefill_bound(setup, topology, context - setup.window, context),
        "decode step": bounds.decode_bound(setup, topology, context),
    }
    phases = []
    for name, bound in parts.items():
        command.log.info("compiling %s for %s, policy %s", name, topology.text, policy_text)
        program = (programs.prefill_window if name == window else programs.decode_step)(setup)
        memory, seconds = compile_program(program)
        phases.append(Phase(name, memory, seconds, bound))
    return Plan(
        model=_MODEL.value,
        topology=topology,
        mesh=format_mesh(mesh),
        context=setup.context,
        batch=setup.batch,
        policy=policy_text,
        phases=tuple(phases),
        prefill_seconds=bounds.whole_prefill_seconds(setup, topology),
    )


def _section(table: str) -> str:
    """The Markdown: what it is, unless it is added to a file that says so; command and table."""
    shown = {"model": _MODEL, "mesh": _MESH, "context": _CONTEXT, "batch_size": _BATCH_SIZE}
    shown |= {"prefill_window": _WINDOW}
    flags = [f"--{name}={flag.value}" for name, flag in shown.items() if flag.value is not None]
    name = _MODEL.value
    if _FORMAT.value != "published":
        flags.append(f"--format={_FORMAT.value}")
        name += f" in {_FORMAT.value}"
    flags += [f"--topology={text}" for text in _TOPOLOGY.value]
    flags += [f"--policy={text}" for text in _POLICY.value]
    about = (
        "# Does it fit?\n\n"
        "Made by the commands below: compiled by the real compiler, run on no TPU or GPU. GiB per"
        " device (code: MiB). Peak: arguments (weights, cache), results that overwrite none of"
        " them, and temporaries. CPU s: of the processor, to trace and compile. At least: what"
        " bytes over bandwidth, or FLOPs over peak, take without any communication.\n"
    )
    return (
        f"{'' if _APPEND.value else about}\n## {name} at context {_CONTEXT.value}\n\n"
        f"```\npython -m kernjax.plan {' '.join(flags)}\n```\n\n{table}\n"
    )


if __name__ == "__main__":
    command.run(main, FLAGS)

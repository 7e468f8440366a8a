"""kernjax.plan without libtpu: arguments, abstract programs, lower bounds, tables.

What the TPU compiler says of them is in `tests/compile/plan.py`; here XLA's CPU compiler stands in.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, PartitionSpec
from tiny import CONFIG
from tiny_checkpoints import published_config

from kernjax import plan
from kernjax.base import command
from kernjax.base.errors import UserError
from kernjax.model import ModelConfig
from kernjax.model.packed import Packed
from kernjax.model.params import leaves
from kernjax.planning import bounds, compiler, programs, report
from kernjax.planning.bounds import Bound
from kernjax.planning.chips import CHIPS, GIB, parse_topology
from kernjax.planning.compiler import Memory, TooLarge, too_large
from kernjax.planning.models import default_mesh, model_names, read_format, read_model
from kernjax.precision import parse_policy
from kernjax.weights.sharding import abstract_mesh

TINY = ModelConfig.from_dict(CONFIG)


def mesh(data: int = 1, sequence: int = 1, fsdp: int = 1, tensor: int = 1) -> AbstractMesh:
    return abstract_mesh({"data": data, "sequence": sequence, "fsdp": fsdp, "tensor": tensor})


def setup(policy: str = "bf16", context: int = 1024, batch: int = 1, config=TINY, **axes: int):
    return programs.Setup(config, parse_policy(policy), mesh(**axes), context, batch)


@pytest.fixture
def no_tpu(monkeypatch):
    """The slice is CPU devices, and libtpu is not needed."""
    monkeypatch.setattr(compiler, "prepare", lambda topologies: None)
    monkeypatch.setattr(compiler, "devices_of", lambda topology: jax.devices()[:1])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory with a config.json and nothing else."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def run(*argv: str) -> int:
    return command.execute(plan.main, plan.FLAGS, list(argv))


def test_without_libtpu_the_message_names_the_extra(model, monkeypatch, capsys) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "libtpu" else find(name)
    )
    assert run(f"--model={model}", "--topology=v5e:2x2") == 3
    error = capsys.readouterr().err
    assert "libtpu is not installed" in error and "pip install 'kernjax[tpu]'" in error
    # Wrong flags are wrong before that, and right ones can be checked without it.
    assert run(f"--model={model}", "--topology=v5e:2") == 3
    assert "grid '2'" in capsys.readouterr().err
    assert run(f"--model={model}", "--topology=v5e:2x2", "--context=64", "--only_check_args") == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("v7x:2x2x1", "unknown generation 'v7x'.*v5e, v5p, v6e, tpu7x"),
        ("v5p", "grid ''.*3 numbers"),
        ("v5p:2x2", "grid '2x2'.*v5p:2x2x1"),
        ("v5e:2x2x1", "grid '2x2x1'.*2 numbers"),
        ("v5e:0x2", "grid '0x2'"),
        ("v5e:2 x2", "grid"),
        ("h100:2x4", "grid '2x4'.*a number of chips for h100, as h100:8"),
    ],
)
def test_bad_topologies(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_topology(text)


def test_topologies_count_chips_and_devices() -> None:
    slice_ = parse_topology("tpu7x:2x2x1")
    assert (slice_.text, slice_.chips, slice_.devices) == ("tpu7x:2x2x1", 4, 8)
    assert slice_.device_hbm == 96 * GIB
    assert slice_.device_flops * 8 == CHIPS["tpu7x"].flops * 4
    assert parse_topology("v5p:4x8x8").devices == 256
    host = parse_topology("h100:8")
    assert (host.devices, host.chip.platform, host.device_hbm) == (8, "cuda", 80 * GIB)


def test_without_the_gpu_compiler_the_message_names_what_brings_it(monkeypatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="GPU compiler is not here.*jax_cuda13_plugin.*nvidia-cuda"):
        compiler.prepare([parse_topology("h100:8")])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model=nothing-of-that-name"], "neither a directory nor a name. Names: demo, "),
        (["--context=5000"], "--context=5000 is longer than the model's 4096 positions"),
        (["--context=64", "--mesh=tensor=2"], "needs 2 devices, but there are 1"),
        (["--context=64", "--mesh=model=1"], "unknown axis 'model'"),
        (["--context=64", "--policy=bf17"], "Policy 'bf17' does not exist"),
        (["--context=0"], "a whole number of at least 1"),
        (["--context=64", "--policy=bf16,dequantise=layer"], "keeps weights quantised, but"),
        (["--context=64", "--format=int4"], "int4"),
    ],
)
def test_bad_arguments(model, no_tpu, capsys, flags, message) -> None:
    argv = [f"--model={model}", "--topology=v5e:1x1", *flags]
    assert run(*argv) == 3
    assert message in capsys.readouterr().err


def test_a_slice_the_compiler_does_not_know(monkeypatch) -> None:
    from jax.experimental import topologies

    def refuse(**_):
        raise RuntimeError("INVALID_ARGUMENT: not\ndivisible")

    monkeypatch.setattr(topologies, "get_topology_desc", refuse)
    with pytest.raises(UserError, match="v5e:3x5: .*INVALID_ARGUMENT: not divisible"):
        compiler.devices_of(parse_topology("v5e:3x5"))


def test_command_end_to_end_on_another_compiler(model, no_tpu, capsys, tmp_path) -> None:
    """Bytes of the arguments are those of weights and cache, counted apart."""
    out = tmp_path / "plan.md"
    code = run(
        f"--model={model}", "--topology=v5e:1x1", "--context=96", "--prefill_window=32",
        "--batch_size=2", f"--out={out}",
    )  # fmt: skip
    printed = capsys.readouterr().out.splitlines()
    result = json.loads(printed[-1])
    assert code == 0 and result["fits"] and result["exit_code"] == 0
    (one,) = result["plans"]
    assert one["mesh"] == "data=1,fsdp=1,tensor=1" and one["chips"] == one["devices"] == 1
    # tiny.CONFIG by hand: D 32, F 48, vocab 64, Hk*K 32, Hv*V 64, C 128, 4 heads and 2 KV of 16.
    every_layer, full = 3 * 32 * 48, 32 * 64 * 3 + 2 * 32 * 32
    linear = 32 * 128 + 2 * 32 * 64 + 2 * 32 * 4 + 128 * 4
    weights = 2 * (2 * 64 * 32 + 4 * every_layer + 3 * linear + full)
    norms = 4 * (32 + 4 * 2 * 32 + 3 * (4 + 4 + 16) + 2 * 16)
    slots = 512
    cache = 2 * 2 * 2 * slots * 2 * 16 + 3 * 2 * (3 * 128 * 2 + 4 * 16 * 16 * 4) + 4
    prefill, decode = one["phases"]
    assert decode["name"] == "decode step"
    assert decode["arguments"] == weights + norms + cache + 2 * 2 * 4
    assert prefill["name"] == "prefill of 32"
    assert prefill["arguments"] > decode["arguments"]
    for phase in one["phases"]:
        assert phase["peak"] >= phase["arguments"] + phase["temporaries"]
        assert phase["seconds_at_least"] > 0 and phase["compile_seconds"] > 0
    page = out.read_text()
    assert f"python -m kernjax.plan --model={model} --context=96 --batch_size=2" in page
    assert "--topology=v5e:1x1\n" in page and "| decode step |" in page


def test_what_does_not_fit_ends_with_code_1(model, no_tpu, monkeypatch, capsys) -> None:
    refusal = TooLarge(64 * GIB, 15 * GIB, "does not matter")
    monkeypatch.setattr(compiler, "compile_program", lambda program: (refusal, 1.0))
    flags = ["--context=64", "--policy=bf16", "--policy=f32"]
    assert run(f"--model={model}", "--topology=v5e:1x1", *flags) == 1
    out = capsys.readouterr().out
    assert [one["policy"] for one in json.loads(out.splitlines()[-1])["plans"]] == ["bf16", "f32"]
    assert "does not fit: prefill of 64 needs 64.00 GiB a device, of which 15.00 are free" in out
    assert json.loads(out.splitlines()[-1])["fits"] is False


@pytest.mark.parametrize(
    ("message", "needed", "available"),
    [
        (
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO"
            " temporaries (64.00G) exceeds available HBM (15.75G).",
            64 * GIB, 15.75 * GIB,
        ),
        (
            "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: program requires 92.76G exceeds 31.24G"
            " of memory.\nmore",
            int(92.76 * GIB), int(31.24 * GIB),
        ),
        (
            "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space"
            " hbm. Used 1.50T of 95.74G hbm. Exceeded hbm capacity by 1.4T.",
            1.5 * 1024 * GIB, int(95.74 * GIB),
        ),
        ("RESOURCE_EXHAUSTED: something else", None, None),
    ],
)  # fmt: skip
def test_refusals_of_the_compiler_are_read(message, needed, available) -> None:
    refusal = too_large(message)
    assert (refusal.needed, refusal.available) == (needed, available)


def test_other_errors_of_the_compiler_are_not_taken_for_size(monkeypatch) -> None:
    def fails(x):
        raise jax.errors.JaxRuntimeError("INTERNAL: Mosaic failed")

    program = programs.Program(fails, (jax.ShapeDtypeStruct((1,), jnp.float32),), (), None)
    with pytest.raises(jax.errors.JaxRuntimeError, match="Mosaic"):
        compiler.compile_program(program)


def test_published_config_is_the_bundled_one() -> None:
    config = read_model("qwen3.8-27b")
    assert "qwen3.8-27b" in model_names()
    layers = dict(leaves(programs.abstract_weights(setup(config=config))))
    # 26,895,998,464 parameters; by hand those kept in float32: norms, A_log, dt_bias.
    float32 = 5120 * (1 + 2 * 64) + 48 * (48 + 48 + 128) + 16 * 2 * 256
    count = sum(leaf.size for leaf in layers.values())
    assert count == 26_895_998_464
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in layers.values())
    assert held == 2 * (count - float32) + 4 * float32
    folder = published_config()
    if folder is None:
        pytest.skip("Qwen3.8-27B's own config.json is not beside this checkout")
    assert ModelConfig.from_directory(folder) == config


@pytest.mark.parametrize(
    ("devices", "text"),
    [
        (1, "fsdp=1,tensor=1"),
        (4, "fsdp=1,tensor=4"),
        (8, "fsdp=2,tensor=4"),
        (6, "fsdp=3,tensor=2"),
    ],
)
def test_default_mesh_holds_no_kv_head_twice(devices: int, text: str) -> None:
    assert default_mesh(read_model("qwen3.8-27b"), devices) == text


def test_k3_keeps_its_experts_as_published() -> None:
    """By hand: half a byte a weight and a byte for 32; everything else in bfloat16 or float32."""
    config, axes = read_model("kimi-k3"), {"fsdp": 2, "tensor": 32}
    planned = dataclasses.replace(
        setup("f32,weights=bf16,dequantise=layer", config=config, **axes),
        quantised=read_format("kimi-k3", "published"),
    )
    weights = dict(leaves(programs.abstract_weights(planned)))
    experts = {path: leaf for path, leaf in weights.items() if "experts" in path}
    assert {type(leaf) for leaf in experts.values()} == {Packed} and len(experts) == 6
    down = experts["full_moe", "moe", "experts", "down"]
    assert down.codes.shape == (24, 896, 1536, 3584) and down.scales.shape == (24, 896, 96, 3584)
    assert down.codes.sharding.spec == PartitionSpec(None, "tensor", "fsdp", None)
    assert down.codes.sharding.shard_shape(down.codes.shape) == (24, 28, 768, 3584)
    assert down.shape == (24, 896, 3072, 3584) and down.dtype == jnp.bfloat16
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(experts))
    assert held == 92 * 896 * 3 * 3584 * 3072 * 17 // 32
    assert not any(isinstance(weights[path], Packed) for path in weights.keys() - experts.keys())
    # A step of one token reads 16 of a layer's 896 experts.
    every = dict(leaves(programs.abstract_weights(setup("bf16", config=config, **axes))))
    others = {path: leaf for path, leaf in every.items() if path not in experts}
    read = sum(bounds._local_bytes(leaf) for path, leaf in others.items() if path != ("embed",))
    cached = bounds._cache_bytes(planned, 1025)
    expected = held / 64 * 16 / 896 + read + cached
    found = bounds.decode_bound(planned, parse_topology("v5p:4x4x4"), 1024).bytes
    assert found == pytest.approx(expected, rel=1e-9)


def test_other_formats_of_a_checkpoint() -> None:
    """FP8: matrices at least a block each way; b and a, of 48 columns, are not."""
    config = read_model("qwen3.8-27b")
    assert read_format("qwen3.8-27b", "published") is None
    assert read_format("kimi-k3", "plain") is None
    planned = dataclasses.replace(
        setup("bf16,dequantise=layer", config=config), quantised=read_format("qwen3.8-27b", "fp8")
    )
    weights = dict(leaves(programs.abstract_weights(planned)))
    packed = {path[-1] for path, leaf in weights.items() if isinstance(leaf, Packed)}
    assert packed == {"qkv", "z", "out", "q", "gate", "k", "v", "o", "up", "down"}
    up = weights["linear", "mlp", "up"]
    assert up.codes.dtype == jnp.float8_e4m3fn and up.codes.shape == (48, 5120, 17408)
    assert up.scales.dtype == jnp.bfloat16 and up.scales.shape == (48, 40, 17408)


def test_weights_and_cache_are_sharded() -> None:
    planned = setup(fsdp=2, tensor=2, batch=2, data=2)
    weights = dict(leaves(programs.abstract_weights(planned)))
    assert weights["full", "q"].sharding.spec == PartitionSpec(None, "fsdp", "tensor")
    assert weights["full", "q"].dtype == jnp.bfloat16
    assert weights["linear", "A_log"].dtype == jnp.float32
    cache = programs.abstract_cache(planned)
    assert cache.keys.sharding.spec == PartitionSpec(None, "data", None, "tensor", None)
    assert cache.conv.sharding.spec == PartitionSpec(None, "data", None, "tensor")
    assert cache.state.sharding.spec == PartitionSpec(None, "data", "tensor", None, None)
    assert cache.capacity == 1536 and cache.keys.shape == (1, 2, 1536, 2, 16)
    split = setup(sequence=3, tensor=2)
    keys = programs.abstract_cache(split).keys
    assert keys.sharding.shard_shape(keys.shape) == (1, 1, keys.shape[2] // 3, 1, 16)
    assert 1536 <= keys.shape[2] < 1536 + 3
    step = programs.decode_step(split)
    cache, _ = jax.eval_shape(step.function, *step.arguments)
    assert cache.keys.shape == keys.shape
    with pytest.raises(UserError, match="data=2 does not divide the model's 1 batch"):
        programs.abstract_cache(setup(data=2))


def test_prefill_returns_a_cache_and_rows() -> None:
    planned = setup("f32", context=256)
    program = programs.prefill_window(planned)
    cache, rows = jax.eval_shape(program.function, *program.arguments)
    kept = program.arguments[2]
    assert jax.tree.map(lambda x: (x.shape, x.dtype), cache) == jax.tree.map(
        lambda x: (x.shape, x.dtype), kept
    )
    assert rows["top_ids"].shape == (1, planned.scored, 20)
    assert 1 <= planned.scored <= 16


TOPOLOGY = parse_topology("v5e:2x2")


def test_decode_bound_by_hand() -> None:
    """One device of four (fsdp 2, tensor 2): bytes of its shards, a quarter of the FLOPs."""
    planned = setup(context=1024, fsdp=2, tensor=2)
    matrices = (
        4 * 3 * 32 * 48 + 3 * (32 * 128 + 2 * 32 * 64 + 2 * 32 * 4) + 32 * 64 * 3 + 2 * 32 * 32
    )
    head = 32 * 64
    bound = bounds.decode_bound(planned, TOPOLOGY, 1024)
    keys_values = 2 * 1025 * 2 * 16 * 2 // 2  # bfloat16, half of the KV heads
    state = 3 * 4 * 16 * 16 * 4 // 2
    conv = 3 * 3 * 128 * 2 // 2
    taps = 3 * 128 * 4 * 2 // 2
    norms = 4 * (32 + 4 * 2 * 32 + 3 * (4 // 2 + 4 // 2 + 16) + 2 * 16)
    weights = 2 * (matrices + head) // 4 + taps + norms
    assert bound.bytes == pytest.approx(weights + keys_values + 2 * (state + conv), rel=1e-12)
    flops = 2 * (matrices + head) + 4 * 16 * 4 * 1025 + 6 * 16 * 16 * 4 * 3
    assert bound.flops == flops / 4
    assert bound.limited_by == "bytes" and bound.seconds == bound.bytes / 819e9


def test_prefill_bound_counts_every_key_once_per_query() -> None:
    """The difference of two windows is attention alone, key by key."""
    planned = setup("bf16,prefill_window=64", context=256)
    first = bounds.prefill_bound(planned, TOPOLOGY, 0, 64)
    last = bounds.prefill_bound(planned, TOPOLOGY, 192, 256)
    keys = [sum(position + 1 for position in range(start, start + 64)) for start in (0, 192)]
    assert (last.flops - first.flops) * 4 == 4 * 16 * 4 * (keys[1] - keys[0])
    windows = [bounds.prefill_bound(planned, TOPOLOGY, s, s + 64) for s in range(0, 256, 64)]
    total = bounds.whole_prefill_seconds(planned, TOPOLOGY)
    assert total == pytest.approx(sum(window.seconds for window in windows))


def test_float32_products_take_six_passes() -> None:
    def flops(policy: str) -> float:
        return bounds.decode_bound(setup(policy), TOPOLOGY, 0).flops

    once, six = flops("bf16"), flops("f32")
    rest = (4 * 16 * 4 + 6 * 16 * 16 * 4 * 3) / 4
    assert six - rest == pytest.approx(6 * (once - rest))
    assert flops("f32,dot=default") == once


def example(peak: int = 9 * GIB, hbm_of: str = "v5e:2x4") -> report.Plan:
    bound = Bound(8e9, 1e12, 0.0098, "bytes")
    memory = Memory(7 * GIB, GIB, 2 * GIB, peak, 3 << 20)
    phases = (
        report.Phase("prefill of 2048", memory, 61.2, bound),
        report.Phase("decode step", dataclasses.replace(memory, peak=peak - GIB), 30.0, bound),
    )
    topology = parse_topology(hbm_of)
    return report.Plan("m", topology, "tensor=8", 131072, 1, "bf16", phases, 4.5)


def test_verdict_and_table() -> None:
    one = example()
    assert one.fits
    assert one.verdict() == "fits: prefill of 2048 peaks at 9.00 of 16 GiB a device (56%)"
    lines = report.text(one).splitlines()
    assert lines[0].startswith("m on v5e:2x4 (8 chips), mesh tensor=8, context 131072, batch 1")
    assert lines[3].split() == [
        "prefill", "of", "2048", "7.00", "2.00", "9.00", "3.0", "56%", "61", "9.80", "ms",
        "(bytes)",
    ]  # fmt: skip
    assert len({len(line) for line in lines[2:5]}) == 1
    assert "at least 4.50 s" in lines[5]
    assert "8 devices" in report.title(example(hbm_of="tpu7x:2x2x1"))


def test_a_peak_beyond_the_hbm_does_not_fit() -> None:
    assert not example(peak=17 * GIB).fits
    assert (
        example(peak=17 * GIB).verdict().startswith("does not fit: prefill of 2048 peaks at 17.00")
    )


def test_markdown_has_a_row_a_phase() -> None:
    lines = report.markdown([example(), example(hbm_of="v6e:2x4")]).splitlines()
    assert len(lines) == 2 + 4
    assert len({line.count("|") for line in lines}) == 1
    assert lines[2].startswith("| v5e:2x4 (8 chips) | tensor=8 | bf16 | prefill of 2048 | 7.00")
    assert lines[3].startswith("|  |  |  | decode step |")


def test_refusals_without_numbers_say_what_the_compiler_said() -> None:
    one = example()
    phase = report.Phase("decode step", TooLarge(None, None, "RESOURCE_EXHAUSTED: x"), 1.0,
                         one.phases[0].bound)  # fmt: skip
    one = dataclasses.replace(one, phases=(one.phases[0], phase))
    assert one.verdict() == "does not fit 16 GiB a device: decode step: RESOURCE_EXHAUSTED: x"
    assert "too large" in report.text(one) and "too much" in report.text(one)
    assert report.data(one)["phases"][1]["message"] == "RESOURCE_EXHAUSTED: x"

"""Sharding rules and meshes; loading onto four virtual devices equals loading onto one."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from jax.sharding import PartitionSpec
from quantised_checkpoints import MXFP4, write_quantised
from tiny_checkpoints import TINY

from kernjax.base.errors import UserError
from kernjax.model.config import ModelConfig
from kernjax.model.params import abstract_params, leaves, random_params
from kernjax.weights import format_mesh, parse_mesh, partition_spec, save_hf
from kernjax.weights.sharding import MESH_AXES, RULES, SPARE, parse_mesh_sizes

CONFIG = ModelConfig.from_dict(TINY)


def mesh(**sizes: int) -> SimpleNamespace:
    """What the rules need of a mesh: sizes by name."""
    return SimpleNamespace(shape={name: sizes.get(name, 1) for name in MESH_AXES})


def test_every_axis_of_every_parameter_has_a_rule() -> None:
    named = {axis for _, spec in leaves(abstract_params(CONFIG)) for axis in spec.axes if axis}
    assert named <= RULES.keys()
    targets = [*RULES.values(), *SPARE.values()]
    named = {
        axis for entry in targets if entry for axis in ([entry] if entry in MESH_AXES else entry)
    }
    assert named == set(MESH_AXES) and SPARE.keys() <= RULES.keys()


def test_placements() -> None:
    specs = dict(leaves(abstract_params(CONFIG)))

    def placed(*path: str, **sizes: int) -> PartitionSpec:
        return partition_spec(specs[path].axes, specs[path].units, mesh(**sizes))

    assert placed("embed", tensor=2, fsdp=2) == PartitionSpec("tensor", "fsdp")
    assert placed("full", "q", tensor=4) == PartitionSpec(None, None, "tensor")
    assert placed("full", "o", tensor=2, fsdp=4) == PartitionSpec(None, "tensor", "fsdp")
    assert placed("linear", "A_log", tensor=2) == PartitionSpec(None, "tensor")
    assert placed("linear", "input_norm", tensor=2, fsdp=2) == PartitionSpec(None, None)
    assert placed("full", "q", data=8) == PartitionSpec(None, None, None)


def test_kv_heads_replicate_where_they_are_too_few() -> None:
    """2 KV heads of dim 8: 16 columns divide by 4, but the heads do not."""
    spec = abstract_params(CONFIG)["full"]["k"]
    assert partition_spec(spec.axes, spec.units, mesh(tensor=2))[2] == "tensor"
    assert partition_spec(spec.axes, spec.units, mesh(tensor=4))[2] is None


def test_other_axes_that_do_not_divide_are_an_error() -> None:
    spec = abstract_params(CONFIG)["linear"]["qkv"]
    with pytest.raises(UserError, match="tensor=4 does not divide the model's 2 linear_qkv"):
        partition_spec(spec.axes, spec.units, mesh(tensor=4))


def test_colliding_and_unknown_axes() -> None:
    with pytest.raises(ValueError, match=r"collide.*\('tensor', 'tensor'\)"):
        partition_spec(("heads", "mlp"), (4, 4), mesh())
    with pytest.raises(ValueError, match="unknown logical axis 'depth'; known: batch"):
        partition_spec(("depth",), (4,), mesh())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tenser=1", "unknown axis 'tenser'.*data, sequence, fsdp, expert, tensor"),
        ("", "unknown axis ''"),
        ("tensor=1,tensor=1", "'tensor' is given twice"),
        ("tensor=0", "size '0' of axis 'tensor'"),
        ("tensor", "size '' of axis 'tensor'"),
        ("tensor=-1", "size '-1'"),
        ("data=2,tensor=3", "needs 6 devices, but there are 1 .*--mesh=tensor=1"),
    ],
)
def test_bad_meshes(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_mesh(text, jax.devices()[:1])


def test_mesh_round_trip() -> None:
    parsed = parse_mesh("tensor=1, data=1", jax.devices()[:1])
    assert format_mesh(parsed) == "data=1,fsdp=1,tensor=1"
    assert parse_mesh(format_mesh(parsed), jax.devices()[:1]) == parsed
    assert set(parsed.axis_types) == {jax.sharding.AxisType.Auto}
    split = mesh(data=2, sequence=4)
    assert format_mesh(split) == "data=2,sequence=4,fsdp=1,tensor=1"
    assert math.prod(parse_mesh_sizes(format_mesh(split)).values()) == 8


FOUR_DEVICES = """
    import sys
    import jax, numpy as np
    jax.config.update("jax_num_cpu_devices", 4)
    from kernjax.base.errors import UserError
    from kernjax.model.config import ModelConfig
    from kernjax.model.params import leaves
    from kernjax.weights import load, load_params, param_shardings, parse_mesh, sources

    directory, quantised = sys.argv[1:]
    config = ModelConfig.from_directory(directory)
    single = dict(leaves(load_params(directory, config)))
    # The last: as on accelerators, stacks of 1200 bytes and more (about half) layer by layer.
    for text, host_stack in (
        ("tensor=2,data=2", 1 << 20), ("expert=2,fsdp=2", 1 << 20), ("tensor=2,fsdp=2", 1200)
    ):
        mesh = parse_mesh(text)
        shardings = dict(leaves(param_shardings(config, mesh)))
        load._HOST_STACK_BYTES = host_stack
        load._ON_HOST = ("cpu",) if host_stack > 1200 else ()
        loaded = dict(leaves(load_params(directory, config, mesh=mesh)))
        assert loaded.keys() == single.keys()
        for path, leaf in loaded.items():
            assert leaf.sharding.is_equivalent_to(shardings[path], leaf.ndim), path
            assert len(leaf.sharding.device_set) == 4, path
            assert leaf.dtype == single[path].dtype, path
            assert np.asarray(leaf).tobytes() == np.asarray(single[path]).tobytes(), path
    qkv = loaded["linear", "qkv"]
    assert qkv.addressable_shards[0].data.shape == (2, 20 // 2, 40 // 2)
    # Slices that cut blocks of scales and packed bytes: width 20 in 4, mlp 24 in 2.
    whole = dict(leaves(load_params(quantised, config, dtype="float32")))
    sources._BAND_BYTES = 300
    for text, host_stack in (("fsdp=4", 1 << 20), ("tensor=2,fsdp=2", 1200)):
        load._HOST_STACK_BYTES = host_stack
        load._ON_HOST = ("cpu",) if host_stack > 1200 else ()
        parts = dict(leaves(load_params(directory, config, mesh=parse_mesh(text))))
        for path, leaf in parts.items():
            assert np.asarray(leaf).tobytes() == np.asarray(single[path]).tobytes(), path
        parts = load_params(quantised, config, dtype="float32", mesh=parse_mesh(text))
        for path, leaf in leaves(parts):
            assert np.asarray(leaf).tobytes() == np.asarray(whole[path]).tobytes(), path
    try:
        load_params(directory, config, mesh=parse_mesh("tensor=4"))
    except UserError as error:
        assert "tensor=4 does not divide" in str(error)
    else:
        raise AssertionError("two key heads on four tensor shards")
    print("same bits")
"""


def test_four_devices_hold_the_same_bits_as_one(tmp_path: Path) -> None:
    save_hf(random_params(CONFIG, seed=0, dtype="bfloat16"), TINY, tmp_path)
    write_quantised(tmp_path / "quantised", MXFP4)
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FOUR_DEVICES), tmp_path, tmp_path / "quantised"],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "same bits"

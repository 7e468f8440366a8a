"""The mesh axis `expert`: mixtures in parts, the rest of the model too, and the same numbers."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from jax.sharding import PartitionSpec
from test_routes import MIXED
from tiny import make_corpus

from kernjax import load_recording
from kernjax.base.errors import UserError
from kernjax.judge.routes import route_changes
from kernjax.model.config import ModelConfig
from kernjax.model.params import abstract_params, leaves, random_params
from kernjax.planning.models import read_model
from kernjax.texts import write_corpus
from kernjax.weights import partition_spec, save_hf
from kernjax.weights.sharding import abstract_mesh, check_mesh, parse_mesh_sizes

ROOT = Path(__file__).resolve().parents[1]

# The first layer is a mixture, the second is not; a token goes to one expert (see test_routes).
MODEL = MIXED | {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_experts": 8,
}
MESHES = ("expert=4", "data=2,expert=2,tensor=2")


def placed(config: ModelConfig, text: str) -> dict[tuple[str, ...], PartitionSpec]:
    mesh = check_mesh(config, text)
    return {
        path: partition_spec(spec.axes, spec.units, mesh)
        for path, spec in leaves(abstract_params(config))
    }


def test_placements() -> None:
    config = ModelConfig.from_dict(MODEL)
    moe, dense = ("linear_moe", "moe"), ("full", "mlp", "up")
    found = placed(config, "expert=4")
    assert found[*moe, "experts", "up"] == PartitionSpec(None, "expert", None, None)
    assert found[*moe, "router"] == PartitionSpec(None, None, "expert")  # one axis has it
    assert found[dense] == PartitionSpec(None, "expert", None)
    found = placed(config, "fsdp=2,expert=2,tensor=2")
    assert found[*moe, "experts", "down"] == PartitionSpec(None, ("expert", "tensor"), "fsdp", None)
    assert found[dense] == PartitionSpec(None, ("fsdp", "expert"), "tensor")
    assert found["embed",] == PartitionSpec("tensor", ("fsdp", "expert"))
    # Without the axis, all is as it was before there was one.
    found = placed(config, "fsdp=2,tensor=2")
    assert found[*moe, "experts", "down"] == PartitionSpec(None, "tensor", "fsdp", None)
    assert found[*moe, "router"] == PartitionSpec(None, "fsdp", "tensor")


def test_what_does_not_divide() -> None:
    """Experts must be divided by the first axis that is there; the others join where they can."""
    config = ModelConfig.from_dict(MODEL | {"num_experts": 6, "hidden_size": 36})
    found = placed(config, "expert=2,tensor=2")
    assert found["linear_moe", "moe", "experts", "up"] == PartitionSpec(None, "expert", None, None)
    found = placed(config, "expert=6,fsdp=4")
    assert found["full", "mlp", "up"] == PartitionSpec(None, "fsdp", None)  # 36 = 4 * 9
    router = abstract_params(config)["linear_moe"]["moe"]["router"]
    for text in ("expert=4", "tensor=4"):
        mesh = abstract_mesh(parse_mesh_sizes(text))
        with pytest.raises(UserError, match=f"{text} does not divide the model's 6 expert"):
            partition_spec(router.axes, router.units, mesh)


def test_packed_rows_are_counted_over_all_axes_of_the_width() -> None:
    """K3's shared expert would lie over both; its routed ones over `fsdp` alone."""
    found = placed(read_model("kimi-k3"), "fsdp=2,expert=8,tensor=4")
    experts = found["full_moe", "moe", "experts", "down"]
    assert experts == PartitionSpec(None, ("expert", "tensor"), "fsdp", None)
    shared = found["full_moe", "moe", "shared", "up"]
    assert shared == PartitionSpec(None, ("fsdp", "expert"), "tensor")


RUNS = """
    import sys
    from pathlib import Path
    import jax
    jax.config.update("jax_num_cpu_devices", 8)
    from kernjax import load_recording
    from kernjax.precision import parse_policy
    from kernjax.scoring.producer import JaxProducer
    from kernjax.scoring.recorder import record_corpus
    from kernjax.texts import load_corpus
    from kernjax.weights import parse_mesh

    folder = Path(sys.argv[1])
    corpus, policy = load_corpus(folder / "corpus"), parse_policy("f32,prefill_window=32")
    alone = JaxProducer(folder / "model", policy, routes="all")
    record_corpus(alone, corpus, folder / "alone")
    for text in sys.argv[2:]:
        count = 4 if text == "expert=4" else 8
        mesh = parse_mesh(text, jax.devices()[:count])
        producer = JaxProducer(folder / "model", policy, mesh=mesh, routes="all")
        record_corpus(producer, corpus, folder / text)
        experts = producer.decoder.linear_moe.moe.experts.up.get_value()
        held = experts.addressable_shards[0].data.shape
        assert held == (1, 2, *experts.shape[2:]), held
    reference = load_recording(folder / "alone")
    moved = JaxProducer(folder / "moved", policy, mesh=mesh, routes="rows")
    record_corpus(moved, corpus, folder / "forced", reference=reference, experts_of=reference)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Recordings on one device, on the meshes, and, on the last one, of a model whose router is
    another, on the experts that the first one chose."""
    folder = tmp_path_factory.mktemp("axis")
    params = random_params(ModelConfig.from_dict(MODEL), seed=3)
    save_hf(params, MODEL, folder / "model")
    router = params["linear_moe"]["moe"]["router"]
    params["linear_moe"]["moe"]["router"] = -router
    save_hf(params, MODEL, folder / "moved")
    write_corpus(make_corpus({32: 1}, score_len=16), folder / "corpus")
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(RUNS), folder, *MESHES],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("text", MESHES)
def test_the_same_numbers_and_routes(folder, text) -> None:
    alone, parted = load_recording(folder / "alone"), load_recording(folder / text)
    assert alone.manifest["mesh"] is None
    shown = {"expert=4": "data=1,fsdp=1,expert=4,tensor=1"}
    assert parted.manifest["mesh"] == shown.get(text, "data=2,fsdp=1,expert=2,tensor=2")
    assert len(set(np.unique(alone.extras["route_ids"]))) > 4  # on more than one device
    assert route_changes(alone, parted).choices == 0
    difference = np.abs(parted.target_logprobs - alone.target_logprobs).max()
    assert 0 < difference < 2e-5
    for one, other in zip(
        alone.token_extras["token_route_ids"], parted.token_extras["token_route_ids"], strict=True
    ):
        np.testing.assert_array_equal(one, other)


def test_forced_routes_lead_to_the_same_experts(folder) -> None:
    alone, forced = load_recording(folder / "alone"), load_recording(folder / "forced")
    assert forced.manifest["experts_of"] == alone.identity
    assert route_changes(alone, forced).choices == 0
    assert (forced.extras["route_gaps"] < 0).any()  # that router would have chosen others
    np.testing.assert_allclose(forced.target_logprobs, alone.target_logprobs, atol=2e-5)

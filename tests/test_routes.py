"""Experts in recordings: which were chosen, how nearly others, and runs on another run's choice."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from instrument import LAYERS, run
from tiny import CONFIG, make_corpus, write_checkpoint

from kernjax import load_recording, record
from kernjax.judge.routes import route_changes
from kernjax.model.config import ModelConfig
from kernjax.model.params import random_params
from kernjax.precision import parse_policy
from kernjax.scoring.producer import JaxProducer
from kernjax.scoring.recorder import record_corpus
from kernjax.texts import write_corpus
from kernjax.weights import save_hf

# The first layer and the last are mixtures, the one between is not. A token goes to one expert, by
# weight 1 whatever the router thinks of it: all that a router can change is which.
MIXED = CONFIG | {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "decoder_sparse_step": 1,
    "mlp_only_layers": [1],
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "num_experts": 6,
    "num_experts_per_tok": 1,
    "shared_expert_intermediate_size": 24,
}
CORPUS = make_corpus({32: 1}, score_len=32)
POLICY = parse_policy("f32,prefill_window=32")


@dataclasses.dataclass
class Recorded:
    corpus: Path
    model: Path
    reference: Path
    candidate: Path
    forced: Path


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Recorded:
    """A reference with all its routes; the same model with one router moved a little, as it is
    and on the reference's experts."""
    folder = tmp_path_factory.mktemp("routes")
    params = random_params(ModelConfig.from_dict(MIXED), seed=3)
    save_hf(params, MIXED, folder / "model")
    router = params["linear_moe"]["moe"]["router"]
    noise = np.random.default_rng(0).standard_normal(router.shape).astype(np.float32)
    params["linear_moe"]["moe"]["router"] = router + 0.02 * noise
    save_hf(params, MIXED, folder / "moved")
    corpus = write_corpus(CORPUS, folder / "corpus")
    names = ("model", "reference", "candidate", "forced")
    found = Recorded(corpus, *(folder / name for name in names))
    record_corpus(JaxProducer(found.model, POLICY, routes="all"), CORPUS, found.reference)
    reference = load_recording(found.reference)
    moved = JaxProducer(folder / "moved", POLICY, routes="rows")
    record_corpus(moved, CORPUS, found.candidate, reference=reference)
    record_corpus(moved, CORPUS, found.forced, reference=reference, experts_of=reference)
    return found


def test_rows_and_tokens_are_where_the_design_says(recorded) -> None:
    recording = load_recording(recorded.reference)
    ids, gaps = recording.extras["route_ids"], recording.extras["route_gaps"]
    assert ids.shape == (len(recording), 2, 1) and ids.dtype == np.uint8 and ids.max() < 6
    assert gaps.shape == (len(recording), 2) and (gaps >= 0).all() and gaps.max() > 0.1
    assert set(np.unique(ids)) == set(range(6))
    every = recording.token_extras["token_route_ids"]
    assert [part.shape for part in every] == [(64, 2, 1)] * 2
    for index, tokens in enumerate(every):
        rows = recording.rows_of(index)
        np.testing.assert_array_equal(tokens[recording.pos[rows]], ids[rows])
    assert "token_route_ids" not in load_recording(recorded.candidate).token_extras
    part = recording.select(["code-32-0"])
    assert len(part.token_extras["token_route_ids"]) == 1
    np.testing.assert_array_equal(part.token_extras["token_route_ids"][0], every[1])


def test_another_router_changes_near_choices_and_forcing_removes_what_that_does(recorded) -> None:
    reference, candidate, forced = map(
        load_recording, (recorded.reference, recorded.candidate, recorded.forced)
    )
    changes = route_changes(reference, candidate)
    assert 0 < changes.rows < 1 and changes.changed[:, 0].any()
    # Each of two logits moved by about 0.02 times the norm of its input, sqrt(32): by no more than
    # four standard deviations.
    assert changes.gaps[:, 0][changes.changed[:, 0]].max() < 4 * 0.02 * 8 < changes.gaps.max()
    assert route_changes(reference, forced).choices == 0
    assert forced.manifest["experts_of"] == reference.identity
    assert np.abs(candidate.target_logprobs - reference.target_logprobs).max() > 0.01
    np.testing.assert_allclose(forced.target_logprobs, reference.target_logprobs, atol=1e-5)
    np.testing.assert_allclose(forced.top_logprobs, reference.top_logprobs, atol=1e-5)


def test_what_cannot_be_forced_is_refused(recorded, tmp_path, capsys) -> None:
    def refused(*flags: str) -> str:
        out = tmp_path / "out"
        assert run(record, "--out", str(out), *flags) == 3
        assert not out.exists()
        return capsys.readouterr().err

    mixture = ("--model", str(recorded.model), "--corpus", str(recorded.corpus))
    few = refused(*mixture, "--force_routes", str(recorded.candidate))
    assert "does not hold the experts of every token" in few and "--routes=all" in few
    dense = write_checkpoint(tmp_path / "dense", **LAYERS)
    flags = ("--model", str(dense), "--corpus", str(recorded.corpus), "--routes", "rows")
    assert "no mixture of experts" in refused(*flags)

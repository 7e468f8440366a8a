"""Parity with transformers' traces that lie in the repository: no torch is needed."""

from __future__ import annotations

import numpy as np
import pytest

from . import figures, golden
from .checkpoints import GOLDEN_CASES, Case, draw
from .ours import EAGER_OPS, Model
from .trace import difference, kl

pytestmark = pytest.mark.parity


@pytest.fixture(scope="module")
def stored(request, tmp_path_factory):
    """(case, what is stored, directory of the checkpoint)."""
    case: Case = request.param
    kept = golden.load(case)
    return case, kept, kept.write_checkpoint(case, tmp_path_factory.mktemp("golden"))


def on(*cases: Case):
    return pytest.mark.parametrize("stored", cases, indirect=True, ids=[c.name for c in cases])


@on(*GOLDEN_CASES)
def test_float32(stored):
    """Whole prefill; then, on one checkpoint, windows of which the last is padded."""
    case, kept, directory = stored
    model = Model(directory, "f32")
    for window in (None, 64) if case is GOLDEN_CASES[0] else (None,):
        found = difference(model.run(kept.tokens, case.context_len, window), kept.f32)
        figures.note_f32(case.name, figures.run_name(window), found)
        assert found.logits <= figures.LIMIT_F32 and found.state <= figures.LIMIT_F32, found


@on(GOLDEN_CASES[1])  # one is enough: every layer's bits are compared on both
def test_bfloat16_logits(stored):
    case, kept, directory = stored
    mine = Model(directory, "hf_bf16").run(kept.tokens, case.context_len)
    found = kl(kept.bf16_logits, mine.logits)
    normal = kl(kept.bf16_logits, kept.sdpa_logits)
    figures.note_bf16(case.name, "hf_bf16", found, normal)
    assert np.median(found) <= figures.LIMIT_KL_RATIO * np.median(normal)
    assert np.mean(found) <= figures.LIMIT_KL_RATIO * np.mean(normal)


@on(*GOLDEN_CASES)
def test_every_layer_has_the_vendors_bits(stored):
    case, kept, directory = stored
    outputs = Model(directory, "hf_bf16", EAGER_OPS).layers_on(
        kept.tokens[:, : case.context_len], kept.bf16_hidden
    )
    shares = figures.equal_bits(outputs, kept.bf16_hidden)
    figures.note_layers(case.name, "hf_bf16, eager attention", shares)
    assert min(min(equal) for equal in shares.values()) >= 0.97


def test_files_are_those_of_the_seeds():
    """The maker's random numbers are still the stored ones: the live tests' checkpoints are too."""
    for case in GOLDEN_CASES:
        kept = golden.load(case)
        assert kept.versions.keys() == {"torch", "transformers"}
        np.testing.assert_array_equal(kept.tokens, case.tokens)
        fresh = draw(case)
        assert kept.tensors.keys() == fresh.keys()
        for name, tensor in kept.tensors.items():
            np.testing.assert_allclose(tensor, fresh[name], rtol=2**-8, err_msg=name)


def test_files_stay_small():
    sizes = [path.stat().st_size for path in golden.FOLDER.glob("*.npz")]
    assert len(sizes) == len(GOLDEN_CASES) and sum(sizes) < 1_000_000

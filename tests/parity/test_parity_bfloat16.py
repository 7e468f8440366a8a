"""Our bfloat16 policies against transformers' bfloat16, in units of the vendor's own difference.

The vendor's eager and sdpa attention are equally right, so their KL is what bfloat16 leaves open.
`hf_bf16` rounds where the vendor rounds; the `bf16` policy on purpose does not (beta, scores and
logits stay float32), so it differs by about as much as two independent roundings, and is held to
being as near the float32 truth as the vendor's own bfloat16 is.
"""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch", reason="live parity needs torch (the transformers extra)")
pytest.importorskip(
    "transformers", minversion="5.24", reason="live parity needs transformers (the extra)"
)

from . import figures, vendor
from .checkpoints import BF16_CASE as CASE
from .checkpoints import write
from .ours import EAGER_OPS, Model
from .trace import kl

pytestmark = pytest.mark.parity


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write(CASE, tmp_path_factory.mktemp("parity") / CASE.name)


@pytest.fixture(scope="module")
def theirs(directory):
    """The vendor's traces by dtype and attention implementation."""
    return {
        (dtype, attention): vendor.run(
            vendor.load(directory, dtype, attention), CASE.tokens, CASE.context_len
        )
        for dtype, attention in (
            ("float32", "eager"),
            ("bfloat16", "eager"),
            ("bfloat16", "sdpa"),
        )
    }


def test_where_the_vendor_rounds(directory, theirs):
    mine = Model(directory, "hf_bf16").run(CASE.tokens, CASE.context_len)
    eager = theirs["bfloat16", "eager"].logits
    found, normal = kl(eager, mine.logits), kl(eager, theirs["bfloat16", "sdpa"].logits)
    figures.note_bf16(CASE.name, "hf_bf16", found, normal)
    assert np.median(found) <= figures.LIMIT_KL_RATIO * np.median(normal)
    assert np.mean(found) <= figures.LIMIT_KL_RATIO * np.mean(normal)


def test_production_is_as_near_the_truth_as_the_vendor(directory, theirs):
    mine = Model(directory, "bf16").run(CASE.tokens, CASE.context_len)
    truth, eager = theirs["float32", "eager"].logits, theirs["bfloat16", "eager"].logits
    normal = kl(eager, theirs["bfloat16", "sdpa"].logits)
    figures.note_bf16(CASE.name, "bf16", kl(eager, mine.logits), normal)
    figures.note_bf16(CASE.name, "bf16, from the f32 truth", kl(truth, mine.logits), normal)
    figures.note_bf16(CASE.name, "the vendor's, from the f32 truth", kl(truth, eager), normal)
    for summary in (np.median, np.mean):
        assert summary(kl(truth, mine.logits)) <= 1.25 * summary(kl(truth, eager))


def shares(directory, theirs, policy: str, kernels=None) -> dict[str, list[float]]:
    expected = theirs["bfloat16", "eager"].hidden
    prompt = CASE.tokens[:, : CASE.context_len]
    outputs = Model(directory, policy, kernels).layers_on(prompt, expected)
    found = figures.equal_bits(outputs, expected)
    figures.note_layers(CASE.name, f"{policy}, eager attention" if kernels else policy, found)
    return found


def test_every_layer_has_the_vendors_bits(directory, theirs):
    """All but near-ties, where the order of a float32 sum decides the rounding."""
    found = shares(directory, theirs, "hf_bf16", EAGER_OPS)
    assert min(found["linear_attention"]) >= 0.97
    assert min(found["full_attention"]) >= 0.99


def test_one_moved_rounding_site_is_seen(directory, theirs):
    """Beta in float32 (the bf16 policy), P rounded before its division by the row sum."""
    found = shares(directory, theirs, "bf16")
    assert max(found["linear_attention"]) < 0.9
    assert max(found["full_attention"]) < 0.95

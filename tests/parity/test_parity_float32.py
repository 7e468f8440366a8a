"""Our float32 against transformers' on random checkpoints: logits and everything that is kept."""

from __future__ import annotations

import functools

import pytest

pytest.importorskip("torch", reason="live parity needs torch (the transformers extra)")
pytest.importorskip(
    "transformers", minversion="5.24", reason="live parity needs transformers (the extra)"
)

from . import figures, vendor
from .checkpoints import CASES, Case, write
from .ours import Model
from .trace import difference

pytestmark = pytest.mark.parity

# Every checkpoint whole; windows do not depend on what the later ones vary, and compiling is slow.
RUNS = [
    *((case, None) for case in CASES),
    *((case, 64) for case in CASES[:2]),
    *((case, 64) for case in CASES if case.name == "kimi"),
    (CASES[0], 100),
]


@pytest.fixture(scope="module")
def sides(tmp_path_factory):
    """case -> (our model, the vendor's) on one checkpoint; made once, so that decode is shared."""

    @functools.cache
    def make(case: Case):
        directory = write(case, tmp_path_factory.mktemp("parity") / case.name)
        return Model(directory, "f32"), vendor.load(directory, "float32", "eager")

    return make


@pytest.mark.parametrize(
    "case, window", RUNS, ids=[f"{case.name}, {figures.run_name(window)}" for case, window in RUNS]
)
def test_prefill_then_decode(sides, case, window):
    """64: the windows are whole chunks and the last is padded; 100: they are neither."""
    ours, theirs = sides(case)
    found = difference(
        ours.run(case.tokens, case.context_len, window),
        vendor.run(theirs, case.tokens, case.context_len, window),
    )
    figures.note_f32(case.name, figures.run_name(window), found)
    # The message names the first layer, and the part kept between calls, that is off.
    assert found.logits <= figures.LIMIT_F32 and found.state <= figures.LIMIT_F32, found

"""The demo's table: a row a policy, kind and depth; what the band refuses is named, not dropped."""

from __future__ import annotations

import numpy as np

from kernjax.base.errors import UserError
from kernjax.demo.table import _markdown
from kernjax.judge import calibrate, judge
from kernjax.judge.simulate import Corpus, Design, Effect


def test_every_deciding_row_is_there_with_its_numbers():
    corpus = Corpus(Design(steps=32), np.random.default_rng(5))
    band = calibrate(None, [corpus.producer(name=f"normal {i}") for i in range(5)])
    verdict = judge(
        corpus.producer(Effect("bad", ratio=1.6)), band,
        isolated=corpus.producer(Effect("alone", ratio=0.01)),
    )  # fmt: skip
    refused = {"hf_bf16": UserError("Its logits are bfloat16.", "The band's are float32.", "")}
    text = _markdown("demo", {"bad": verdict}, refused)
    rows = [line for line in text.splitlines() if line.startswith("| `bad`")]
    deciding = [s for s in verdict.strata if s.phase == verdict.deciding_phase]
    assert len(rows) == len(deciding) > 1
    for row, stratum in zip(rows, deciding, strict=True):
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert cells[1:4] == [str(verdict.outcome), stratum.kind, str(stratum.context_len)]
        assert f"{stratum.ratio:.2f} [{stratum.ratio_low:.2f}, {stratum.ratio_high:.2f}]" in row
        assert cells[6] != "-" and cells[7] == str(stratum.flips)
    assert "- `hf_bf16`: Its logits are bfloat16. The band's are float32." in text

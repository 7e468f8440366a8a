"""What is recorded next compiles beside what runs: the same program, the same bits."""

from __future__ import annotations

import pytest
from instrument import Instrument

from kernjax.precision import parse_policy
from kernjax.scoring.batch import Scorer
from kernjax.scoring.lenses import Lenses, run_lenses
from kernjax.scoring.session import Session


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    made = Instrument.make(tmp_path_factory.mktemp("ahead"))
    return Session.open(str(made.model), str(made.corpus), str(made.reference), batch_size=8)


def test_the_isolated_lens_is_compiled_before_its_weights_are_read(session, tmp_path, monkeypatch):
    events = []
    prepare, hold = Scorer.prepare, Scorer.hold
    monkeypatch.setattr(
        Scorer,
        "prepare",
        lambda self, *rest: events.append((id(self), "prepare")) or prepare(self, *rest),
    )
    monkeypatch.setattr(
        Scorer, "hold", lambda self, *rest: events.append((id(self), "hold")) or hold(self, *rest)
    )
    production = parse_policy("bf16")
    policy = parse_policy("fp8_scaled")
    runs = run_lenses(session, policy, production, tmp_path / "ahead", lenses=Lenses())
    ((held, _),) = [event for event in events if event[1] == "hold"]
    assert events.index((held, "prepare")) < events.index((held, "hold"))

    _, isolated = runs.isolated
    alone = session.record(parse_policy("f32,attention.p=fp8*448"), tmp_path / "alone")
    assert isolated.identity == alone.identity  # a hash over every value

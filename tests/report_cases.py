"""Verdicts for the tests of reports: simulated ones of every colour, and one full of bad names."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from kernjax.judge import Verdict, calibrate, judge
from kernjax.judge.case import Finding
from kernjax.judge.gates import Outcome
from kernjax.judge.simulate import Corpus, Design, Effect

EVIL = (
    "</script><img src=x onerror=alert(1)> & `tick` ``` | [a](http://b) @octocat #12 ::error::x "
    "\x1b[2J\x00\x07\u202egnp.exe\u2066\u200b\n## PASS\r]]> {{7*7}} {% raw %} '\" \udcff \U000e0001"
)
LONG = "tok" * 3334
"""10 kB, as of a token that somebody trained on a page of one character."""


@functools.cache
def corpus() -> Corpus:
    return Corpus(Design(steps=16, per_cell=4), np.random.default_rng(31))


@functools.cache
def band():
    return calibrate(None, [corpus().producer(name=f"normal {i}") for i in range(5)])


@functools.cache
def red() -> Verdict:
    """FAIL, with every part that a verdict can have but bounds."""
    main = corpus().producer(name="main")
    return judge(
        corpus().producer(Effect("bad", ratio=2.5, nan=True)),
        band(),
        isolated=corpus().producer(Effect("alone", ratio=0.01)),
        incumbent=main,
        repeat=corpus().producer(Effect("bad", ratio=2.5, nan=True)),
    )


@functools.cache
def amber() -> Verdict:
    """INCONCLUSIVE: four segments a stratum are thin."""
    verdict = judge(corpus().producer(name="fine"), band())
    assert verdict.outcome is Outcome.INCONCLUSIVE
    return verdict


@functools.cache
def green() -> Verdict:
    """PASS: bit for bit the incumbent."""
    main = corpus().producer(name="main")
    verdict = judge(main, band(), incumbent=main)
    assert verdict.outcome is Outcome.PASS
    return verdict


def hostile() -> Verdict:
    """The red one with EVIL and LONG wherever a text comes from somebody's file."""
    verdict = red()
    text = EVIL + LONG
    parties = {
        name: {
            key: [text] if key == "producers" else text if isinstance(value, str) else value
            for key, value in party.items()
        }
        for name, party in verdict.parties.items()
    }
    return dataclasses.replace(
        verdict,
        reason=f"{EVIL}{LONG}",
        findings=(
            *(Finding(f.severity, text, text, text) for f in verdict.findings),
            Finding("fail", EVIL, EVIL, EVIL),
        ),
        strata=tuple(dataclasses.replace(s, kind=text) for s in verdict.strata),
        gates=tuple(
            dataclasses.replace(g, stratum=f"{i} {text}", note=text, kind=text)
            for i, g in enumerate(verdict.gates)
        ),
        isolated=tuple(dataclasses.replace(r, kind=text) for r in verdict.isolated),
        isolated_laws=tuple(dataclasses.replace(r, kind=text) for r in verdict.isolated_laws),
        incumbent=tuple(dataclasses.replace(r, kind=text) for r in verdict.incumbent),
        differences=((text, text, text),) * 3,
        changed_from=text,
        changes=((text, text, text),) * 9,
        parties=parties,
        detection_floor={text: 1.5},
        allowed={text: 1.5},
    )

"""The JSON line and the verdict's files."""

from __future__ import annotations

import dataclasses
import json
import os

import numpy as np
import pytest

from kernjax.base.errors import UserError
from kernjax.judge import calibrate, judge
from kernjax.judge.simulate import Corpus, Design, Effect
from kernjax.reporting import render_text, verdict_line, write_files

KEYS = (
    "schema_version verdict exit_code kl flips positions strata gates reference candidate band"
    " wall_s"
).split()
FILES = ["junit.xml", "report.html", "report.md", "report.txt", "verdict.json"]


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return Corpus(Design(steps=16, per_cell=4), np.random.default_rng(31))


@pytest.fixture(scope="module")
def verdict(corpus):
    band = calibrate(None, [corpus.producer(name=f"normal {i}") for i in range(5)])
    return judge(
        corpus.producer(Effect("bad", ratio=2.0, nan=True)),
        band,
        isolated=corpus.producer(Effect("alone", ratio=0.01)),
        incumbent=corpus.producer(name="main"),
    )


def test_the_line_has_the_keys_of_the_contract(verdict):
    line = verdict_line(verdict, wall_s=1.5)
    assert set(KEYS) <= set(line)
    assert line["verdict"] == "FAIL" and line["exit_code"] == 1 and line["wall_s"] == 1.5
    assert set(line["kl"]) == {"median", "mean", "p99", "max"}
    for gate in line["gates"]:
        assert {"name", "stratum", "observed", "low", "high", "allowed", "outcome"} <= set(gate)
    assert {s["kind"] for s in line["strata"]} == {"code", "prose"}
    assert line["isolated"]["depths"] and line["incumbent"]["rows"]
    assert line["band"]["producers"] == [f"normal {i} {i + 1}" for i in range(5)]


def test_it_is_one_line_of_strict_json(verdict):
    odd = dataclasses.replace(
        verdict, kl={"median": float("nan"), "mean": float("inf"), "p99": 1.0, "max": 2.0}
    )
    text = json.dumps(verdict_line(odd), allow_nan=False)
    assert "\n" not in text
    assert json.loads(text)["kl"] == {"median": None, "mean": None, "p99": 1.0, "max": 2.0}


def test_files(tmp_path, verdict):
    folder = tmp_path / "new" / "folder"
    paths = write_files(verdict, folder, wall_s=2.0)
    assert sorted(p.name for p in folder.iterdir()) == FILES
    assert set(paths) == set(folder.iterdir())
    assert json.loads((folder / "verdict.json").read_text()) == json.loads(
        json.dumps(verdict_line(verdict, 2.0))
    )
    assert (folder / "report.txt").read_text() == render_text(verdict)
    write_files(verdict, folder)  # a later run replaces them
    assert json.loads((folder / "verdict.json").read_text())["wall_s"] is None


def test_a_folder_that_cannot_be_written(tmp_path, verdict):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="Could not write to"):
        write_files(verdict, tmp_path / "file")


def test_a_write_that_breaks_leaves_nothing_half_written(tmp_path, verdict, monkeypatch):
    write_files(verdict, tmp_path, wall_s=1.0)
    before = (tmp_path / "verdict.json").read_bytes()

    def full_disk(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(UserError, match="No space left"):
        write_files(verdict, tmp_path, wall_s=9.0)
    assert (tmp_path / "verdict.json").read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == FILES

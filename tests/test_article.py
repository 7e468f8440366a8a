"""report --figures: numbers from recordings against plain arithmetic, pictures, the command."""

from __future__ import annotations

import json
import shutil
import xml.etree.ElementTree as xml

import numpy as np
import pytest
from instrument import run

from kernjax import report
from kernjax.base.resources import demo_recording
from kernjax.experiments import article as model
from kernjax.judge import compare
from kernjax.judge.metrics import MARGIN_LABELS
from kernjax.recording import load_recording
from kernjax.reporting.article import Roles, article_markdown, numbers
from kernjax.reporting.article_charts import article_drawings
from kernjax.reporting.pictures import picture
from kernjax.scoring.session import Session


@pytest.fixture(scope="module")
def demo():
    """The demo's bundled recordings in roles they can play: none is bad."""
    names = ("f32", "bf16", "p_f32", "row_sum_rounded", "chunk32")
    return {name: load_recording(demo_recording(f"demo.{name}.zip")) for name in names}


@pytest.fixture(scope="module")
def data(demo):
    roles = Roles(
        demo["bf16"],
        demo["p_f32"],
        {"bf16": demo["bf16"], "summed": demo["row_sum_rounded"]},
        {"chunks of 32": demo["chunk32"], "<script>": demo["bf16"]},
    )
    found = numbers(demo["f32"], roles)
    return json.loads(json.dumps(found, allow_nan=False))


def test_numbers_are_those_of_the_rows(demo, data):
    comparison = compare(demo["f32"], demo["bf16"])
    kinds = np.array([s.kind for s in comparison.segments])[comparison.segment]
    depth = np.array([s.context_len for s in comparison.segments])[comparison.segment]
    decoded = comparison.phase == 1
    for curve in data["cdf"]:
        own = comparison.kl[decoded & (kinds == curve["kind"])]
        assert curve["mean"] == pytest.approx(own.mean())
        value, share = curve["points"][25]
        assert np.mean(own <= value) == pytest.approx(share, abs=0.002)
    entries = {(e["format"], e["kind"], e["context_len"]): e for e in data["depth"]}
    assert len(entries) == 3 * 4
    entry = entries["bf16", "code", 2048]
    rows = decoded & (kinds == "code") & (depth == 2048)
    assert entry["kl_mean"] == pytest.approx(comparison.kl[rows].mean())
    assert entry["over_production"] == pytest.approx([1, 1, 1])
    other = compare(demo["f32"], demo["row_sum_rounded"])
    expected = np.exp(np.log(other.kl[rows]).mean() - np.log(comparison.kl[rows]).mean())
    ratio, low, high = entries["summed", "code", 2048]["over_production"]
    assert ratio == pytest.approx(expected) and low < ratio < high


def test_the_twin_lens_is_against_the_undone_policy(demo, data):
    undone, summed = (demo[name] for name in ("p_f32", "row_sum_rounded"))
    rows = undone.phase == 1
    change = summed.top_logprobs[rows].astype(float) - undone.top_logprobs[rows]
    change -= change.mean(axis=1)[:, None]
    entry = {e["format"]: e for e in data["twin"]}["summed"]
    assert entry["logits_rms"] == pytest.approx(np.sqrt(np.mean(change**2)))
    assert entry["kl_mean"] == pytest.approx(compare(undone, summed).kl[rows].mean())


def test_flips_by_margin_are_counted_once(demo, data):
    reference, candidate = demo["f32"], demo["chunk32"]
    rows = reference.phase == 1
    flipped = (reference.top1_ids != candidate.top1_ids)[rows]
    variant = data["variants"][0]
    assert [b["margin"] for b in variant["bins"]] == list(MARGIN_LABELS)
    assert sum(b["positions"] for b in variant["bins"]) == rows.sum()
    assert sum(b["flips"] for b in variant["bins"]) == flipped.sum() > 0
    largest = reference.margins[rows][flipped].max()
    assert variant["largest_flipped_margin"] == pytest.approx(largest)


def test_pictures_are_files_of_their_own_and_safe(data):
    local = {"layer": 3, "depth": 8, "error": {
        name: {kind: 0.01 for kind in data["kinds"]} for name in ("bf16", "summed")
    }}  # fmt: skip
    state = {
        "depth": 8,
        "formats": ["m7", "m4"],
        "layers": [0, 2],
        "distance": [[1e-3, 0.1], [0, 1]],
    }
    drawings = article_drawings({**data, "first_layer": local, "state": state})
    assert set(drawings) == {
        "cdf", "first_layer", "state", "depth-code", "over-code", "depth-prose", "over-prose",
        "scatter-1", "scatter-2", "flips",
    }  # fmt: skip
    for name, drawing in drawings.items():
        text = picture(drawing)
        root = xml.fromstring(text)
        assert root.tag == "{http://www.w3.org/2000/svg}svg" and len(text) < 60_000, name
        shown = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
        assert drawing.title in shown and all(label in shown for _, label in drawing.legend)
        assert "<script" not in text and "url(" not in text
    greedy = {"steps": 9, "rows": [{
        "name": "a", "texts": 8, "parted": 2, "first_token": 3, "median_token": 4.5,
        "median_margin": 0.01, "max_margin": 0.02,
    }]}  # fmt: skip
    everything = {**data, "first_layer": local, "state": state, "greedy": greedy}
    text = article_markdown(everything, {name: f"{name}.svg" for name in drawings})
    assert text.count("## ") == 6 and all(f"]({name}.svg)" in text for name in drawings)
    assert "2 of 8" in text and "layer 2" in text


def figures_of(*flags, out):
    return run(report, "--figures", "--nomodel_runs", f"--output_dir={out}", *flags)


def test_the_bundled_recordings_are_drawn_and_the_rest_named(tmp_path, capsys):
    out = tmp_path / "out"
    assert figures_of(out=out) == 0
    said = capsys.readouterr().out
    assert said.startswith("FIGURES")
    assert "Not drawn, as nobody recorded it: P in fp8*448, P in fp8, state in 4 bits.\n" in said
    data = json.loads((out / "article.json").read_text())
    assert [v["name"] for v in data["variants"]] == ["chunks of 32"]
    assert {e["format"] for e in data["depth"]} == {"f32", "bf16"}
    assert {path.name for path in out.iterdir()} == {
        "article.md", "article.json", "cdf.svg", "depth-code.svg", "over-code.svg",
        "depth-prose.svg", "over-prose.svg", "scatter-1.svg", "flips.svg",
    }  # fmt: skip


def test_recordings_are_found_by_their_policy_and_made_if_asked(tmp_path, capsys, monkeypatch):
    """Whatever they are called. Those that cover a part are drawn on that part."""
    monkeypatch.setattr(model, "P_FORMATS", ("bf16",))
    folder, out = tmp_path / "recordings", tmp_path / "out"
    (folder / "deeper").mkdir(parents=True)
    for number, name in enumerate(("bf16", "p_f32", "block256", "f32")):
        shutil.copy(demo_recording(f"demo.{name}.zip"), folder / "deeper" / f"{number}.zip")
    (folder / "broken.zip").write_bytes(b"PK")
    asked = []

    def record(session, policy, path, **keywords):
        asked.append((str(policy), path, keywords["limit"]))
        whole = load_recording(demo_recording("demo.chunk32.zip"))
        return whole.select([s["id"] for s in whole.segments if s["id"][-1] in "12"])

    monkeypatch.setattr(Session, "record", record)
    monkeypatch.setattr(model, "VARIANTS", {"chunks of 16": "delta_rule.chunk=16"})
    assert figures_of(f"--recordings={folder}", "--record", "--limit=2", out=out) == 0
    policy = "bf16,delta_rule.chunk=16"
    assert asked == [(policy, folder / policy, 2)]
    said = capsys.readouterr().out
    assert "KL by depth and P format" in said and "Not drawn" not in said
    data = json.loads((out / "article.json").read_text())
    assert 0 < data["segments"] < data["of_segments"] == 64
    assert f"Drawn on {data['segments']} of the reference's 64 segments" in said
    assert data["variants"][0]["scatter"]["of"] == data["positions"]
    files = {path.rpartition("/")[2] for path in json.loads(said.splitlines()[-1])["files"]}
    assert files == {path.name for path in out.iterdir()}


def test_a_mistyped_directory_makes_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Session, "record", lambda *args, **keywords: pytest.fail("recorded"))
    out, typo, other = tmp_path / "out", tmp_path / "recordngs", tmp_path / "other"
    for name in ("demo-deep.bf16.zip", "empty"):
        (other / name).mkdir(parents=True)
    (other / "demo-deep.bf16.zip").rmdir()
    shutil.copy(demo_recording("demo-deep.bf16.zip"), other)
    for folder, found in (
        (typo, "there is no such directory"),
        (other / "empty", "holds no recording"),
        (other, "holds 1 recordings of something else"),
    ):
        assert figures_of(f"--recordings={folder}", out=out) == 3
        message = capsys.readouterr().err
        assert found in message and "--record" in message
    assert not typo.exists() and not list(tmp_path.glob("out/*"))
    assert figures_of("--production_policy=rpa_v3", out=out) == 3
    assert "There is no recording of rpa_v3" in (message := capsys.readouterr().err)
    assert "Found: " in message and "chunk32" in message


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--figures", "--verdict=x"], "one only"),
        ([], "one only"),
    ],
)
def test_bad_flags(tmp_path, capsys, flags, message):
    assert run(report, *flags, f"--output_dir={tmp_path / 'out'}") == 3
    assert message in capsys.readouterr().err

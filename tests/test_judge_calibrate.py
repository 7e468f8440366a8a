"""Bands: what is refused, what is kept, and that a file says the same as memory."""

from __future__ import annotations

import dataclasses
import json

import judge_recordings as made
import numpy as np
import pytest

from kernjax import calibrate as command_calibrate
from kernjax.base import command
from kernjax.base.errors import UserError
from kernjax.judge import Band, calibrate, judge
from kernjax.judge.band import content_sha256
from kernjax.judge.limits import flip_limits, leave_one_out, limits_of
from kernjax.judge.margin_tables import GRID, confident_range, largest_range, margin_tables
from kernjax.judge.simulate import Corpus, Design, Effect

RNG = np.random.default_rng(8)
DESIGN = Design(contexts=(512, 2048), steps=32)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return Corpus(DESIGN, np.random.default_rng(7))


@pytest.fixture(scope="module")
def normals(corpus):
    return [corpus.producer(name=f"normal {i}") for i in range(5)]


@pytest.fixture(scope="module")
def band(normals):
    return calibrate(None, normals)


def test_the_file_gives_the_same_verdict_and_the_same_bytes(tmp_path, corpus, band):
    path = tmp_path / "band.json"
    band.save(path)
    loaded = Band.load(path)
    candidate = corpus.producer(Effect(ratio=1.2))
    in_memory, from_file = judge(candidate, band), judge(candidate, path)
    assert in_memory.gates == from_file.gates
    assert in_memory.outcome == from_file.outcome
    loaded.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == path.read_bytes()
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]
    assert max(map(len, path.read_text().splitlines())) < 3000  # a file to be reviewed


def test_limits_follow_from_the_files_own_numbers(band):
    """Anybody can recompute what is allowed from what the file keeps of the normals."""
    again = limits_of(band.rows, leave_one_out(band.segments, band.normals, band.rows))
    assert set(again) == set(band.limits)
    for key, limit in band.limits.items():
        assert again[key].allowed == pytest.approx(limit.allowed, rel=1e-4, abs=1e-6)


def test_what_a_band_keeps(band, normals):
    assert [p["name"] for p in band.producers] == [f"normal {i} {i + 1}" for i in range(5)]
    assert {(s["kind"], s["context_len"], s["phase"]) for s in band.strata} == {
        (kind, context, phase)
        for kind in ("code", "prose")
        for context in (512, 2048)
        for phase in ("prefill", "decode", "rescore")
    }
    prose = next(s for s in band.strata if s["kind"] == "prose" and s["phase"] == "decode")
    assert prose["p50"] < prose["mean"] < prose["p99"] <= prose["max"]
    changes = np.concatenate([c.margin_change[c.phase == 1] for c in normals])
    assert band.margins["sigma"] == pytest.approx(np.sqrt(np.mean(changes**2) / 2), rel=1e-4)
    assert set(band.detection_floor) == {"code", "prose"}
    assert all(floor > 1 for floor in band.detection_floor.values())
    flips = np.mean([c.flipped[c.phase == 1].sum() for c in normals])
    assert sum(entry["flips"] for entry in band.margins["bins"]) == pytest.approx(flips)


def test_the_confident_margin_is_rarely_passed_by_another_normal(corpus, normals):
    limits = flip_limits(normals)
    assert limits["confident"] >= limits["largest"] > 0
    beyond = [
        np.sum(c.flipped & (c.margin > limits["confident"]))
        for c in (corpus.producer() for _ in range(40))
    ]
    assert sum(count > 0 for count in beyond) <= 5  # 0.02 expected a run; the largest alone: 8


def test_flip_margins_follow_from_the_counts(corpus, band, normals):
    """What a band keeps bounds both margins to a few parts in a hundred, on drawn corpora too."""
    drawn = [
        [one.producer() for _ in range(4)]
        for seed in range(6)
        for one in (Corpus(dataclasses.replace(DESIGN, per_cell=4), np.random.default_rng(seed)),)
    ]
    for producers in (normals, *drawn):
        tables, limits = margin_tables(producers), flip_limits(producers)
        low, high = confident_range(tables, len(producers), limits["largest"])
        assert low <= limits["confident"] <= high < 1.3 * low
        low, high = largest_range(tables)
        assert low <= limits["largest"] <= high
    counted = sum(sum(table["rows"]) for table in band.margins["tables"].values())
    assert counted == np.sum(normals[0].margin > 0.05)
    changes = sum(sum(table["changes"]) for table in band.margins["tables"].values())
    assert changes == sum(
        np.sum((c.margin > 0.05) & (np.abs(c.margin_change) > 0.05)) for c in normals
    )


def test_a_sum_that_is_the_limit_itself_is_reached_in_any_order():
    """Three rows whose chances make 0.02 exactly: k1 + k2 + k3 = 40 of 2 x 1000 changes."""
    for first in range(1, 14):
        for second in range(first, (40 - first) // 2 + 1):
            third = 40 - first - second
            rows, changes = [197] + [0] * 30, [0] * 31
            rows[10] = rows[20] = rows[30] = 1
            changes[30], changes[20], changes[10] = first, second - first, third - second
            table = {"prose": {"rows": rows, "changes": changes, "flips": []}}
            assert confident_range(table, 5, 0.0)[1] == GRID[11], (first, second)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"prose": None}, "damaged.*of the kinds"),
        ({"prose": {"rows": [9], "changes": [-1], "flips": []}}, "damaged.*no counts"),
        ({"prose": {"rows": [1], "changes": [99], "flips": []}}, "damaged.*99 changes of 5 rows"),
        ({"prose": {"rows": [0] * 400, "changes": [], "flips": []}}, "damaged.*no counts"),
        ({"prose": {"rows": [1], "changes": []}}, "damaged"),
        ({"prose": 3}, "damaged"),
        (None, "damaged"),
    ],
)
def test_counts_that_are_none(tmp_path, band, tables, message):
    data = json.loads(json.dumps(band.to_dict()))
    none = {"rows": [], "changes": [], "flips": []}
    kinds = {} if tables == {"prose": None} else {"code": none}
    data["margins"]["tables"] = tables and kinds | tables
    for entry in data["margins"]["bins"]:
        entry["flips"] = 0.0
    for normal in data["normals"]:
        normal["flips"] = {}
    data["flip_bins"] = []
    path = tmp_path / "band.json"
    write(path, data)
    with pytest.raises(UserError, match=message):
        Band.load(path)


def test_the_confident_margin_by_hand():
    """1 % of the changes reach 0.5, half of them towards the flip: four rows expect 0.02 flips."""
    one = Corpus(Design(kinds=("prose",), contexts=(512,), per_cell=20, steps=50), RNG).producer()
    size = one.margin.size
    margin = np.linspace(0.06, 1.0, size)
    change = np.zeros(size)
    change[:: size // 10][:10] = 0.5
    change *= np.where(np.arange(size) % 2, 1, -1)
    share = np.mean(np.abs(change) >= 0.5)
    none = np.zeros(size, dtype=bool)
    known = dataclasses.replace(one, margin=margin, margin_change=change, flipped=none)
    limits = flip_limits([known] * 4)
    reachable = margin[margin <= 0.5]
    within = int(0.02 / (0.5 * share))  # rows whose expected flips sum to at most 0.02
    assert limits == {"largest": 0.0, "confident": reachable[-1 - within]}


def test_too_few(normals):
    with pytest.raises(UserError, match="3 normal recordings"):
        calibrate(None, normals[:3])


def test_a_producer_given_twice(normals):
    with pytest.raises(UserError, match="equal bit for bit"):
        calibrate(None, [*normals, dataclasses.replace(normals[2], candidate_name="copy")])


@pytest.mark.parametrize("apart", [0.01, 0.4])
def test_a_producer_that_hardly_differs(normals, apart):
    almost = dataclasses.replace(
        normals[2],
        candidate_name="copy",
        candidate_digest="another",
        margin_change=normals[2].margin_change + apart * normals[3].margin_change,
    )
    with pytest.raises(UserError, match="differ from each other by only"):
        calibrate(None, [*normals, almost])


def test_producers_that_agree_in_their_largest_change_are_two(corpus, normals):
    """One row of a heavy tail is most of the mean square, and has one sign by chance."""
    changes = [normals[i].margin_change.copy() for i in (2, 3)]
    row = int(np.argmax(normals[2].margin > 3))
    for change in changes:
        change[row] = 30 * np.sqrt(np.sum(change**2))
    alike = [
        dataclasses.replace(normals[i], margin_change=change)
        for i, change in zip((2, 3), changes, strict=True)
    ]
    assert calibrate(None, [*normals[:2], *alike, normals[4]]).limits


def test_the_reference_itself_is_no_normal(normals):
    same = dataclasses.replace(normals[0], bitwise_reference=True, candidate_name="f32 again")
    with pytest.raises(UserError, match="f32 again equals the reference"):
        calibrate(None, [same, *normals[1:]])


def test_a_normal_that_is_not_finite(corpus, normals):
    with pytest.raises(UserError, match="not finite"):
        calibrate(None, [*normals, corpus.producer(Effect(nan=True))])


@pytest.mark.parametrize("ratio", [2.0, 0.4])
def test_an_outlier_in_either_direction(corpus, normals, ratio):
    odd = corpus.producer(Effect("odd", ratio=ratio))
    with pytest.raises(UserError, match=r"Normal odd \d+ is an outlier.*peers are at"):
        calibrate(None, [*normals[:3], odd])


def test_a_small_outlier_is_seen_among_many_peers(corpus, normals):
    many = [*normals, *(corpus.producer(name=f"further {i}") for i in range(5))]
    assert calibrate(None, many).limits
    with pytest.raises(UserError, match="is an outlier"):
        calibrate(None, [*many, corpus.producer(Effect("odd", ratio=1.35))])


@pytest.mark.parametrize(
    ("effect", "gate"),
    [
        (Effect("odd", edges=4.0), "edges"),
        (Effect("odd", rescored=1.6), "decode_vs_prefill"),
        (Effect("odd", own=8.0), "decode_vs_prefill"),
        (Effect("odd", late=1.6), "growth_decode"),
    ],
)
def test_a_normal_that_is_wrong_in_one_gate_buys_no_room_there(corpus, normals, effect, gate):
    with pytest.raises(UserError, match=rf"Normal odd \d+ is an outlier.*gate {gate}"):
        calibrate(None, [*normals, corpus.producer(effect)])


def test_an_outlier_between_its_own_phases_is_told_what_is_far(corpus, normals):
    odd = corpus.producer(Effect("odd", own=8.0))
    message = r"odd \d+ is an outlier: KL\(its prefill \|\| its own decode\) is .* may PASS and yet"
    with pytest.raises(UserError, match=message):
        calibrate(None, [*normals, odd])


def test_producers_that_spread_too_far(corpus):
    ratios = (0.80, 0.95, 1.05, 1.20)
    spread = [corpus.producer(Effect(f"r{r}", ratio=r)) for r in ratios]
    with pytest.raises(UserError, match="would allow .* times the normal difference"):
        calibrate(None, spread)
    wide = calibrate(None, spread, max_allowed_ratio=5.0)
    assert wide.settings["max_allowed_ratio"] == 5.0  # and it shows in the file


def test_known_bad_recordings(corpus, normals):
    bad = corpus.producer(Effect("bad", ratio=2.0))
    band = calibrate(None, normals, [bad])
    assert band.bad[0]["verdict"] == "FAIL"
    assert band.bad[0]["observed"] > band.bad[0]["allowed"]
    with pytest.raises(UserError, match=r"known-bad.*a gap of"):
        calibrate(None, normals, [bad, corpus.producer(Effect("harmless", ratio=0.3))])


def test_a_known_bad_recording_has_to_fail(corpus, normals):
    """Above the limit, but not beyond the chance of it."""
    for ratio in (1.1, 1.12, 1.15, 1.2):
        slight = corpus.producer(Effect("slight", ratio=ratio))
        try:
            band = calibrate(None, normals, [slight])
        except UserError as error:
            assert "gap of" in str(error) or "within the chance of it" in str(error)
        else:
            assert band.bad[0]["verdict"] == "FAIL"


def test_normals_of_different_references(normals):
    other = dataclasses.replace(normals[0], reference_identity="another")
    with pytest.raises(UserError, match="2 different references"):
        calibrate(None, [other, *normals[1:]])


def test_from_recordings():
    parts = made.segments(per_cell=3)
    logits = made.logits_of(parts)
    reference = made.recording(parts, logits)

    def normal(seed: int):
        noisy = logits + np.random.default_rng(seed).normal(0, 0.02, logits.shape)
        policy = {"name": "bf16", "text": f"bf16,variant={seed}", "fields": {}}
        return made.recording(parts, noisy, reference, f"run {seed}", policy=policy)

    band = calibrate(reference, [normal(seed) for seed in range(1, 6)], deploy_context=4096)
    assert band.reference["identity"] == reference.identity
    assert band.deploy_context == 4096
    assert [p["name"] for p in band.producers] == [f"bf16,variant={i}" for i in range(1, 6)]
    gates = {row.gate for row in band.rows}
    assert {"level", "growth_context", "growth_decode", "edges", "decode_vs_prefill",
            "prefill_last", "tail_mass"} <= gates  # fmt: skip
    assert "edges: prefill window" in band.limits


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is no band"),
        ("[1]", "is no band"),
        ("null", "is no band: TypeError: it holds no object"),
        ('{"schema_version": 99}', "schema version 99"),
        ('{"schema_version": 1}', "schema version 1"),
        ('{"schema_version": 2}', "schema version 2"),
        ('{"schema_version": 3}', "damaged"),
    ],
)
def test_files_that_are_no_band(tmp_path, content, message):
    path = tmp_path / "band.json"
    path.write_text(content)
    with pytest.raises(UserError, match=message):
        Band.load(path)


def test_unknown_and_missing_gates(tmp_path, band):
    path = tmp_path / "band.json"
    data = band.to_dict()
    name = "edges: chunk"
    for limits, message in (
        ({**data["limits"], "edgse: chunk": data["limits"][name]}, "edgse"),
        ({k: v for k, v in data["limits"].items() if k != name}, "lacks a limit"),
    ):
        write(path, {**data, "limits": limits})
        with pytest.raises(UserError, match=message):
            Band.load(path)


def write(path, data) -> None:
    """A band file that somebody edited and gave the hash of its new content."""
    path.write_text(json.dumps({**data, "sha256": content_sha256(data)}))


def test_an_edited_band_is_not_believed(tmp_path, band):
    """Whatever was edited, and whether or not the hash was made to fit where limits tell."""
    path = tmp_path / "band.json"
    band.save(path)
    written = json.loads(path.read_text())
    path.write_text(json.dumps(written))  # laid out otherwise: the same band
    assert Band.load(path).limits == band.limits

    def edited(*keys, value):
        data = json.loads(json.dumps(written))
        inner = data
        for key in keys[:-1]:
            inner = inner[key]
        assert inner[keys[-1]] != value
        inner[keys[-1]] = value
        return data

    level = "level: prose, geometric"
    cases = {
        "allowed": edited("limits", level, "allowed", value=1.9),
        "detectable": edited("limits", level, "detectable", value=1.001),
        "unit": edited("limits", level, "unit", value="mass"),
        "detection floor": edited("detection_floor", "prose", value=1.01),
        "flips in the bins": edited("flip_bins", value=[[1, 2]]),
        "producers": edited("producers", value=written["producers"][:4]),
        "confident_margin": edited("margins", "confident_margin", value=5.0),
        "confident_margin is": edited("margins", "confident_margin", value=0.051),
        "largest_flip_margin": edited("margins", "largest_flip_margin", value=0.9),
        "flips by margin": edited("margins", "bins", 1, "flips", value=0.0),
        "producer normal 1 2 is at": edited("producers", 1, "ratio", "prose, geometric", value=1.5),
        "max_allowed_ratio": edited("settings", "max_allowed_ratio", value=0.5),
        "sigma": edited("margins", "sigma", value="large"),
        "decides on prefill": edited("level", value="prefill"),
        "limit level": edited("normals", 0, "mean_log", "level", value=[-9.0] * len(band.segments)),
    }
    for message, data in cases.items():
        path.write_text(json.dumps(data))
        with pytest.raises(UserError, match="was changed after it was calibrated"):
            Band.load(path)
        write(path, data)
        with pytest.raises(UserError, match=f"{message}.*calibrate"):
            Band.load(path)
    # What cannot be computed again from the file: the hash alone tells.
    for data in (
        edited("settings", "max_allowed_ratio", value=9.0),
        edited("producers", 1, "name", value="another"),
        edited("reference", "identity", value="another"),
        edited("producers", 1, "digest", value="another"),
        edited("deploy_context", value=512),
    ):
        path.write_text(json.dumps(data))
        with pytest.raises(UserError, match=r"was changed.*kernjax\.calibrate.*Restore it"):
            judge(None, path)


@pytest.mark.parametrize(
    "change",
    [
        {"limits": None},
        {"production_policy": None},
        {"deploy_context": -1},
        {"deploy_context": True},
        {"strata": 3},
        {"bad": ["m4"]},
        {"reference": {"identity": "simulated", "model": "demo"}},
        {"reference": {"identity": "simulated", "logits_dtype": []}},
        ("producers", {"digest": 3}),
        ("producers", {"model": {"weights_sha256": "another"}}),
        ("producers", {"logits_dtype": {}}),
        ("strata", {"p99": 0.0}),
        ("strata", {"p50": None}),
        ("strata", {"mean": 1e9}),
        ("strata", {"kind": "music"}),
        ("strata", {"context_len": "deep"}),
    ],
    ids=str,
)
def test_a_band_of_other_types(tmp_path, band, change):
    path = tmp_path / "band.json"
    data = band.to_dict()
    if isinstance(change, tuple):
        name, entry = change
        change = {name: [data[name][0] | entry, *data[name][1:]]}
    write(path, data | change)
    with pytest.raises(UserError, match="damaged"):
        Band.load(path)


def test_a_band_cut_short_or_edited(tmp_path, band):
    path = tmp_path / "band.json"
    data = band.to_dict()
    data["normals"][0]["mean_log"]["level"].pop()
    write(path, data)
    with pytest.raises(UserError, match="damaged"):
        Band.load(path)
    with pytest.raises(UserError, match="Could not read"):
        Band.load(tmp_path / "absent.json")
    with pytest.raises(UserError, match="Could not write"):
        band.save(tmp_path / "absent" / "band.json")


@pytest.mark.parametrize(
    ("normals", "message"),
    [
        (["bf16", "chunk32", "p_f32"], "3 normal recordings were given"),
        (["bf16", "chunk32", "p_f32", "bf17"], "bf17"),
    ],
)
def test_what_cannot_make_a_band_is_said_before_anything_runs(normals, message, tmp_path, capsys):
    words = [*(f"--normal={name}" for name in normals), f"--out={tmp_path / 'band.json'}"]
    assert command.execute(command_calibrate.main, command_calibrate.FLAGS, words) == 3
    shown = capsys.readouterr()
    assert message in shown.err and "compiling" not in shown.err
    assert not (tmp_path / "band.json").exists()


def test_a_planted_fault_is_no_production_policy(tmp_path, capsys):
    words = [f"--normal={name}" for name in ("bf16", "chunk32", "p_f32", "chunk128")]
    words += ["--production_policy=final_state_transposed", f"--out={tmp_path / 'band.json'}"]
    assert command.execute(command_calibrate.main, command_calibrate.FLAGS, words) == 3
    assert "final_state_transposed" in capsys.readouterr().err

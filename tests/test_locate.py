"""locate: the search by halves, and faults planted in one layer of a small model."""

from __future__ import annotations

import json
import textwrap
import types

import numpy as np
import pytest
from instrument import Instrument, run
from shown_commands import shown
from tiny import make_corpus, write_checkpoint

from kernjax import locate, record
from kernjax.judge import attribution
from kernjax.scoring.substitution import Rows
from kernjax.texts import write_corpus


def additive(carried: dict[int, float]):
    """An effect of independent errors, and how often it was asked for."""
    asked = []

    def effect(layers):
        asked.append(layers)
        return sum(carried.get(layer, 0.0) for layer in layers)

    return effect, asked


def test_halves_find_one_layer_of_many():
    effect, asked = additive({37: 1e-3})
    parts = attribution.search(range(64), 1e-3, effect, 0.25)
    best = max(parts, key=lambda part: part.share)
    assert best.layers == (37,) and best.share == 1.0
    assert len(asked) == 1 + 2 * 6
    assert sorted(layer for part in parts for layer in part.layers) == list(range(64))


def test_halves_find_two_layers_and_leave_a_spread_effect_whole():
    effect, _ = additive({3: 0.6, 12: 0.4})
    parts = attribution.search(range(16), 1.0, effect, 0.25)
    assert {part.layers for part in parts if part.share > 0.25} == {(3,), (12,)}
    effect, asked = additive(dict.fromkeys(range(16), 1 / 16))
    parts = attribution.search(range(16), 1.0, effect, 0.25)
    assert all(len(part.layers) > 1 for part in parts) and len(asked) < 16


def test_the_full_map_asks_for_every_layer():
    effect, asked = additive({2: 1.0})
    parts = attribution.search([2, 5, 9], 1.0, effect, 0.25, full_map=True)
    assert [part.share for part in parts] == [1.0, 0.0, 0.0] and asked == [(2,), (5,), (9,)]


def test_effects_that_are_not_finite():
    base = np.log(np.full((3, 21), 1 / 21, np.float32))
    broken = base.copy()
    broken[1, 4] = np.nan
    assert attribution.mean_kl(base, base) == 0.0
    total = attribution.mean_kl(base, broken)
    assert total == np.inf
    assert attribution.share_of(total, total) == 1.0 and attribution.share_of(0.1, total) == 0.0


def test_first_places():
    error = np.array([0.0, 0.0, 1e-9, 0.5, 0.3])
    assert attribution.first_position(error) == 3
    assert attribution.first_position(np.zeros(4)) is None
    assert attribution.first_position(np.array([0.1, np.nan, 0.2])) == 1
    kl = np.array([0.0, 2.0, 3.0, 5.0])
    place = attribution.first_place(
        kl, np.array([0, 0, 1, 1]), np.array([9, 12, 7, 8]), ["a", "b"], 1.0
    )
    assert (place.segment, place.pos, place.kl) == ("b", 7, 3.0)
    assert attribution.first_place(kl, kl, kl, ["a"], 9.0) is None


@pytest.mark.parametrize(
    ("shares", "outside", "inside", "located", "words"),
    [
        ([0.9, 0.1], (), 1.0, True, "Layer 0"),
        ([0.3, 0.3, 0.3], (), 1.0, False, "spread over 3 layers"),
        ([0.2], ("weights=fp8",), 0.2, True, "outside the layers (weights=fp8)"),
    ],
)
def test_the_sentence(shares, outside, inside, located, words):
    parts = [attribution.Part((i,), s, s) for i, s in enumerate(shares)]
    cells = [
        attribution.Cell(
            i, "full_attention", "attention.prefill", "attention.p", "attention.p=fp8", s, s,
            1e-2, 2e-2, None, None, 0, "x",
        )
        for i, s in enumerate(shares)
    ]  # fmt: skip
    found = attribution.conclude(1.0, [], parts, cells, outside, inside, None, 3)
    assert found.located is located and words in found.sentence


def test_no_change_is_no_place():
    found = attribution.conclude(0.0, [], [], [], (), 0.0, None, 2)
    assert not found.located and "no recorded bit" in found.sentence


class OnlyOutside:
    """A candidate that changes nothing but the logits, by a tenth of a nat at one id of one row."""

    layers = sites = ()
    outside = ["logits=bf16"]
    segments = [types.SimpleNamespace(id="a", kind="prose", context_len=4)]

    def _rows(self, change: float) -> Rows:
        cells = np.log(np.full((3, 21), 1 / 21, np.float32))
        cells[2, 0] += change
        return Rows(np.zeros(3, int), np.array([3, 4, 5]), np.array([0, 1, 1]), cells)

    def chosen(self, layers, variant=1):
        return np.zeros(2, np.int32)

    def run(self, which):
        return self._rows(0.0)

    def run_whole(self):
        return self._rows(0.1)


def test_what_lies_outside_the_layers_is_a_part_of_its_own():
    found = locate._attribute(OnlyOutside(), None)
    assert found.located and found.outside_share == 1.0 and found.total > 0
    assert "outside the layers (logits=bf16) carries 100 %" in found.sentence
    assert (found.first.segment, found.first.pos) == ("a", 5)


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """Four layers, two of each kind; few segments, scored at the ids of their own reference."""
    folder = tmp_path_factory.mktemp("locate")
    layers = ["linear_attention", "full_attention"] * 2
    model = write_checkpoint(folder / "model", layer_types=layers)
    corpus = write_corpus(make_corpus({96: 1}, kinds=("prose",)), folder / "corpus")
    instrument = Instrument(folder, model, corpus, folder / "reference")
    assert instrument.record(record, "--out", str(instrument.reference)) == 0
    return instrument


def located(capsys, deep, *flags):
    code = run(locate, *deep.subject, "--reference", str(deep.reference), *flags)
    captured = capsys.readouterr()
    assert code in (0, 2), captured.err
    return code, captured.out, json.loads(captured.out.splitlines()[-1])


def test_a_site_rounded_in_one_layer_is_named(deep, capsys, tmp_path):
    """Among harmless changes elsewhere: 10 bits in the chunked rule of both recurrent layers."""
    policy = "bf16,delta_rule.v_new=m10,attention.p=m1@layers=3"
    code, out, line = located(capsys, deep, "--policy", policy, "--output_dir", str(tmp_path))
    assert code == 0 and line["located"]
    assert (line["layer"], line["site"]) == (3, "attention.p")
    assert line["op"] == "attention.prefill and attention.decode"
    assert line["share"] > 0.9
    assert out.startswith("Layer 3 (full_attention)")
    cell = line["cells"][0]
    assert cell["decode_median"] > 1e-3 and cell["prefill_max"] > 1e-3
    assert {site["name"] for site in line["sites"]} == {"delta_rule.v_new", "attention.p"}
    assert json.loads((tmp_path / "locate.json").read_text())["layer"] == 3


def test_the_shown_command_shares_fp8_among_the_attention_layers(deep, capsys):
    """That of the README: two layers of four round P, and what each carries adds up."""
    _, _, line = located(capsys, deep, *shown("locate", "--policy=fp8"))
    shares = {tuple(part["layers"]): part["share"] for part in line["layers"]}
    assert set(shares) == {(1,), (3,)} and min(shares.values()) > 0.02
    assert 0.5 < sum(shares.values()) < 2  # at 24 rows, errors are not yet without each other
    assert [site["name"] for site in line["sites"]] == ["attention.p"] and line["outside"] == []


KERNELS = """
from pallas_kernels import delta_rule

def forgets(q, k, v, g, beta, state, **options):
    # The state is dropped at every step.
    return delta_rule.recurrent(q, k, v, g, beta, 0 * state, **options)
"""


def test_a_kernel_in_one_layer_is_named_by_its_op_and_phase(deep, capsys, tmp_path, monkeypatch):
    (tmp_path / "locate_kernels.py").write_text(textwrap.dedent(KERNELS))
    monkeypatch.syspath_prepend(tmp_path)
    kernel = "delta_rule.recurrent=locate_kernels:forgets@layers=2"
    code, out, line = located(capsys, deep, "--kernel", kernel, "--full_map")
    assert code == 0 and out.startswith("Layer 2 (linear_attention), op delta_rule.recurrent")
    assert [part["layers"] for part in line["layers"]] == [[2]]
    assert (line["layer"], line["op"], line["share"]) == (2, "delta_rule.recurrent", 1.0)
    (cell,) = line["cells"]
    # Prefill never calls it; the first decoded token already misses its past.
    assert cell["prefill_max"] == 0.0 and cell["decode_max"] > 0.01
    assert cell["first_pos"] >= 96 and line["first"]["pos"] >= 96
    assert line["candidate"]["kernels"]["delta_rule.recurrent"]["layers"] == "2"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "There is no candidate"),
        (["--policy", "p_f32"], "changes nothing"),
        (["--policy", "bf16,attention.p=m3@layers=0"], "layer 0"),
        (["--policy", "fp8", "--share", "2"], "--share"),
        (["--policy", "fp8", "--share", "0.5", "--full_map"], "beside --full_map"),
    ],
)
def test_bad_flags(deep, flags, message, capsys):
    assert run(locate, *deep.subject, "--reference", str(deep.reference), *flags) == 3
    assert message in capsys.readouterr().err

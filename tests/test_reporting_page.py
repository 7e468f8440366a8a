"""The HTML page and its figures: complete, one file, no network, safe with bad names and tokens."""

from __future__ import annotations

import builtins
import dataclasses
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from report_cases import EVIL, LONG, amber, green, hostile, red

import kernjax.reporting.page as page_module
from kernjax.base.errors import UserError
from kernjax.base.resources import demo_recording
from kernjax.judge import Band, compare
from kernjax.judge.metrics import MARGIN_LABELS, margin_bin
from kernjax.recording import load_recording
from kernjax.reporting import write_files
from kernjax.reporting.charts import wilson
from kernjax.reporting.figures import figures
from kernjax.reporting.json import plain
from kernjax.reporting.page import Extras, render_page
from kernjax.reporting.svg import Scale, tick_label

TEMPLATES = Path(page_module.__file__).parent / "templates"
CSS = (TEMPLATES / "chart.css").read_text() + (TEMPLATES / "page.css").read_text()
VOID = {"meta", "link", "br"}
LOCATE = {
    "schema_version": 1,
    "sentence": "layer 3 carries 80 %",
    "layers": [{"layers": [0, 1], "share": 0.2}, {"layers": [3], "share": 0.8}],
}
SWEEP = {
    "schema_version": 1,
    "sentence": "the knee is m7",
    "knee": "m7",
    "points": [
        {"format": f, "ratios": [{"kind": "code", "mean": "geometric", "ratio": r, "low": r / 1.1,
                                  "high": r * 1.1}]}
        for f, r in (("m10", 1.0), ("m7", 1.5))
    ],
}  # fmt: skip


class Page(HTMLParser):
    """Tags with their attributes, texts, and whether every element is closed in turn."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.text: list[str] = []
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if "style" not in self._open:
            self.text.append(data)

    @property
    def words(self) -> str:
        return " ".join(self.text)


@pytest.fixture(scope="module")
def demo():
    reference = load_recording(demo_recording("demo.f32.zip"))
    candidate = load_recording(demo_recording("demo.chunk32.zip"))
    band = Band.load(demo_recording("demo.band.json"))
    comparison = compare(reference, candidate)
    return comparison, band, reference, candidate


@pytest.fixture(scope="module")
def drawn(demo):
    return json.loads(json.dumps(figures(*demo, lambda token: f"<{token}>"), allow_nan=False))


def check_harmless(html: str) -> Page:
    page = Page(html)
    assert len(html.encode()) < 1_000_000
    assert all(char.isprintable() or char == "\n" for char in html)
    for tag, attributes in page.tags:
        assert tag not in ("script", "img", "iframe", "object", "form", "a", "base"), tag
        assert not any(name.startswith("on") for name in attributes)
        assert attributes.get("href", "data:,") == "data:,"
        assert "src" not in attributes and "style" not in attributes
    assert "url(" not in html and "@import" not in html
    return page


# --- the page


@pytest.mark.parametrize("make", [red, amber, green])
def test_the_page_says_it_all(make, drawn):
    verdict = make()
    line = {"command": "python -m kernjax.check --policy=fp8 --kernel=a=b:c", "wall_s": 12.0,
            "runs": [{"run": "candidate fp8", "tokens": 1000, "seconds": 2.0}],
            "cost": {"compile_s": 61.0, "peak_memory_bytes": 3 * 2**29, "peak_device_bytes": None},
            "notes": ["greedy texts part"],
            "twin": [{"kind": "code", "context_len": 512, "kl_median": 1e-5, "kl_mean": 2e-5}],
            }  # fmt: skip
    page = check_harmless(render_page(verdict, Extras(drawn, line, LOCATE, SWEEP)))
    words, heads = page.words, "".join(page.text)
    assert words.index(str(verdict.outcome)) < words.index(verdict.reason[1:])
    for finding in verdict.findings:
        assert finding.text in words and finding.command in heads
    for gate in verdict.gates:
        assert gate.stratum in words
        if gate.name == "level" and gate.observed is not None:
            assert f"{gate.observed:.2f} [{gate.low:.2f}, {gate.high:.2f}]" in words
    for head in ("How much, and how sure", "What was compared", "By kind and depth", "In pictures",
                 "Gates", "Flips by the reference's margin", "The worst positions", "Cost",
                 "What this does not show", "Once more", "Where it comes from",
                 "Against production without the change"):  # fmt: skip
        assert head in heads, head
    assert "--policy=fp8\n--kernel=a=b:c" in heads
    locate = "python -m kernjax.locate --policy=fp8 --kernel=a=b:c"
    assert locate not in heads and f"By layer: {LOCATE['sentence']}." in words  # it was run
    unlocated = "".join(Page(render_page(verdict, Extras(drawn, line))).text)
    assert (locate in unlocated) == (make is not green)
    assert "500 tokens/s" in words and "greedy texts part" in words
    assert "61 s, summed over programs" in words and "1.50 GiB" in words
    assert "fullest device" not in words
    assert sum(tag == "svg" for tag, _ in page.tags) == 8
    assert words.count("the knee is m7") == 1


def test_a_command_breaks_between_its_flags_and_is_copied_whole():
    command = "python -m kernjax.check --policy=fp8 '--kernel=a=b c' --x 3"
    pieces = page_module.flags(command)
    assert "".join(pieces) == command
    assert pieces[1:] == ["--policy=fp8 ", "'--kernel=a=b c' ", "--x 3"]
    html = render_page(red(), Extras(line={"command": command}))
    (shown,) = re.findall(r"<h2>Once more</h2>\n<pre [^>]*>(.*?)</pre>", html, re.S)
    assert re.sub("<[^>]*>", "", shown).replace("&#39;", "'") == command


def test_flips_say_what_they_count(drawn):
    """One number: of decoded positions on the tile, by margin, and in the charts."""
    verdict = red()
    words = " ".join(Page(render_page(verdict, Extras(drawn))).words.split())
    assert f"{verdict.flips} of {verdict.positions} decoded positions" in words
    assert f"The {verdict.flips} flips of decoded positions." in words
    assert sum(entry.flips for entry in verdict.margin_bins) == verdict.flips
    assert sum(s.flips for s in verdict.strata if s.phase == "decode") == verdict.flips
    assert "Margin and KL of single decoded positions" in words
    assert "Share of the decoded positions of a bin" in words


def test_without_rows_the_page_says_what_is_missing():
    page = check_harmless(render_page(red()))
    assert "figures.json was not beside the verdict" in page.words
    assert "The worst positions" not in page.words
    assert sum(tag == "svg" for tag, _ in page.tags) == 3


def test_hostile_names_and_tokens(demo):
    drawn = figures(*demo, lambda token: EVIL + LONG)
    drawn["kinds"] = [EVIL + LONG] * len(drawn["kinds"])
    for row in drawn["worst"]:
        row["segment"] = row["kind"] = EVIL + LONG
    found = {**LOCATE, "sentence": EVIL + LONG}
    swept = {**SWEEP, "sentence": EVIL, "knee": EVIL + LONG}
    swept["points"] = [{**point, "format": EVIL + LONG} for point in SWEEP["points"]]
    line = {"command": EVIL + LONG, "notes": [EVIL + LONG], "wall_s": 1.0,
            "runs": [{"run": EVIL + LONG, "tokens": 1, "seconds": 0.0}]}  # fmt: skip
    html = render_page(hostile(), Extras(drawn, line, found, swept))
    page = check_harmless(html)
    assert "<img src=x onerror=alert(1)>" in page.words  # as text
    assert "\\u202e" in page.words and "\\x1b" in page.words
    assert "{{7*7}}" in page.words


def test_a_policy_forbids_scripts_and_requests():
    metas = [a for tag, a in Page(render_page(green())).tags if tag == "meta"]
    (policy,) = [a["content"] for a in metas if a.get("http-equiv") == "Content-Security-Policy"]
    assert "default-src 'none'" in policy and "script" not in policy


def test_without_jinja_the_rest_is_written_and_the_extra_named(tmp_path, monkeypatch, caplog):
    real = builtins.__import__

    def no_jinja(name, *args, **kwargs):
        if name.partition(".")[0] == "jinja2":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_jinja)
    with caplog.at_level("INFO", "kernjax"):
        names = {path.name for path in write_files(green(), tmp_path)}
    assert names == {"verdict.json", "report.txt", "report.md", "junit.xml"}
    assert "kernjax[report]" in caplog.text
    with pytest.raises(UserError, match=r"kernjax\[report\]"):
        render_page(green())


# --- contrast, from the style sheet's own colours


def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def blend(base: str, heat: str, share: float) -> str:
    over = [int(part) for part in heat.split(",")]
    mixed = [round(int(base[i : i + 2], 16) * (1 - share) + over[k] * share)
             for k, i in enumerate((1, 3, 5))]  # fmt: skip
    return "#" + "".join(f"{value:02x}" for value in mixed)


@pytest.mark.parametrize("scheme", [0, 1])
def test_contrast(scheme):
    blocks = re.findall(r":root \{(.*?)\}", CSS, re.DOTALL)
    colours = dict(re.findall(r"--([\w-]+): (#\w{6}|\d+, \d+, \d+);", blocks[scheme]))
    for ground in (colours["ground"], colours["raised"]):
        for name in ("text", "muted", "pass", "fail", "doubt"):
            assert contrast(colours[name], ground) >= 4.5, (name, ground)
    for name in ("pass", "fail", "doubt"):
        assert contrast(colours["on-badge"], colours[name]) >= 4.5, name
    for name in ("s0", "s1", "s2", "s3", "s4", "s5", "normal"):
        assert contrast(colours[name], colours["ground"]) >= 3.0, name
    for share in map(float, re.findall(r"var\(--heat\), ([\d.]+)\)", CSS)):
        assert contrast(colours["text"], blend(colours["ground"], colours["heat"], share)) >= 4.5


# --- figures


def test_figures_hold_the_rows_numbers(demo, drawn):
    comparison, band, reference, candidate = demo
    decode = comparison.phase == 1
    kinds = np.array([s.kind for s in comparison.segments])[comparison.segment]
    for curve in drawn["cdf"]:
        kl = np.sort(comparison.kl[decode & (kinds == curve["kind"])])
        for value, share in curve["candidate"]:
            assert abs(np.mean(kl <= value * (1 + 1e-3)) - share) < 0.01
        assert curve["candidate"][-1][0] == pytest.approx(kl[-1], rel=1e-3)
        shares = [share for _, share in curve["normal"]]
        assert shares == sorted(shares) and shares[-1] == 1.0
    for row in drawn["steps"]:
        context = np.array([s.context_len for s in comparison.segments])[comparison.segment]
        step = comparison.pos - context + 1
        own = decode & (kinds == row["kind"])
        assert sum(b["last"] - b["first"] + 1 for b in row["candidate"]) == step[own].max()
        bucket = row["candidate"][-1]
        inside = own & (step >= bucket["first"]) & (step <= bucket["last"])
        assert bucket["mean"] == pytest.approx(comparison.kl[inside].mean(), rel=1e-3)
    scatter = drawn["scatter"]
    assert scatter["of"] == decode.sum() and len(scatter["points"]) <= 1500
    assert sum(p[3] for p in scatter["points"]) == scatter["flips"] <= 400
    largest = max(p[1] for p in scatter["points"])
    assert largest == pytest.approx(comparison.kl[decode].max(), rel=1e-3)


def test_expected_flips_are_those_of_gaussian_noise(demo, drawn):
    comparison, band, *_ = demo
    sigma = band.margins["sigma"]
    margin = comparison.margin[comparison.phase == 1]
    bins = margin_bin(margin)
    for index in range(len(MARGIN_LABELS)):
        total = sum(0.5 * math.erfc(m / (2 * sigma)) for m in margin[bins == index])
        assert drawn["margins"]["expected"][index] == pytest.approx(total, rel=2e-3, abs=1e-9)


def test_the_worst_positions_are_the_largest(demo, drawn):
    comparison, band, reference, candidate = demo
    kl = comparison.kl
    order = np.argsort(-kl, kind="stable")[:10]
    assert [("prefill", "decode", "rescore")[p] for p in comparison.phase[order]] == [
        row["phase"] for row in drawn["worst"]
    ]
    assert [row["kl"] for row in drawn["worst"]] == [pytest.approx(k, rel=1e-3) for k in kl[order]]
    for row, i in zip(drawn["worst"], order, strict=True):
        best = reference.top_ids[i][np.argmax(reference.top_logprobs[i])]
        probability = math.exp(reference.top_logprobs[i].max())
        assert row["reference"][0] == [best, f"<{best}>", pytest.approx(probability, rel=1e-3)]
        assert row["pos"] == comparison.pos[i]
        here = [token for token in row["strip"] if token[3]]
        assert here == [[reference.target_ids[i], f"<{reference.target_ids[i]}>", row["kl"], 1]]
        assert len(row["candidate"]) == 5


def test_a_part_of_the_corpus_and_a_first_choice_outside_the_ids(demo):
    comparison, band, reference, candidate = demo
    names = [s.id for s in comparison.segments][3:9]
    part = candidate.select(names)
    rows = figures(compare(reference, part), band, reference, part)
    assert rows["scatter"]["of"] == sum(s.score_len for s in comparison.segments[3:9])
    assert {row["segment"] for row in rows["worst"]} <= set(names)
    assert rows["worst"][0]["reference"][0][1] is None  # no tokenizer


def test_a_candidate_that_is_not_finite(demo):
    comparison, band, reference, candidate = demo
    rows = np.nonzero(comparison.phase == 1)[0][5:8]
    top = candidate.top_logprobs.copy()
    top[rows] = np.nan
    broken = dataclasses.replace(candidate, top_logprobs=top)
    made = figures(compare(reference, broken), band, reference, broken)
    drawn = json.loads(json.dumps(plain(made), allow_nan=False))
    assert [row["kl"] for row in drawn["worst"][:4]].count(None) == 3
    assert {row["pos"] for row in drawn["worst"][:3]} == set(comparison.pos[rows].tolist())
    assert drawn["worst"][0]["candidate"] == []
    assert drawn["scatter"]["of"] == (comparison.phase == 1).sum() - 3
    page = check_harmless(render_page(red(), Extras(drawn)))
    assert page.words.count("not finite") >= 3


# --- scales


@pytest.mark.parametrize(
    "low, high, log",
    [(0, 1, False), (-3e-5, 1e-5, False), (1e-7, 3.0, True), (0.95, 1.1, True), (2, 2.0001, True)],
)
def test_ticks_are_inside_and_few(low, high, log):
    ticks = Scale(low, high, log).ticks()
    assert 2 <= len(ticks) <= 8 and ticks == sorted(ticks)
    assert all(low <= tick <= high for tick in ticks)
    places = [Scale(low, high, log).place(tick) for tick in ticks]
    assert all(0 <= place <= 1 for place in places) and places == sorted(places)


def test_scales_hold_what_they_are_given():
    scale = Scale.over([1e-5, None, math.nan, 0.0, 3e-3], log=True)
    assert scale.low < 1e-5 and scale.high > 3e-3
    assert Scale.over([]).place(5.0) == 1.0
    assert Scale.over([2.0]).low < 2.0 < Scale.over([2.0]).high
    assert Scale.over([0.0]).ticks()


def test_tick_labels():
    values = (0, 0.5, 2048, 1e-5, 3.4e-5)
    assert [tick_label(v) for v in values] == ["0", "0.5", "2048", "1e-5", "3.4e-5"]


def test_intervals_of_shares():
    share, low, high = wilson(10, 100)
    assert share == 0.1
    # The score interval's ends solve (p - share)^2 = z^2 p (1 - p) / n.
    for end in (low, high):
        assert (end - 0.1) ** 2 == pytest.approx(1.959964**2 * end * (1 - end) / 100, rel=1e-4)
    assert wilson(0, 50)[1] == 0.0 and wilson(50, 50)[2] == 1.0

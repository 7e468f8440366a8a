"""The page in a headless Chromium: it fits every width, has contrast, keeps the console quiet.

Skipped where there is no Chromium (`apt-get install chromium`); `.ci/run` installs one if it can.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess

import pytest
from report_cases import hostile, red
from test_reporting_page import LOCATE, SWEEP

from kernjax.reporting.page import Extras, render_page

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), "")
WIDTHS = (360, 768, 1280, 2200)
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no Chromium here")

# The page lies in a frame of each width (`srcdoc`: same origin, so that it can be measured).
MEASURE = """
<!doctype html><meta charset=utf-8><meta name=color-scheme content="light dark">
<body>%s<pre id=out></pre><script>
// WCAG 2: relative luminance, and the ratio of the lighter to the darker.
const channels = colour => colour.match(/[\\d.]+/g).map(Number);
const light = rgb => {
  const [r, g, b] = rgb.map(c => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const over = ([r, g, b, a = 1], under) => [r, g, b].map((c, i) => a * c + (1 - a) * under[i]);
const ground = (view, element) => {
  const under = element.parentElement ? ground(view, element.parentElement) : [255, 255, 255];
  return over(channels(view.getComputedStyle(element).backgroundColor), under);
};
const poor = frame => {
  const view = frame.contentWindow, page = frame.contentDocument, found = [];
  let seen = 0;
  const texts = page.createTreeWalker(page.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const text = texts.currentNode.data.trim(), element = texts.currentNode.parentElement;
    if (!text || element.tagName === 'title') continue;
    const style = view.getComputedStyle(element), under = ground(view, element);
    const ink = over(channels(element.closest('svg') ? style.fill : style.color), under);
    const [low, high] = [light(ink), light(under)].sort((a, b) => a - b);
    const size = parseFloat(style.fontSize);
    const large = size >= 24 || size >= 18.6 && +style.fontWeight > 600;
    const ratio = (high + 0.05) / (low + 0.05);
    seen += 1;
    if (ratio < (large ? 3 : 4.5)) found.push([text.slice(0, 40), Math.round(100 * ratio) / 100]);
  }
  return {seen, found, ground: light(ground(view, page.body))};
};
window.onload = () => {
  const found = [...document.querySelectorAll('iframe')].map(frame => {
    const page = frame.contentDocument, root = page.documentElement;
    const tiny = [...page.querySelectorAll('svg text')].map(t => t.getBoundingClientRect().height);
    return {
      width: frame.clientWidth, needed: root.scrollWidth, height: root.scrollHeight,
      title: page.title, charts: page.querySelectorAll('svg').length,
      text: Math.min(...tiny.filter(h => h > 0)),
      font: parseFloat(getComputedStyle(page.body).fontSize),
      contrast: frame.clientWidth === 1280 ? poor(frame) : null,
    };
  });
  document.getElementById('out').textContent = JSON.stringify(found);
};
</script>
"""


def measured(tmp_path, page: str, dark: bool) -> tuple[list[dict], str]:
    frames = "".join(
        f'<iframe style="border:0;width:{width}px;height:900px" srcdoc="{html.escape(page)}">'
        "</iframe>"
        for width in WIDTHS
    )
    file = tmp_path / "measure.html"
    file.write_text(MEASURE.replace("%s", frames), encoding="utf-8")
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-extensions"]
    command += ["--enable-logging=stderr", "--v=0", f"--user-data-dir={tmp_path / 'profile'}"]
    command += [f"--blink-settings=preferredColorScheme={0 if dark else 1}"]
    done = subprocess.run(
        [*command, "--virtual-time-budget=5000", "--dump-dom", file.as_uri()],
        capture_output=True,
        text=True,
        timeout=240,
    )
    (found,) = re.findall(r'<pre id="out">(.*?)</pre>', done.stdout, re.DOTALL)
    return json.loads(html.unescape(found)), done.stderr


@pytest.mark.parametrize("make, dark", [(red, False), (hostile, True)])
def test_it_fits_every_width_can_be_read_and_keeps_the_console_quiet(tmp_path, make, dark):
    line = {"command": "python -m kernjax.check --policy=fp8", "wall_s": 3.0}
    verdict = make()
    page = render_page(verdict, Extras(None, line, LOCATE, SWEEP))
    found, console = measured(tmp_path, page, dark)
    assert [entry["width"] for entry in found] == list(WIDTHS)
    for entry in found:
        assert entry["needed"] <= entry["width"], entry
        assert entry["title"] == f"kernjax: {verdict.outcome}" and entry["charts"] == 5
        assert entry["text"] >= 8 and entry["font"] >= 15
    contrast = found[WIDTHS.index(1280)]["contrast"]
    assert contrast["seen"] > 200 and contrast["found"] == []
    assert (contrast["ground"] < 0.1) == dark  # the colours are those that were asked for
    assert "CONSOLE" not in console

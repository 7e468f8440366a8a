"""The page in a headless Chromium: no sideways scrolling at any width, nothing on the console.

Skipped where there is no Chromium (`apt-get install chromium`).
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
<!doctype html><meta charset=utf-8><body>%s<pre id=out></pre><script>
window.onload = () => {
  const found = [...document.querySelectorAll('iframe')].map(frame => {
    const page = frame.contentDocument, root = page.documentElement;
    const tiny = [...page.querySelectorAll('svg text')].map(t => t.getBoundingClientRect().height);
    return {
      width: frame.clientWidth, needed: root.scrollWidth, height: root.scrollHeight,
      title: page.title, charts: page.querySelectorAll('svg').length,
      text: Math.min(...tiny.filter(h => h > 0)),
      font: parseFloat(getComputedStyle(page.body).fontSize),
    };
  });
  document.getElementById('out').textContent = JSON.stringify(found);
};
</script>
"""


def measured(tmp_path, page: str) -> tuple[list[dict], str]:
    frames = "".join(
        f'<iframe style="border:0;width:{width}px;height:900px" srcdoc="{html.escape(page)}">'
        "</iframe>"
        for width in WIDTHS
    )
    file = tmp_path / "measure.html"
    file.write_text(MEASURE.replace("%s", frames), encoding="utf-8")
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-extensions"]
    command += ["--enable-logging=stderr", "--v=0", f"--user-data-dir={tmp_path / 'profile'}"]
    done = subprocess.run(
        [*command, "--virtual-time-budget=5000", "--dump-dom", file.as_uri()],
        capture_output=True,
        text=True,
        timeout=240,
    )
    (found,) = re.findall(r'<pre id="out">(.*?)</pre>', done.stdout, re.DOTALL)
    return json.loads(html.unescape(found)), done.stderr


@pytest.mark.parametrize("make", [red, hostile])
def test_it_fits_every_width_and_keeps_the_console_quiet(tmp_path, make):
    line = {"command": "python -m kernjax.check --policy=fp8", "wall_s": 3.0}
    page = render_page(make(), Extras(None, line, LOCATE, SWEEP))
    found, console = measured(tmp_path, page)
    assert [entry["width"] for entry in found] == list(WIDTHS)
    for entry in found:
        assert entry["needed"] <= entry["width"], entry
        assert entry["title"] == "kernjax: FAIL" and entry["charts"] == 5
        assert entry["text"] >= 8 and entry["font"] >= 15
    assert "CONSOLE" not in console

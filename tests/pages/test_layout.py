"""On no page does one text lie on another, whatever the window's width and the font."""

from __future__ import annotations

import base64
import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from ansible.module_utils.aerie.measuring import verdict
from example_records import campaign
from test_preflight_rules import HOSTS, KNOWN, WANT, recorded

from aerie_controller import PROJECT, report
from aerie_controller.preflight import results

WIDTHS = (390, 760, 1100, 1280, 1440, 1600)
FONTS = ("DejaVu Serif", "Liberation Serif")
"""A wide font, the only serif of many a plain Linux, and a narrow one."""

MEASURE = """
<!doctype html><meta charset="utf-8"><body><script>
const pages = PAGES, widths = WIDTHS, overlaps = [];
let texts = 0;
function boxes(page) {
  const walker = page.createTreeWalker(page.body, NodeFilter.SHOW_TEXT), list = [];
  while (walker.nextNode()) {
    const node = walker.currentNode, range = page.createRange();
    const parent = node.parentElement;
    if (!node.data.trim() || parent.closest("script, style, svg") || !parent.checkVisibility()) continue;
    range.selectNodeContents(node);
    const scroll = parent.closest(".scroll"), edge = scroll ? scroll.getBoundingClientRect().right : Infinity;
    // Lines of one paragraph may touch: a box is made a little lower than its line.
    for (const box of range.getClientRects()) {
      const [top, bottom] = [box.top + box.height / 4, box.bottom - box.height / 4];
      list.push({node, left: box.left, right: Math.min(box.right, edge), top, bottom});
    }
  }
  return list;
}
function measure(frame, name, width) {
  const list = boxes(frame.contentDocument).filter(box => box.right - box.left > 1 && box.bottom - box.top > 1);
  texts += list.length;
  list.sort((one, other) => one.top - other.top);
  for (let first = 0; first < list.length; first++)
    for (let second = first + 1; second < list.length && list[second].top < list[first].bottom; second++) {
      const a = list[first], b = list[second];
      if (a.node === b.node || a.left >= b.right - 1 || b.left >= a.right - 1) continue;
      overlaps.push([name, width, a.node.data.trim().slice(0, 40), b.node.data.trim().slice(0, 40)]);
    }
}
let left = pages.length * widths.length;
for (const [name, source] of pages) for (const width of widths) {
  const frame = document.createElement("iframe");
  frame.style = `width: ${width}px; height: 900px; border: 0`;
  frame.onload = () => {
    measure(frame, name, width);
    frame.remove();
    if (--left > 0) return;
    const bytes = unescape(encodeURIComponent(JSON.stringify({texts, overlaps})));
    document.body.innerHTML = `<pre id="result">${btoa(bytes)}</pre>`;
  };
  frame.srcdoc = source;
  document.body.append(frame);
}
</script></body>
"""


def with_font(page: str, font: str) -> str:
    """Return ``page`` in one font."""
    return re.sub(r"--(serif|sans): [^;]*;", lambda match: f"--{match[1]}: '{font}';", page)


@pytest.fixture
def overlaps(chromium: str, tmp_path: Path) -> Callable[[str], list[list[str]]]:
    """Return a function that lays a page out in all widths and fonts; it returns which texts overlap where."""

    def measure(page: str) -> list[list[str]]:
        pages = [[font, with_font(page, font)] for font in FONTS]
        # "</" would end the script that holds the pages
        text = MEASURE.replace("PAGES", json.dumps(pages).replace("</", "<\\/")).replace("WIDTHS", json.dumps(WIDTHS))
        harness = tmp_path / "harness.html"
        harness.write_text(text)
        options = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
        options += " --disable-component-update --disable-sync --virtual-time-budget=20000 --dump-dom"
        command = [chromium, *options.split(), f"--user-data-dir={tmp_path / 'browser'}", f"file://{harness}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        match = re.search(r'<pre id="result">([^<]+)</pre>', done.stdout)
        assert match, done.stderr[-2000:]
        measured = json.loads(base64.b64decode(match[1]))
        assert measured["texts"] > 20 * len(WIDTHS) * len(FONTS)
        overlapping: list[list[str]] = measured["overlaps"]
        return overlapping

    return measure


def test_an_overlap_is_seen(overlaps):
    words = "".join(f"<p>{number} words of a page</p>" for number in range(30))
    covering = "<p style='position: absolute; top: 1rem; left: 1rem; margin: 0'>on top</p>"
    page = f"<!doctype html><style>:root {{ --serif: x; }} p {{ font: 1rem var(--serif); }}</style>{words}"
    assert overlaps(page) == []
    assert {row[2] for row in overlaps(page + covering)} | {row[3] for row in overlaps(page + covering)} >= {"on top"}


@pytest.mark.parametrize(
    ("low", "high"),
    [(0.63, 0.82), (1.31, 0.68), (12.4, 23.5)],
    ids=["slower at all levels", "a crossover", "the widest figure"],
)
def test_texts_of_a_report_do_not_overlap(overlaps, low, high):
    baseline = {1: 100.0, 8: 400.0, 64: 900.0}
    eagle3 = {1: low * 100, 8: (low + high) / 2 * 400, 64: high * 900}
    records = campaign({"baseline": baseline, "eagle3": eagle3})
    assert overlaps(report.render(verdict.groups(records))) == []


def test_texts_of_a_report_of_many_arms_do_not_overlap(overlaps):
    levels = {1: 100.0, 8: 400.0, 64: 900.0}
    factors = {"baseline": 1.0, "eagle3-5": 0.9, "eagle3-10-long-name": 1.3, "eagle3": 0.95}
    table = {arm: {level: speed * factor for level, speed in levels.items()} for arm, factor in factors.items()}
    assert overlaps(report.render(verdict.groups(campaign(table)))) == []


def test_texts_of_a_preflight_do_not_overlap(overlaps):
    names = sorted(path.name for path in HOSTS.iterdir() if path.is_dir())[:8]
    hosts = [results.examine(KNOWN, name, recorded(name), WANT) for name in names]
    assert overlaps(report.render_preflight(hosts)) == []


def test_texts_of_a_profile_do_not_overlap(overlaps):
    measured = json.loads((PROJECT / "docs/measurements/profile-h200/profile.json").read_text())
    assert overlaps(report.render_profile(measured)) == []

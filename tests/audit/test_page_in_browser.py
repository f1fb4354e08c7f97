# SPDX-License-Identifier: Apache-2.0
"""The report as a browser shows it: wide and on a phone, light and dark, and without a network.

Needs a Chromium (Debian: ``apt-get install chromium``); without one these tests fail and say so.
"""

from pathlib import Path

import pytest

from audit.browser import Browser
from lockstep.audit.judgement import judge
from lockstep.audit.outcome import summarise
from lockstep.audit.report.page import page
from lockstep.audit.world import World

HERE = Path(__file__).parent
SCREENS = [
    pytest.param(390, 844, "dark", True, id="phone-dark"),
    pytest.param(390, 844, "light", True, id="phone-light"),
    pytest.param(1280, 800, "light", False, id="wide-light"),
    pytest.param(1280, 800, "dark", False, id="wide-dark"),
]

# Relative luminance and contrast as WCAG 2 defines them, of every element that shows text.
CONTRAST = """
(() => {
  const numbers = (c) => c.match(/[0-9.]+/g).map(Number);
  const light = (c) => {
    const [r, g, b] = numbers(c).map((v) => v / 255)
      .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (e) => {
    for (; e; e = e.parentElement) {
      const c = numbers(getComputedStyle(e).backgroundColor);
      if (c.length < 4 || c[3] > 0) return getComputedStyle(e).backgroundColor;
    }
    return "rgb(255, 255, 255)";
  };
  let least = 21;
  for (const e of document.body.querySelectorAll("*")) {
    if (![...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim())) continue;
    const style = getComputedStyle(e);
    const ink = light(e instanceof SVGElement ? style.fill : style.color);
    const [a, b] = [ink, light(ground(e))].sort((x, y) => y - x);
    least = Math.min(least, (a + 0.05) / (b + 0.05));
  }
  return least;
})()
"""
SMALLEST = """
Math.min(...[...document.body.querySelectorAll("*")]
  .filter((e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()))
  .map((e) => {
    const size = parseFloat(getComputedStyle(e).fontSize);
    const matrix = e instanceof SVGGraphicsElement ? e.getScreenCTM() : null;
    return matrix ? size * matrix.a : size;
  }))
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    made = Browser(tmp_path_factory.mktemp("profile"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def reports(pool, tmp_path_factory):
    """By name: a page with findings and one without."""
    folder = tmp_path_factory.mktemp("reports")
    written = {}
    for program in ("bugs/a_method_of_module", "bugs/i_rank0_loads", "healthy/plain"):
        ledgers = pool.ledgers(HERE / f"{program}.py")
        findings, world = judge(ledgers), World(ledgers)
        text = page(findings, world, summarise(findings, world, 2))
        assert len(text.encode()) < 1_000_000
        written[program] = folder / f"{Path(program).stem}.html"
        written[program].write_text(text, encoding="utf-8")
    return written


@pytest.mark.slow
@pytest.mark.parametrize(("width", "height", "scheme", "phone"), SCREENS)
def test_it_is_readable(browser, reports, width, height, scheme, phone):
    for name, file in reports.items():
        browser.open(file, width=width, height=height, scheme=scheme, phone=phone)
        assert browser.requests() == [file.resolve().as_uri()], "one file, no network"
        assert browser.complaints() == []
        assert browser.ask("document.documentElement.scrollWidth") <= width, "no sideways scroll"
        assert browser.ask(CONTRAST) >= 4.5
        assert browser.ask(SMALLEST) >= 12
        ground = browser.ask("getComputedStyle(document.body).backgroundColor")
        assert (ground == "rgb(255, 255, 255)") == (scheme == "light")
        wanted = "in lockstep" if name == "healthy/plain" else "1 error"
        assert wanted in browser.ask("document.body.innerText")


@pytest.mark.slow
def test_it_shows_the_curves_the_map_and_the_lines(browser, reports):
    file = reports["bugs/a_method_of_module"]
    browser.open(file, width=1280, height=800, scheme="light", phone=False)
    marked = browser.ask("[...document.querySelectorAll('mark')].map((e) => e.innerText)")
    assert any("compute_loss(*batch(step))" in line for line in marked)
    drawn = "[...document.querySelectorAll('polyline')].map((e) => e.getBoundingClientRect().width)"
    widths = browser.ask(drawn)
    assert len(widths) == 3, "two ranks' gradients, and the drift"
    assert min(widths) > 300
    cells = browser.ask("document.querySelectorAll('.cell-1').length")
    assert cells == 8, "four parameters on two ranks"

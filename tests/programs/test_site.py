# SPDX-License-Identifier: Apache-2.0
"""The site builds without a warning, and a browser shows it, on a phone too, without a network."""

import importlib.util
import subprocess
import sys
from urllib.parse import urlparse

import pytest
from tests.programs.blocks import ROOT

from audit.browser import Browser

DOCS = ROOT / "docs"
SCREENS = [
    pytest.param(390, 844, "dark", True, id="phone-dark"),
    pytest.param(390, 844, "light", True, id="phone-light"),
    pytest.param(1280, 800, "light", False, id="wide-light"),
    pytest.param(1280, 800, "dark", False, id="wide-dark"),
]
LOOKED_AT = ("index", "tutorial", "recovery", "audit", "api/trainer", "rules/README", "rules/LS101")


def module_at(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pictures_are_what_the_program_draws():
    draw = module_at(DOCS / "pictures" / "draw.py")
    for name, picture in draw.PICTURES.items():
        assert picture().drawn() == (DOCS / "pictures" / name).read_text(encoding="utf-8")


def listed(contents):
    lines = contents.splitlines()
    return [line for line in lines if line and not line.startswith(("```", ":"))]


def test_contents_are_what_the_pages_link_to_and_nothing_is_lost():
    contents = module_at(DOCS / "site" / "contents.py")
    pages = {"index", "a", "b/README", "b/first", "b/second", "b/lost", "lost"}
    front = "## One\n[b](b/README.md#x), [out](../x.md)\n## Two\n[a](a.md), [b](https://b.md)\n"
    made = contents.of_the_site(front, pages)
    assert listed(made) == ["b/README", "a", "lost"]
    assert made.index(":caption: One") < made.index("b/README") < made.index(":caption: Two")
    folder = contents.of_a_folder("[2](second.md) [1](first.md) [a](../a.md)", "b", pages)
    assert listed(folder) == ["second", "first", "lost"]
    assert contents.inside("[x](../../CHANGELOG.md#y)", "b/first") == "[x](/changelog.md#y)"


def test_sections_of_docstrings_become_fields():
    convert = module_at(DOCS / "site" / "docstrings.py").convert
    docstring = """Say.

Args:
    one, two: numbers, the second
        of them larger.

Returns:
    A pair: of both.

Collective:
    None.

Raises:
    WeightError, OSError: a bad one,
        or none.
    Whatever else: it is raised."""
    assert convert(docstring.splitlines()) == [
        "Say.",
        "",
        ":param one: numbers, the second of them larger.",
        ":param two: numbers, the second of them larger.",
        "",
        ":Returns:",
        "    A pair: of both.",
        "",
        ":Collective:",
        "    None.",
        "",
        ":Raises:",
        "    * :py:exc:`~lockstep.errors.WeightError`, ``OSError``: a bad one, or none.",
        "    * Whatever else: it is raised.",
        "",
    ]
    with pytest.raises(ValueError, match="nonsense"):
        convert(["Args:", "    nonsense"])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-b", "html", "--fail-on-warning", "--keep-going"]
    done = subprocess.run(
        [*command, "-q", "-d", str(out / "doctrees"), str(DOCS), str(out / "html")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return out / "html"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    made = Browser(tmp_path_factory.mktemp("profile"))
    yield made
    made.close()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_page_is_there(site):
    pages = {page.relative_to(DOCS).with_suffix("") for page in DOCS.rglob("*.md")}
    made = {page.relative_to(site).with_suffix("") for page in site.rglob("*.html")}
    assert pages - made == set()
    contents = (site / "index.html").read_text(encoding="utf-8")
    for section in ("Begin", "Use", "Trust", "Look up", "Take part"):
        assert f'<span class="caption-text">{section}</span>' in contents


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_reference_has_our_sections(site):
    shown = (site / "api" / "without-the-trainer.html").read_text(encoding="utf-8")
    for section in ("Parameters", "Returns", "Raises", "Gradient", "Collective"):
        assert f">{section}<" in shown, section
    assert 'href="errors.html#lockstep.errors.ReplicasDifferError"' in shown
    assert "Gradient:\n" not in shown, "a section that was taken for a paragraph"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("width", "height", "scheme", "phone"), SCREENS)
def test_a_browser_shows_it(site, browser, width, height, scheme, phone):
    for name in LOOKED_AT:
        page = site / f"{name}.html"
        browser.open(page, width=width, height=height, scheme=scheme, phone=phone)
        assert {urlparse(url).scheme for url in browser.requests()} <= {"file", "data"}, name
        assert browser.complaints() == [], name
        assert browser.ask("document.documentElement.scrollWidth") <= width, name
        missing = "[...document.images].filter((e) => !e.naturalWidth).map((e) => e.src)"
        assert browser.ask(missing) == [], name

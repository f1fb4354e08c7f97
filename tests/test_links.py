# SPDX-License-Identifier: Apache-2.0
"""Relative links in the pages lead to files and headings that are there."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])

CODE = re.compile(r"^(```+).*?^\1$|`[^`\n]+`", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\((?P<target>[^()\s]+)\)")
HEADING = re.compile(r"^#{1,6} (.+)$", re.MULTILINE)


def links(text: str) -> list[str]:
    """The relative ones; what looks like one in code is none."""
    found = [match["target"] for match in LINK.finditer(CODE.sub("`code`", text))]
    return [target for target in found if not re.match(r"\w+:", target)]


@cache
def anchors(page: Path) -> frozenset[str]:
    """The names that GitHub, and the site, give to the page's headings."""
    text = re.sub(r"^(```+).*?^\1$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.M)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in HEADING.findall(text))
    return frozenset(heading.replace(" ", "-") for heading in plain)


def broken(page: Path) -> list[str]:
    """The page's links that lead nowhere."""
    lost = []
    for target in links(page.read_text(encoding="utf-8")):
        path, _, anchor = target.partition("#")
        leads_to = (page.parent / path).resolve() if path else page
        if not leads_to.exists() or (anchor and anchor not in anchors(leads_to)):
            lost.append(target)
    return lost


def test_links_lead_somewhere() -> None:
    assert len(PAGES) > 80
    assert {str(page.relative_to(ROOT)): lost for page in PAGES if (lost := broken(page))} == {}


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One heading: `code`\n[a](page.md#one-heading-code) [b](#two) [c](other.md)"
        " `[d](code.md)` [e](https://example.org)\n```text\n[f](block.md)\n```\n![g](h.svg)\n"
    )
    assert broken(page) == ["#two", "other.md", "h.svg"]

# SPDX-License-Identifier: Apache-2.0
"""Reports show what a program calls its things, and never let it become a part of the page."""

from dataclasses import replace
from html.parser import HTMLParser

from lockstep.audit.facts import Parameter, Track
from lockstep.audit.finding import Finding, Place
from lockstep.audit.ledger import Ledger
from lockstep.audit.outcome import summarise
from lockstep.audit.report.page import page
from lockstep.audit.world import World
from lockstep.parity import ParityReport, ParityRow

HOSTILE = "\"'><script>alert(1)</script><img src=x onerror=alert(2)>&lt;b"
ALLOWED = {
    *("html", "head", "meta", "title", "style", "body", "section", "h1", "h2", "p", "b", "br"),
    *("span", "div", "i", "pre", "mark", "code", "svg", "polyline", "line", "rect", "text"),
    *("table", "tr", "th", "td"),
}


class Elements(HTMLParser):
    """What a browser would make of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.shown = set(), set(), ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data):
        self.shown += data


def holds_nothing_of_its_own(text):
    found = Elements(text)
    assert found.tags <= ALLOWED
    assert not {name for name in found.attributes if name.startswith("on")}
    return found.shown.count(HOSTILE)


def test_the_audits_page(tmp_path):
    source = tmp_path / f"{HOSTILE.replace('/', '')}.py"
    source.write_text(f"{HOSTILE}\n")
    parameter = Parameter(name=HOSTILE, shape=[2], dtype="float32", samples=2)
    tracks = [Track(HOSTILE, HOSTILE, [], parameters=[parameter])]
    world = World([Ledger(rank=rank, tracks=tracks) for rank in (0, 1)])
    finding = Finding(
        code="LS101",
        name=HOSTILE,
        severity="error",
        message=HOSTILE,
        fix=HOSTILE,
        rank=[0, 1],
        step=1,
        parameters=[HOSTILE],
        where=[Place(str(source), 1, HOSTILE, HOSTILE)],
        evidence={
            "gradients": [
                {"step": step, "parameter": HOSTILE, "values": {"0": 1.0, "1": 2.0}}
                for step in (1, 2)
            ]
        },
    )
    names = ("torch", "lockstep", "finished")
    summary = {
        **summarise([finding], world, 2),
        **dict.fromkeys(names, HOSTILE),
        "command": [HOSTILE],
        "ignore": ["LS2", HOSTILE],
    }
    ticked = replace(finding, message=f"`{HOSTILE}`", code="LS201")
    shown = page([finding, ticked], world, summary, [finding])
    assert holds_nothing_of_its_own(shown) >= 18


def test_the_table_of_verify():
    row = ParityRow(HOSTILE, 0.0, 1.0, 1.0, 0, False, HOSTILE)
    assert holds_nothing_of_its_own(ParityReport([row], 2, [HOSTILE])._repr_html_()) == 3

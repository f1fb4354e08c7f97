# SPDX-License-Identifier: Apache-2.0
"""Each code has a page, and each rule a program that is wrong."""

import re
from pathlib import Path

import pytest

from lockstep.audit.explain import page_of, raised_codes
from lockstep.audit.rules import all_codes
from lockstep.cli import main

SAID_BY_BOTH = {"LS101", "LS102", "LS115", "LS601", "LS602"}
"""Raised by a trainer, or found by the audit of a program."""

HERE = Path(__file__).parent

# Not (yet) shown by a program of two ranks that runs to its end: a killed rank (LS602, in
# test_launch), scripts without a group or an optimizer, or that hide torch (LS404 to LS406, there).
# LS116 is looked for in trainers' runs, in tests/unit/trainer/test_audit_comparison.
WITHOUT_A_PROGRAM = {"LS404", "LS405", "LS406", "LS602"}


@pytest.mark.parametrize("code", sorted(all_codes()))
def test_every_code_has_its_page(code, capsys):
    page = page_of(code)
    assert page is not None
    assert page.startswith(f"# {code}: {all_codes()[code].name}\n")
    assert main(["explain", code.lower()]) == 0
    assert capsys.readouterr().out == page


def test_no_page_is_left_over():
    pages = {p.stem for p in (HERE.parents[1] / "docs" / "rules").glob("LS*.md")}
    assert pages == set(all_codes())


@pytest.mark.parametrize("code", sorted(raised_codes()))
def test_what_is_raised_is_explained_too(code, capsys):
    assert main(["explain", code]) == 0
    page = capsys.readouterr().out
    assert page.startswith(f"# {code}: ")
    # A code means one thing: an error shares that of a rule only where it says the same.
    assert code not in all_codes() or code in SAID_BY_BOTH
    assert code in SAID_BY_BOTH or raised_codes()[code].__name__ in page


def test_an_unknown_code_is_wrong_usage(capsys):
    assert main(["explain", "LS999"]) == 2
    assert main(["explain", "../LS101"]) == 2
    assert "LS101" in capsys.readouterr().err
    assert main(["explain"]) == 0
    listed = capsys.readouterr().out
    assert "LS203" in listed
    assert "LS201  raised   MixedWeightsError" in listed


def test_every_rule_has_a_program_that_is_wrong():
    shown = {
        code
        for program in (HERE / "bugs").glob("*.py")
        for code in re.findall(r"# here (LS\d+)", program.read_text())
    }
    assert shown == set(all_codes()) - WITHOUT_A_PROGRAM

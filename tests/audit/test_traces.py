# SPDX-License-Identifier: Apache-2.0
"""Every recorded trace is judged as its program says: see `tests.audit.traces`."""

import re

import pytest
from tests.audit.traces import FOLDERS, is_current, programs, read_trace, trace_of

from lockstep.audit.judgement import judge

# A report stands behind what the program has printed, and a judge's warnings do not.
pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")

PROGRAMS = [program for folder in FOLDERS for program in programs(folder)]


def _told(program):
    """The line that is marked, and the code that it is marked with; None for a right program."""
    for number, line in enumerate(program.read_text().splitlines(), start=1):
        if match := re.search(r"# here (LS\d+)", line):
            return number, match.group(1)
    return None


@pytest.mark.parametrize("program", [pytest.param(p, id=p.stem) for p in PROGRAMS])
def test_a_trace_is_judged_as_its_program_says(program):
    ledgers = read_trace(trace_of(program))
    findings = judge(ledgers)
    assert not any(ledger is not None and ledger.facts.failed_rules for ledger in ledgers)
    told = _told(program)
    if told is None:
        assert [(f.code, f.message) for f in findings if f.severity != "notice"] == []
        return
    line, code = told
    graver = [f for f in findings if f.severity != "notice" or f.code == code]
    assert {f.code for f in graver} == {code}, [(f.code, f.message) for f in findings]
    places = {(p.file, p.line) for f in graver for p in f.where}
    assert (str(program), line) in places


def test_every_program_has_a_trace_of_what_it_is_now():
    """``python -m tests.audit.traces`` records those that are missing or old."""
    assert [p.stem for p in PROGRAMS if not is_current(p)] == []

# SPDX-License-Identifier: Apache-2.0
"""The program's text explains verdicts, and makes none: who reads it is listed here."""

import re
from pathlib import Path

import lockstep.audit

AUDIT = Path(lockstep.audit.__file__).parent
READS = re.compile(r"^\s*(import|from) (ast|linecache)\b|getsource", re.MULTILINE)
ASKS = re.compile(r"from lockstep\.audit\.program_text")


def _modules(pattern):
    files = sorted(AUDIT.rglob("*.py"))
    return {str(f.relative_to(AUDIT)) for f in files if pattern.search(f.read_text())}


def test_who_reads_source():
    assert {m for m in _modules(READS) if not m.startswith("program_text/")} == {
        "finding.py",  # the text of a line that a finding names
        "launch.py",  # does a script start its own ranks?
        "report/page.py",  # the lines around it
    }


def test_who_asks_for_it():
    """After the verdict; and for the one thing that no number tells, which rate was meant."""
    asking = {m for m in _modules(ASKS) if not m.startswith("program_text/")}
    assert asking == {"judgement.py", "diagnoses/scale.py"}
    text = (AUDIT / "diagnoses" / "scale.py").read_text()
    assert re.findall(r"from lockstep\.audit\.program_text\S* import (.*)", text) == [
        "divides_rate"
    ]

# SPDX-License-Identifier: Apache-2.0
"""Right programs of the pools that were scored once stay right, whatever the audit learns since."""

import pytest
from tests.audit.fresh.__main__ import HERE, audited, kind_of

KNOWN = {
    "w_right_10": "LS302",  # a copy of the actor with noise of each rank's own
}
RIGHT = [each for each in sorted(HERE.glob("*/*_right_*.txt")) if kind_of(each) == "right"]


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(400)
@pytest.mark.parametrize("program", RIGHT, ids=lambda path: path.name.partition(".")[0])
def test_a_right_program_is_not_called_wrong(program):
    findings, _ = audited(program)
    graver = [each["code"] for each in findings if each["severity"] != "notice"]
    known = KNOWN.get(program.name.partition(".")[0])
    assert graver == ([] if known is None else [known])

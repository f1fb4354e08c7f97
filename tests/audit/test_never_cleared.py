# SPDX-License-Identifier: Apache-2.0
"""LS116: none where a program clears gradients in its own way, a warning where it clears others."""

from pathlib import Path

import pytest
from tests.audit.traces import read_trace, trace_of

from lockstep.audit.judgement import judge

HERE = Path(__file__).parent
HEALTHY = HERE / "healthy"


@pytest.mark.slow
def test_the_notice_names_the_line_of_the_step(pool):
    program = HERE / "bugs" / "c_never_cleared.py"
    (found,) = [each for each in pool.findings(program) if each.code == "LS116"]
    line = program.read_text().splitlines().index("    optimizer.step()  # here LS116") + 1
    assert f"c_never_cleared.py:{line})" in found.message


@pytest.mark.parametrize("name", ["cleared_every_other_step", "gan", "accumulation", "lbfgs"])
@pytest.mark.slow
def test_gradients_that_are_cleared_are_none_that_never_are(pool, name):
    assert "LS116" not in {found.code for found in pool.findings(HEALTHY / f"{name}.py")}


@pytest.mark.parametrize(
    ("name", "severity"), [("c_never_cleared", "notice"), ("c_cleared_for_one_of_two", "warning")]
)
def test_it_is_a_warning_where_another_optimizer_has_its_gradients_cleared(name, severity):
    findings = judge(read_trace(trace_of(HERE / "bugs" / f"{name}.py")))
    assert [each.severity for each in findings if each.code == "LS116"] == [severity]

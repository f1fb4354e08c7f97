# SPDX-License-Identifier: Apache-2.0
"""A notice must not be given where gradients are cleared in a way of the program's own."""

from pathlib import Path

import pytest

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

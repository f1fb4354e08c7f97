# SPDX-License-Identifier: Apache-2.0
"""A notice must not be given where gradients are cleared in a way of the program's own."""

from pathlib import Path

import pytest

HEALTHY = Path(__file__).parent / "healthy"


@pytest.mark.parametrize("name", ["cleared_every_other_step", "gan", "accumulation", "lbfgs"])
@pytest.mark.slow
def test_gradients_that_are_cleared_are_none_that_never_are(pool, name):
    assert "LS116" not in {found.code for found in pool.findings(HEALTHY / f"{name}.py")}

# SPDX-License-Identifier: Apache-2.0
"""Random programs beside the gradient of one process: none right is called wrong, factors are true.

``python -m tests.audit.generated 500`` runs more of them, and prints what was missed as well.
"""

import pytest
from tests.audit.generated.judged import judged

MANY = [pytest.param(number, marks=pytest.mark.slow) for number in range(8, 150)]


@pytest.mark.parametrize("number", [*range(8), *MANY])
def test_a_random_program(pool, number, tmp_path):
    one = judged(pool, number, tmp_path / "measured.json")
    assert one.unseen == [], str(one)
    assert one.alarms == [], str(one)
    assert not one.factor_is_off, str(one)

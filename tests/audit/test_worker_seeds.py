# SPDX-License-Identifier: Apache-2.0
"""Workers with equal seeds: a warning where their samples were seen to draw alike."""

import pytest

from lockstep.audit.facts import Loading, WorkerDraws
from lockstep.audit.rules.worker_seeds import equal_seeds

BEGAN = {"torch": 1, "numpy": 2, "random": 3}
DREW = {**BEGAN, "torch": 4}


def _loadings(*after, **changes):
    """Of two ranks whose one worker ended its first batch there."""
    told = [WorkerDraws([], BEGAN, x or {}) for x in after]
    return {
        rank: Loading(
            **{
                "key": "Images#0",
                "where": [],
                "indices": [rank, rank + 2],
                "worker_seed": 7,
                "drawn": [seen],
                "training": True,
                **changes,
            }
        )
        for rank, seen in enumerate(told)
    }


def test_draws_that_repeat_are_a_warning():
    found = equal_seeds(_loadings(DREW, DREW))
    assert found.severity == "warning"
    assert "drew from torch the same way" in found.message


@pytest.mark.parametrize(
    "loadings",
    [
        _loadings(None, None),
        _loadings(BEGAN, BEGAN),
        _loadings(DREW, {**BEGAN, "torch": 5}),
        _loadings(DREW, DREW, training=False),
        _loadings(DREW, DREW, indices=[0, 1]),
        _loadings(DREW, DREW, drawn=[]),
    ],
    ids=[
        "none has read",
        "from generators of their own",
        "drawn apart",
        "evaluated",
        "the same samples",
        "not told",
    ],
)
def test_what_was_not_measured_is_a_notice(loadings):
    assert equal_seeds(loadings).severity == "notice"

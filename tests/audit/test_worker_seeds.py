# SPDX-License-Identifier: Apache-2.0
"""Workers with equal seeds: a warning where their samples were seen to draw alike."""

from dataclasses import replace

import pytest

from lockstep.audit.facts import Loading, WorkerDraws
from lockstep.audit.rules.worker_seeds import copied_generators, equal_seeds

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


def _holding(*held, **changes):
    """Of two ranks, each with a worker for each of `held`."""
    workers = [WorkerDraws([], BEGAN, DREW, list(states)) for states in held]
    loadings = _loadings(DREW, DREW)
    return {r: replace(one, **{"drawn": workers, **changes}) for r, one in loadings.items()}


def test_copies_of_one_generator_that_were_drawn_from_are_a_warning():
    found = copied_generators(_holding([5, 6], [5, 6]))
    assert (found.code, found.severity) == ("LS506", "warning")


@pytest.mark.parametrize(
    "loadings",
    [
        _holding([0, 0], [0, 0]),
        _holding([5, 5], [5, 5]),
        _holding([5, 6], [5, 7]),
        _holding([4, 6], [5, 6]),
        _holding([5], [5]),
        _holding([5, 6]),
        _holding([5, 6], [5, 6], training=False),
        _holding([5, 6], [5, 6], indices=[]),
    ],
    ids=[
        "none is held",
        "none was drawn from",
        "drawn apart",
        "begun apart",
        "nothing was read",
        "one worker",
        "evaluated",
        "a stream, whose workers may draw one order",
    ],
)
def test_other_generators_of_a_dataset_are_not_found_fault_with(loadings):
    assert copied_generators(loadings) is None

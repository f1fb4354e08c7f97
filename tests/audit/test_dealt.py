# SPDX-License-Identifier: Apache-2.0
"""Samples that were dealt out to ranks, and those of the folds of a cross-validation."""

import pytest

from lockstep.audit.dealt import is_dealt_out
from lockstep.audit.facts import Loading


def _loading(**said):
    return Loading("data#0", [], **{"training": True, **said})


def _rows(first, end):
    return [[100 + number for number in range(first, end)]]


@pytest.mark.parametrize(
    ("ranks", "dealt"),
    [
        ([{"indices": [0, 2, 4, 6]}, {"indices": [1, 3, 5, 7]}], True),
        ([{"indices": [0, 2, 4, 6]}, {"indices": [0, 2, 4, 6]}], False),
        ([{"indices": [0, 1, 2, 3], "replicas": 2}, {"indices": [0, 1, 2, 3]}], True),
        ([{"indices": [0, 1, 2, 3], "sampler": "DistributedSampler"}, {}], True),
        # Parts of each rank's own: their numbers are the same, their rows are not.
        ([{"indices": [0, 1, 2, 3], "rows": _rows(n, n + 4)} for n in (0, 4)], True),
        ([{"indices": [0, 1, 2, 3], "rows": _rows(n, n + 4)} for n in (0, 2)], False),
        # Parts of one dataset count by its numbers, however their rows were augmented.
        (
            [
                {"indices": [0, 1, 2, 3], "samples": [n, 4, 5, 6], "rows": _rows(n, n + 4)}
                for n in (0, 8)
            ],
            False,
        ),
        ([{"batches": [1, 2, 3, 4]}, {"batches": [5, 6, 7, 8]}], True),
        ([{"batches": [1, 2, 3, 4]}, {"batches": [4, 5, 6, 7]}], False),
        ([{"indices": [0, 2]}, {"indices": [1, 3]}], False),
        ([{}, {}], False),
    ],
)
def test_what_each_rank_trains_on_tells(ranks, dealt):
    assert is_dealt_out({n: [_loading(**said)] for n, said in enumerate(ranks)}) is dealt


def test_two_folds_are_judged_by_what_the_other_trains_on():
    halves = [[0, 1, 2, 3], [4, 5, 6, 7]]
    loadings = {
        rank: [
            _loading(indices=halves[rank]),
            _loading(indices=halves[1 - rank], training=False),
        ]
        for rank in (0, 1)
    }
    assert not is_dealt_out(loadings)

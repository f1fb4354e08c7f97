# SPDX-License-Identifier: Apache-2.0
"""When the ranks that are left in a loop are found to wait for one that has left it."""

from types import SimpleNamespace

import pytest

from lockstep.phases import Phase
from lockstep.recovery.deserted_ranks import DesertedRanks
from lockstep.worker import Worker, WorkerStatus

LIMIT_S = 60.0
IN_A_COLLECTIVE = '  File "/site-packages/lockstep/pending_collective.py", line 55, in wait\n'
IN_A_CHECKPOINT = (
    '  File "/site-packages/torch/distributed/checkpoint/filesystem.py", line 9, in w\n'
)


def status(steps=2, phase=Phase.WAITING, stack=IN_A_COLLECTIVE):
    return WorkerStatus(steps, is_warm=True, phase=phase, line="", stack=stack)


def call(contract=Worker.train.contract, *, has_failed=False, values=(1,)):
    answers = {rank: SimpleNamespace(steps=2) for rank in values}
    return SimpleNamespace(contract=contract, has_failed=has_failed, values=answers)


def found(pending_call, *statuses):
    """The error after polls in which rank 0 had `statuses`, one every half of the limit."""
    ranks = DesertedRanks(LIMIT_S)
    errors = [
        ranks.find_error(pending_call, {0: each}, number * LIMIT_S / 2)
        for number, each in enumerate(statuses)
    ]
    return errors[-1]


def test_a_rank_that_waits_longer_than_the_limit_is_told_who_has_left():
    error = found(call(), *[status()] * 4)
    assert "rank 1 left train_epoch after step 2" in str(error)
    assert "rank 0 waits in step 3" in str(error)
    assert found(call(), *[status()] * 3) is None


@pytest.mark.parametrize(
    ("pending_call", "last"),
    [
        (call(), [status(steps=3)]),  # it has made a step meanwhile
        (call(), [status(phase=Phase.FORWARD), status()]),
        (call(), [status(stack=IN_A_CHECKPOINT)]),
        (call(), [None]),  # it does not answer: others look after that
        (call(values=()), [status()]),
        (call(has_failed=True), [status()]),
        (call(Worker.update_scheduler.contract), [status()]),
    ],
)
def test_others_are_not(pending_call, last):
    assert found(pending_call, *[status()] * 4, *last) is None

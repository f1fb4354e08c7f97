# SPDX-License-Identifier: Apache-2.0
"""A load that is refused is undone also where the workers form their group anew before the undo.

Workers are threads over real gloo.
"""

import pytest
import torch

from lockstep.errors import TrainerClosedError
from ranks.table_operators import Plain
from ranks.test_waiting_gradients import on_workers, train, weights


def test_replicas_go_back_after_they_have_left_their_group():
    def body(worker):
        earlier = worker.state_dict()
        train(worker, 2)
        before = weights(worker.state_dict())
        worker.hold_state()
        worker.apply_state(earlier)
        applied = weights(worker.state_dict())
        worker.leave()
        worker.settle_state(keep=False)
        return before, applied, weights(worker.state_dict())

    for before, applied, found in on_workers(Plain, 2, body):
        assert not torch.equal(applied, before)
        assert torch.equal(found, before)


def test_one_that_holds_no_state_from_before_says_that_it_cannot_go_back():
    def body(worker):
        worker.apply_state(worker.state_dict())  # as one that has joined since `hold_state`
        with pytest.raises(TrainerClosedError, match="the one from before is lost"):
            worker.settle_state(keep=False)

    on_workers(Plain, 2, body)

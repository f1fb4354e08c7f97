# SPDX-License-Identifier: Apache-2.0
"""Under ``sync="fsdp"`` a call fails on one worker while another one still performs it."""

import os
import threading
import time

import pytest
import torch
from tests.ray.surviving_in_shards import InShards, trainer_of

from lockstep.engine import pending_call
from lockstep.errors import TrainerClosedError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(120),
    pytest.mark.usefixtures("workers_end_with_their_trainer"),
]


def wait_for(path):
    while not os.path.exists(path):
        threading.Event().wait(0.01)


def test_an_error_that_comes_while_another_worker_is_still_busy_is_raised_as_itself(tmp_path):
    """No worker waits for the busy one: what it does may never end."""

    def fail(operator):
        if operator.world_rank == 1:
            raise KeyError("no such layer")
        wait_for(tmp_path / "never")

    with trainer_of(num_workers=2) as trainer:
        trainer.train(num_steps=2)
        began = time.monotonic()
        with pytest.raises(KeyError, match="no such layer"):
            trainer.apply_all_operators(fail)
        # Far below the timeout of a collective, 30 minutes.
        assert time.monotonic() - began < 60
        with pytest.raises(TrainerClosedError):
            trainer.train(num_steps=1)


class Loads(torch.optim.AdamW):
    """Cannot load a state on rank 0; rank 1 is slow to load it."""

    rank, release = None, None

    def load_state_dict(self, state_dict):
        if self.rank == 0:
            self.rank = None  # the state from before is loaded again
            raise ValueError("this state is not loaded")
        if self.rank == 1:
            wait_for(self.release)
        super().load_state_dict(state_dict)


class LoadsDifferently(InShards):
    def setup(self, config):
        super().setup(config)
        self.optimizer.__class__ = Loads


class WithOwnState(LoadsDifferently):
    """Its own state holds shards, which all workers gather."""

    def state_dict(self):
        return {"first": next(self.model.parameters())}

    def load_state_dict(self, state):
        assert state["first"].shape == next(self.model.parameters()).shape


@pytest.mark.parametrize("operator_cls", [LoadsDifferently, WithOwnState])
def test_after_a_load_that_one_worker_refuses_long_before_another_one_is_done_nothing_has_changed(
    operator_cls, tmp_path, monkeypatch
):
    release = str(tmp_path / "release")
    wait = pending_call.PendingCall.wait

    def wait_and_release(self, poll):
        wait(self, poll)
        if self.contract.name == "apply_state":
            open(release, "a").close()

    def set_rank(operator):
        operator.optimizer.rank, operator.optimizer.release = operator.world_rank, release

    def reset(operator):
        operator.optimizer.rank = None

    with trainer_of(operator_cls, num_workers=2) as trainer:
        trainer.train(num_steps=2)
        state = trainer.state_dict()
        trainer.train(num_steps=2)
        expected = trainer.state_dict()
        trainer.apply_all_operators(set_rank)
        with monkeypatch.context() as patch, pytest.raises(ValueError, match="not loaded"):
            patch.setattr(pending_call.PendingCall, "wait", wait_and_release)
            trainer.load_state_dict(state)
        trainer.apply_all_operators(reset)
        found = trainer.state_dict()
    for key in ("global_step", "position"):
        assert found[key] == expected[key]
    for one, other in zip(found["models"], expected["models"], strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)

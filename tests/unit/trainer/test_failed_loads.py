# SPDX-License-Identifier: Apache-2.0
"""`lockstep.trainer.state_transfer`: what follows a load that fails on one of several workers.

The only worker here stands for that one.
"""

import pytest
import torch
from tests.unit.trainer.programs import trainer, weights

from lockstep.errors import TrainerClosedError
from lockstep.trainer.worker_calls import WorkerCalls


class OneFails(Exception):
    """Of one of several workers."""


@pytest.mark.parametrize(("name", "keep"), [("hold_state", True), ("apply_state", False)])
def test_after_a_load_that_fails_no_worker_holds_a_copy(name, keep, monkeypatch):
    call, settled = WorkerCalls.call, []

    def one_fails(calls, remote, **arguments):
        results = call(calls, remote, **arguments)
        if remote.contract.name == name:
            raise OneFails
        settled.extend([remote.kwargs] * (remote.contract.name == "settle_state"))
        return results

    with trainer() as one:
        earlier = one.state_dict()
        one.train(num_steps=2)
        expected = weights(one.get_model())
        with monkeypatch.context() as patched, pytest.raises(OneFails):
            patched.setattr(WorkerCalls, "call", one_fails)
            one.load_state_dict(earlier)
        assert settled == [{"keep": keep}]
        assert torch.equal(weights(one.get_model()), expected)


def test_a_worker_that_cannot_go_back_to_the_state_from_before_ends_the_run(monkeypatch):
    call = WorkerCalls.call

    def one_fails(calls, remote, **arguments):
        if remote.contract.name == "hold_state":
            return [None]  # as of a worker that has joined since
        results = call(calls, remote, **arguments)
        if remote.contract.name == "apply_state":
            raise OneFails
        return results

    with trainer() as one:
        state = one.state_dict()
        with monkeypatch.context() as patched:
            patched.setattr(WorkerCalls, "call", one_fails)
            with pytest.raises(TrainerClosedError, match="the one from before is lost") as caught:
                one.load_state_dict(state)
        assert isinstance(caught.value.__context__, OneFails)
        with pytest.raises(TrainerClosedError):
            one.train(num_steps=1)

# SPDX-License-Identifier: Apache-2.0
"""`lockstep.engine.worker_actor`, in this process: every answer is an outcome, whatever failed."""

import cloudpickle
import pytest

from lockstep.engine import worker_actor
from lockstep.errors import WorkerFailedError
from lockstep.worker import Worker


@pytest.fixture
def actor(monkeypatch):
    monkeypatch.setattr(worker_actor, "set_up_actor_process", lambda _: None)
    return worker_actor.WorkerActor(3)


def test_a_method_that_cannot_be_read_is_a_failure_of_its_rank(actor):
    failure = actor.perform(b"no method", b"", 1).exception()
    assert type(failure).__name__ == "UnpicklingError"
    assert "raised on rank 3" in failure.__notes__[-1]


def test_an_outcome_that_is_gone_is_a_failure_that_says_so(actor):
    sent = cloudpickle.dumps(Worker.ping), b"no arguments"
    actor.perform_for_relay(*sent, 1)
    assert not isinstance(actor.perform(*sent, 1).exception(), WorkerFailedError)
    failure = actor.perform(*sent, 1).exception()
    assert isinstance(failure, WorkerFailedError)
    assert "was performed" in str(failure)
    assert "rank 3" in str(failure)

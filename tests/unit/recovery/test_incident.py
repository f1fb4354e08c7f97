# SPDX-License-Identifier: Apache-2.0
"""The line about a recovery: what ended the worker, in a form that can be read."""

import pytest
from ray.core.generated.common_pb2 import ActorDiedErrorContext
from ray.exceptions import ActorDiedError, RayActorError

from lockstep.engine import parameter_server_actor
from lockstep.engine.ray_errors import death_reason
from lockstep.recovery.incident import Incident

DETAIL = "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR"
ADVICE = " Some common causes include: (1) the process was killed by the OOM killer, (2) others."


def died(message):
    """As Ray tells of it: an introduction, the actor's ids, and then the reason."""
    return ActorDiedError(
        ActorDiedErrorContext(
            class_name="WorkerActor", actor_id=b"\1" * 16, pid=7, error_message=message
        )
    )


@pytest.mark.parametrize(
    ("death", "reason"),
    [
        (died(DETAIL + ADVICE), DETAIL),
        (died("The node ran low on memory."), "The node ran low on memory."),
        (died(""), "The actor died unexpectedly before finishing this task."),
        (RayActorError(error_msg="The actor is gone."), "The actor is gone."),
    ],
)
def test_the_reason_is_told_without_ids_and_advice(death, reason):
    assert death_reason(death) == reason


def test_the_end_of_a_parameter_server_says_why():
    assert DETAIL in str(parameter_server_actor._death_error(died(DETAIL + ADVICE)))


@pytest.mark.parametrize(("workers", "said"), [(1, "has 1 worker;"), (2, "has 2 workers;")])
def test_the_line_counts_as_one_does(workers, said):
    incident = Incident(
        at=0.0,
        lost=("worker 1, rank 1",),
        why="killed",
        during="train",
        step=40,
        replayed=1,
        seconds=0.02,
        generation=1,
        workers=workers,
        same_bits=True,
    )
    assert said in str(incident)

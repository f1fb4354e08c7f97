# SPDX-License-Identifier: Apache-2.0
"""What the driver names, and what crosses processes of it."""

from __future__ import annotations

import pickle
from dataclasses import replace

import cloudpickle
import pytest

from lockstep.worker import (
    Communication,
    LoopProgress,
    LoopRequest,
    OnFailure,
    RemoteMethod,
    Worker,
    join,
    leave_broken_group,
    predict,
    run_counts,
    verify,
)

REQUEST = LoopRequest("train", 3, False, {})


@pytest.mark.parametrize(
    "method",
    [
        Worker.train,
        Worker.state_dict,
        Worker.stop,
        join,
        leave_broken_group,
        verify,
        predict,
        run_counts,
    ],
)
def test_a_remote_method_travels_as_a_reference(method: RemoteMethod) -> None:
    """Its code is not pickled: what arrives is the other process's own function."""
    data = cloudpickle.dumps(method)
    assert pickle.loads(data) is method
    assert len(data) < 200


def test_a_call_goes_to_the_function_with_its_arguments() -> None:
    class Counted:
        epochs_entered = 3
        epochs_finished = 2

    class Operator:
        class _lockstep:
            committed = 7

    worker = Counted()
    worker.operator = Operator()  # type: ignore[attr-defined]
    assert run_counts.with_args().perform(worker) == (3, 2, 7)
    with pytest.raises(TypeError):
        run_counts.with_args("one too many").perform(worker)


def test_a_method_is_bound_to_its_worker_as_any_other() -> None:
    worker = Worker.__new__(Worker)
    assert worker.train.__self__ is worker
    assert Worker.train.__name__ == "train"
    assert "committed" in (Worker.train.__doc__ or "")


def test_a_loop_resumes_with_the_progress_of_all() -> None:
    call = Worker.train.with_args(REQUEST)
    progress = LoopProgress(epoch=1, step=2, steps=3, pass_began=0, is_over=False)
    resumed = call.resume_at(progress)
    assert resumed.args == (replace(REQUEST, interrupted_at=progress),)
    assert (resumed.purpose, resumed.is_training) == ("train", True)
    assert call.args == (REQUEST,)
    assert predict.with_args([1]).purpose is None


def test_what_may_be_interrupted_and_what_may_be_repeated() -> None:
    assert Worker.train.contract.communication is Communication.RUN_GROUP
    assert Worker.train.contract.may_be_interrupted
    writes = Worker.apply_state.contract
    assert writes.on_failure is OnFailure.REPEAT_WRITE
    assert (writes.may_be_repeated, writes.may_be_interrupted) == (True, False)
    assert not Worker.call.contract.may_be_repeated

# SPDX-License-Identifier: Apache-2.0
"""The log of a run holds the calls that were made, and none that was refused.

`lockstep.trainer.worker_calls`.
"""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.unit.trainer.programs import Regression, trainer

from lockstep.errors import ConfigurationError, TrainerClosedError, WrongUseError


def changes_in(folder):
    lines = map(json.loads, (folder / "run.jsonl").read_text().splitlines())
    return [line["by"] for line in lines if "changed" in line]


def test_calls_that_change_the_run_are_in_its_log(tmp_path):
    with trainer(checkpoint_dir=tmp_path) as one:
        one.train(num_steps=2)
        one.apply_all_operators(lambda operator: None)
        one.train(num_steps=1)
        assert changes_in(tmp_path) == ["apply_all_operators"]


class CallsItself(Regression):
    """Within its step, while `train` runs."""

    def compute_loss(self, batch, batch_info):
        with pytest.raises(WrongUseError):
            self.config["trainer"][0].apply_all_operators(lambda operator: None)
        return super().compute_loss(batch, batch_info)


def test_a_short_call_of_another_thread_is_waited_for():
    inside, leave = threading.Event(), threading.Event()

    def stay(operator):
        inside.set()
        return leave.wait(30)

    with trainer() as one, ThreadPoolExecutor() as pool:
        polled = pool.submit(one.apply_all_operators, stay)
        assert inside.wait(30)
        threading.Timer(0.1, leave.set).start()
        assert one.train(num_steps=1)["batch_count"] == 1
        assert polled.result(30) == [True]


def test_calls_that_were_refused_are_not_in_the_log(tmp_path):
    held = []
    with trainer(CallsItself, config={"trainer": held}, checkpoint_dir=tmp_path) as one:
        held.append(one)
        one.train(num_steps=2)
        with pytest.raises(ConfigurationError, match="no scheduler"):
            one.update_scheduler(0.5)
        one.train(num_steps=1)
    with pytest.raises(TrainerClosedError):
        one.update_scheduler(0.5)
    with pytest.raises(TrainerClosedError):
        one.apply_all_operators(lambda operator: None)
    assert changes_in(tmp_path) == []

# SPDX-License-Identifier: Apache-2.0
"""What callbacks hear of a call while it runs."""

import time

import pytest
from tests.unit.trainer.programs import BATCH, Regression, trainer

from lockstep import Callback
from lockstep.errors import LockstepError
from lockstep.trainer import progress_listeners


class Slow(Regression):
    def compute_loss(self, batch, batch_info):
        time.sleep(0.11)  # news of a worker in this process come every tenth of a second
        return super().compute_loss(batch, batch_info)


class Listener(Callback):
    def __init__(self):
        self.heard = []

    def on_progress(self, trainer, progress):
        self.heard.append(progress)


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr(progress_listeners, "_TELL_EVERY_S", 0.0)


@pytest.mark.usefixtures("at_once")
def test_a_call_begins_and_goes_on():
    listener = Listener()
    with trainer(Slow, callbacks=[listener]) as one:
        one.train(num_steps=3)
        one.validate(num_steps=1)
    assert [each["phase"] for each in listener.heard] == ["train"] * 4 + ["validation"] * 2
    assert [each["steps"] for each in listener.heard] == [0, 1, 2, 3, 0, 1]
    assert [each["samples"] for each in listener.heard[:4]] == [0, BATCH, 2 * BATCH, 3 * BATCH]
    assert [each["loss"] is None for each in listener.heard] == [True, *[False] * 3, True, False]
    times = [each["seconds"] for each in listener.heard[:4]]
    assert times == sorted(times)
    assert times[3] > 0.3


def test_a_short_call_only_begins(monkeypatch):
    assert progress_listeners._TELL_EVERY_S == 1.0
    monkeypatch.setattr(progress_listeners, "_TELL_EVERY_S", 3600.0)  # however slow the machine is
    listener = Listener()
    with trainer(callbacks=[listener]) as one:
        one.train()
    assert [each["steps"] for each in listener.heard] == [0]


class Fails(Listener):
    def on_progress(self, trainer, progress):
        super().on_progress(trainer, progress)
        if progress["steps"]:
            trainer.status()  # while the workers train


@pytest.mark.usefixtures("at_once")
def test_what_it_raises_comes_after_the_call_and_leaves_the_trainer_usable():
    listener = Fails()
    with trainer(Slow, callbacks=[listener]) as one:
        with pytest.raises(LockstepError, match="was called while another call"):
            one.train(num_steps=3)
        assert one.status()["step"] == 3
        assert len(listener.heard) == 2

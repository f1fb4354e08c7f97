# SPDX-License-Identifier: Apache-2.0
"""Which rows a driver may take while workers train: those of steps that all of them have."""

from types import SimpleNamespace

import pytest
import torch
from tests.unit.trainer.programs import Regression, trainer

from lockstep import Callback
from lockstep.metrics.step_log import StepLog
from lockstep.trainer.callback_list import CallbackList
from lockstep.trainer.step_metrics import StepMetrics
from lockstep.worker import rows_after


class Losses(Callback):
    every = 1

    def __init__(self):
        self.told = []

    def on_step(self, trainer, step, metrics):
        self.told.append((step, metrics["train_loss"]))


class Training:
    """A worker that logs its steps, as `rows_after` sees it from the thread of the driver."""

    def __init__(self, loss, hash_weights=None):
        self.loss = loss
        self.is_built = True
        self.state = SimpleNamespace(committed=0, step_log=StepLog(1, hash_weights))
        self.operator = SimpleNamespace(_lockstep=self.state)

    def train(self, *, is_settled=True):
        log = self.state.step_log
        log.add({"train_loss": self.loss}, 1, {})
        self.state.committed += 1
        place = 0, self.state.committed - 1
        log.commit(self.state.committed, 1, place, is_settled=is_settled)


@pytest.fixture
def losses():
    return Losses()


@pytest.fixture
def driver(losses):
    return StepMetrics(CallbackList([losses], trainer=None))


def test_steps_of_an_open_window_wait_for_the_worker_that_has_not_closed_it(driver, losses):
    early, late = Training(1.0), Training(3.0)
    for _ in range(3):
        early.train(is_settled=False)
        late.train(is_settled=False)
    early.train()
    driver.take_live_rows([rows_after(each, driver.written) for each in (early, late)])
    late.train()
    driver.take_live_rows([rows_after(each, driver.written) for each in (early, late)])
    assert losses.told == [(1, 2.0), (2, 2.0), (3, 2.0), (4, 2.0)]


def test_a_driver_that_asks_while_weights_are_hashed_gets_the_step_later(driver, losses):
    asks = []

    def hash_weights(step):
        asks.append(step)
        driver.take_live_rows([rows_after(each, driver.written) for each in (fast, slow)])
        return []

    fast, slow = Training(1.0), Training(3.0, hash_weights)
    for _ in range(3):
        fast.train()
        slow.train()
    driver.take_live_rows([rows_after(each, driver.written) for each in (fast, slow)])
    assert asks == [1, 2, 3]
    assert losses.told == [(1, 2.0), (2, 2.0), (3, 2.0)]


def test_a_metric_is_read_when_it_is_reported():
    """The program goes on writing to its tensor while the window of its step is open."""
    log, running = StepLog(1), torch.zeros(())
    for step in (1, 2, 3):
        log.add({"running": running.add_(1.0)}, 1, {})
        log.commit(step, 1, (0, step - 1), is_settled=step == 3)
    _, rows = log.rows_after(0)
    assert [row.sums["sums"]["running"].total for row in rows] == [1.0, 2.0, 3.0]


class FailsOnce(Regression):
    """An epoch's loop of one's own, whose call is undone as a whole."""

    failed = False

    def train_epoch(self, iterator, info):
        return super().train_epoch(iterator, info)

    def compute_loss(self, batch, batch_info):
        if self.global_step == self.config.get("fails_at") and not self.failed:
            self.failed = True
            raise ZeroDivisionError
        return super().compute_loss(batch, batch_info)


class OnStep(Callback):
    def __init__(self, every):
        self.every, self.told = every, []

    def on_step(self, trainer, step, metrics):
        self.told.append((step, metrics["batch_count"], metrics["train_loss"]))


@pytest.mark.parametrize("fails_at", [3, 5])
@pytest.mark.parametrize(("accumulate", "before"), [(1, 2), (2, 2), (2, 3)])
def test_steps_before_a_call_that_is_undone_stay_in_their_row(fails_at, accumulate, before):
    """The call is undone before its row is complete, or after; and within an open window."""
    found = []
    for config in ({}, {"fails_at": fails_at}):
        told = OnStep(4)
        arguments = {"accumulate": accumulate, "callbacks": [told], "config": config}
        with trainer(FailsOnce, **arguments) as one:
            one.train(num_steps=before)
            if config:
                with pytest.raises(ZeroDivisionError):
                    one.train(num_steps=6)
            one.train(num_steps=6)
        found.append(told.told)
    assert [step[:2] for step in found[0]] == [(4, 4), (8, 4)]
    assert found[0] == found[1]

# SPDX-License-Identifier: Apache-2.0
"""Metrics of single steps: which steps callbacks are told of, with what, and that it is once."""

import csv
import logging
import time

import pytest
from tests.unit.trainer.programs import BATCH, Regression, linear, problem, sgd, trainer
from torch import nn

from lockstep import Callback
from lockstep.errors import ConfigurationError
from lockstep.integrations.loggers import CSVLogger


class Steps(Callback):
    def __init__(self, every=1):
        self.every = every
        self.told = []

    def on_step(self, trainer, step, metrics):
        self.told.append((step, metrics))

    @property
    def steps(self):
        return [step for step, _ in self.told]


def losses(num_steps):
    """Loss and size of each batch, by plain autograd."""
    features, targets = problem()
    model = linear()
    optimizer = sgd(model)
    found = []
    for step in range(num_steps):
        rows = slice((step % 4) * BATCH, (step % 4 + 1) * BATCH)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(features[rows]), targets[rows])
        loss.backward()
        optimizer.step()
        found.append((loss.item(), len(features[rows])))
    return found


def mean(pairs):
    return sum(loss * n for loss, n in pairs) / sum(n for _, n in pairs)


def test_steps_are_told_of_with_the_means_over_their_samples():
    one, two, three = Steps(1), Steps(2), Steps(3)
    with trainer(callbacks=[one, two, three]) as run:
        run.train()
        run.train(num_steps=1)
        run.train(num_steps=2)
    expected = losses(7)
    assert one.steps == [1, 2, 3, 4, 5, 6, 7]
    assert two.steps == [2, 4, 6]
    # A row goes on from one call to the next.
    assert three.steps == [3, 6]
    for callback in (one, two, three):
        for step, metrics in callback.told:
            part = expected[step - callback.every : step]
            assert metrics["train_loss"] == pytest.approx(mean(part), rel=1e-12)
            assert metrics["num_samples"] == sum(n for _, n in part)
            assert metrics["batch_count"] == callback.every
            assert not any(name.startswith("last_") for name in metrics)
    assert [metrics["epoch"] for _, metrics in one.told] == [1, 1, 1, 1, 2, 2, 2]


def test_callbacks_hear_of_steps_while_the_call_runs():
    heard = []

    class Slow(Regression):
        def compute_loss(self, batch, batch_info):
            # The next step begins when somebody has heard of the first one.
            if batch_info["global_step"] == 2:
                heard.extend(steps.steps)
            return super().compute_loss(batch, batch_info)

        def after_step(self):
            began = time.monotonic()
            while not heard and time.monotonic() - began < 0.11:
                pass  # a tenth lies between two looks

    steps = Steps(1)
    with trainer(Slow, callbacks=[steps]) as run:
        run.train()
    assert heard[:1] == [1]
    assert steps.steps == [1, 2, 3, 4]


def test_a_run_that_goes_on_logs_the_same_steps_and_none_twice(tmp_path):
    first, second = Steps(2), Steps(2)
    with trainer(callbacks=[first]) as run:
        run.train(num_steps=4)
        path = run.save(tmp_path / "state")
        run.train(num_steps=2)
        run.load(path)  # what comes now has not happened in this run
        run.train(num_steps=2)
    with trainer(callbacks=[second]) as run:
        run.load(path)
        run.train(num_steps=4)
    assert first.steps == [2, 4, 6, 6]
    assert second.steps == [6, 8]
    assert second.told[0][1] == first.told[-1][1] == first.told[-2][1]


def test_batches_of_a_window_are_steps_of_their_own():
    steps = Steps(1)
    with trainer(callbacks=[steps], accumulate=3) as run:
        run.train(num_steps=2)
        run.train(num_steps=3)
        told = list(steps.steps)
        run.train(num_steps=2)
    assert told == [1, 2, 3, 4]  # the fifth is in a window that is open, and may be taken back
    assert steps.steps == [1, 2, 3, 4, 5, 6, 7]


class TellsNothing(Regression):
    def train_epoch(self, iterator, info):
        for batch in iterator:
            self.optimizer.zero_grad()
            self.compute_loss(batch, info).backward()
            self.optimizer.step()
        return {"train_loss": 1.0}


def test_a_loop_that_tells_of_no_step_is_named(caplog):
    steps = Steps(1)
    with caplog.at_level(logging.WARNING), trainer(TellsNothing, callbacks=[steps]) as run:
        run.train()
    assert steps.told == []
    assert "super().train_epoch(iterator, info)" in caplog.text


def test_loggers_write_rows_of_steps(tmp_path):
    path = tmp_path / "run.csv"
    with trainer(callbacks=[CSVLogger(path, every=2)]) as run:
        result = run.train()
        run.validate()
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["phase"], row["step"], row["epoch"]) for row in rows] == [
        ("step", "2", "1"),
        ("step", "4", "1"),
        ("train", "4", "1"),
        ("validation", "4", "1"),
    ]
    expected = losses(4)
    assert float(rows[0]["train_loss"]) == pytest.approx(mean(expected[:2]), rel=1e-12)
    assert float(rows[2]["train_loss"]) == result["train_loss"]


@pytest.mark.parametrize("every", [0, -1, 1.5, "10"])
def test_a_number_of_steps_that_cannot_be_is_refused(every):
    with pytest.raises(ConfigurationError, match="every"):
        CSVLogger("never.csv", every=every)


def test_the_steps_of_a_call_that_fails_are_told_of_by_the_next_one():
    class FailsOnce(Regression):
        def compute_loss(self, batch, batch_info):
            if batch_info["global_step"] == 6 and not self.config["failed"]:
                self.config["failed"].append(True)
                raise RuntimeError("no such luck")
            return super().compute_loss(batch, batch_info)

    one, two = Steps(1), Steps(2)
    with trainer(FailsOnce, callbacks=[one, two], config={"failed": []}) as run:
        run.train()
        with pytest.raises(RuntimeError, match="no such luck"):
            run.train()
        run.train(num_steps=3)
        run.train(num_steps=1)
    expected = losses(10)
    assert one.steps == [*range(1, 11)]
    assert two.steps == [2, 4, 6, 8, 10]
    for (_, metrics), pair in zip(one.told, expected, strict=True):
        assert metrics["train_loss"] == pytest.approx(pair[0], rel=1e-12)


def test_an_error_of_on_step_reaches_the_caller_and_the_workers_live():
    class Fails(Steps):
        def on_step(self, trainer, step, metrics):
            raise KeyError(step)

    with trainer(callbacks=[Fails()]) as run:
        with pytest.raises(KeyError):
            run.train()
        assert run.status()["step"] == 4

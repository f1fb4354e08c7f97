# SPDX-License-Identifier: Apache-2.0
"""Metrics of single steps from several workers, and through a death and a new program."""

import os
import time

import pytest
import torch
from tests.ray.operators import GLOBAL_BATCH, DefaultLoop, net, problem, sgd
from tests.ray.surviving import Classifier, trainer_of
from torch import nn

from lockstep import Callback, TorchTrainer
from lockstep.keys import BATCH_SIZE
from lockstep.testing import Strike

pytestmark = pytest.mark.timeout(240)


class Steps(Callback):
    def __init__(self, every):
        self.every = every
        self.told = []

    def on_step(self, trainer, step, metrics):
        self.told.append((step, metrics))

    @property
    def steps(self):
        return [step for step, _ in self.told]


def losses(num_steps):
    features, targets = problem()
    model = net()
    optimizer = sgd(model)
    starts = range(0, len(features), GLOBAL_BATCH)
    found = []
    for step in range(num_steps):
        rows = slice(starts[step % len(starts)], starts[step % len(starts)] + GLOBAL_BATCH)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(features[rows]), targets[rows])
        loss.backward()
        optimizer.step()
        found.append((loss.item(), len(features[rows])))
    return found


def test_rows_hold_the_samples_of_all_workers():
    single, double = Steps(1), Steps(2)
    with TorchTrainer(
        training_operator_cls=DefaultLoop,
        num_workers=2,
        config={BATCH_SIZE: GLOBAL_BATCH},
        callbacks=[single, double],
    ) as two:
        two.train()
        two.train(num_steps=3)
    expected = losses(7)
    assert single.steps == [1, 2, 3, 4, 5, 6, 7]
    assert double.steps == [2, 4, 6]
    for callback in (single, double):
        for step, metrics in callback.told:
            part = expected[step - callback.every : step]
            samples = sum(n for _, n in part)
            mean = sum(loss * n for loss, n in part) / samples
            assert metrics["num_samples"] == samples
            assert metrics["train_loss"] == pytest.approx(mean, rel=1e-12)


class Waits(DefaultLoop):
    """Its third step begins when the driver has told of the first."""

    def compute_loss(self, batch, batch_info):
        deadline = time.monotonic() + 60
        while batch_info["global_step"] == 2 and not os.path.exists(self.config["heard"]):
            assert time.monotonic() < deadline, "nobody heard of the first step"
        return super().compute_loss(batch, batch_info)


def test_steps_are_told_of_while_the_call_runs(tmp_path):
    heard = tmp_path / "heard"

    class Hears(Steps):
        def on_step(self, trainer, step, metrics):
            super().on_step(trainer, step, metrics)
            heard.touch()

    steps = Hears(1)
    with TorchTrainer(
        training_operator_cls=Waits,
        num_workers=2,
        config={BATCH_SIZE: GLOBAL_BATCH, "heard": str(heard)},
        callbacks=[steps],
    ) as two:
        two.train()
    assert steps.steps == [1, 2, 3, 4]
    assert [metrics["num_samples"] for _, metrics in steps.told] == [12, 12, 12, 1]


@pytest.mark.slow
def test_a_death_changes_no_step_and_doubles_none():
    strikes = [Strike("kill", rank=1, step=5, phase="backward")]
    arguments = {"num_shards": 4, "reproducible": True}
    expected, steps = Steps(2), Steps(2)
    with trainer_of(Classifier, callbacks=[expected], num_workers=1, **arguments) as run:
        run.train()
        run.train(num_steps=4)
    with trainer_of(Classifier, strikes, callbacks=[steps], **arguments) as run:
        run.train()
        run.train(num_steps=4)
        assert len(run.status()["recoveries"]) == 1
    assert steps.steps == expected.steps == [2, 4, 6, 8, 10]
    # After the death there is one worker left, with every sample.
    for (_, got), (_, wanted) in zip(steps.told[3:], expected.told[3:], strict=True):
        assert got["num_samples"] == wanted["num_samples"]
        assert torch.isclose(
            torch.tensor(got["train_loss"]), torch.tensor(wanted["train_loss"]), rtol=1e-6
        )

# SPDX-License-Identifier: Apache-2.0
"""When registered schedulers step: every one of them, assigned to an attribute or not."""

import pytest
import torch
from tests.unit.trainer.programs import linear, loader, sgd, trainer
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from lockstep import TrainingOperator
from lockstep.errors import ConfigurationError


def scheduled(make):
    class Scheduled(TrainingOperator):
        def setup(self, config):
            model = linear()
            self.optimizer = sgd(model)
            back = self.register(
                models=model,
                optimizers=self.optimizer,
                criterion=nn.MSELoss(),
                schedulers=make(self.optimizer),
            )
            assert len(back) == 4
            self.register_data(train_loader=loader(), validation_loader=loader())

    return Scheduled


def halves(optimizer):
    return StepLR(optimizer, 1, gamma=0.5)


def learning_rate(one):
    return one.get_local_operator().optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize(
    ("freq", "expected"), [("epoch", 0.1 * 0.5**2), ("batch", 0.1 * 0.5**8), ("manual", 0.1)]
)
def test_when_a_scheduler_steps(freq, expected):
    with trainer(scheduled(halves), scheduler_step_freq=freq) as one:
        one.train()
        one.train()
        one.validate()
        assert learning_rate(one) == pytest.approx(expected, rel=1e-12)


def test_a_list_of_schedulers_steps_as_a_whole():
    operator = scheduled(lambda optimizer: [halves(optimizer), halves(optimizer)])
    with trainer(operator, scheduler_step_freq="epoch") as one:
        one.train()
        assert learning_rate(one) == pytest.approx(0.1 * 0.5**2)


def test_update_scheduler_gives_the_metric_to_those_that_take_one():
    def both(optimizer):
        return [ReduceLROnPlateau(optimizer, patience=0, factor=0.1), halves(optimizer)]

    with trainer(scheduled(both), scheduler_step_freq="manual") as one:
        one.train()
        one.update_scheduler(1.0)
        assert learning_rate(one) == pytest.approx(0.05)
        one.update_scheduler(torch.tensor(2.0))
        assert learning_rate(one) == pytest.approx(0.05 * 0.1 * 0.5)
        one.update_scheduler(metric=0.5)
        assert learning_rate(one) == pytest.approx(0.05 * 0.1 * 0.5 * 0.5)


def test_update_scheduler_without_a_scheduler_says_what_to_register():
    with trainer() as one:
        with pytest.raises(ConfigurationError, match=r"schedulers=..."):
            one.update_scheduler(1.0)
        assert one.train()["batch_count"] == 4

# SPDX-License-Identifier: Apache-2.0
"""`lockstep.sync.ddp_sync` with one worker: wrapped as with many, and the same result."""

import pytest
import torch
from tests.unit.trainer.programs import (
    Regression,
    by_hand,
    linear,
    loader,
    same,
    sgd,
    trainer,
    weights,
)
from torch import nn

from lockstep import TorchTrainer, TrainingOperator
from lockstep.errors import ConfigurationError

UNUSED = {"find_unused_parameters": True, "gradient_as_bucket_view": True}


class Learned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, output, target):
        return nn.functional.mse_loss(output * self.scale.exp(), target)


class WithCriterion(Regression):
    def setup(self, config):
        model, criterion = linear(), Learned()
        optimizer = torch.optim.SGD([*model.parameters(), *criterion.parameters()], lr=0.1)
        self.model, self.optimizer, self.criterion = self.register(
            models=[model], optimizers=(optimizer,), criterion=criterion, ddp_args=config
        )
        self.model, self.optimizer = self.model[0], self.optimizer[0]
        self.register_data(train_loader=loader())


def test_as_by_hand_and_on_from_its_file_under_another_sync(tmp_path):
    with trainer(sync="ddp") as one:
        one.train(num_steps=2)
        path = one.save(tmp_path / "state")
        one.train(num_steps=3)
        assert same(weights(one.get_model()), by_hand(5))
    with trainer(sync="replicate") as other:
        other.load(path)
        other.train(num_steps=3)
        assert same(weights(other.get_model()), by_hand(5))


def test_accumulation_and_clipping_as_under_replicate():
    results = []
    for sync in ("replicate", "ddp"):
        with trainer(sync=sync, num_shards=2, accumulate=3, clip_grad_norm=0.1) as run:
            run.train()
            results.append(weights(run.get_model()))
    assert same(*results)


@pytest.mark.parametrize("ddp_args", [{}, {"gradient_as_bucket_view": True}, UNUSED])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_criterion_that_learns(ddp_args, accumulate):
    states = []
    for sync in ("replicate", "ddp"):
        with TorchTrainer(
            training_operator_cls=WithCriterion,
            config=ddp_args if sync == "ddp" else {},
            sync=sync,
            num_shards=2,
            accumulate=accumulate,
        ) as run:
            run.train()
            states.append(run.state_dict())
            names = [list(state) for state in run.state_dict()["models"]]
    assert list(states[1]["criterion"]) == ["scale"]
    assert same(states[0]["criterion"]["scale"], states[1]["criterion"]["scale"])
    assert names == [["weight", "bias"]]


def test_the_very_model_that_was_handed_over():
    model = linear()
    operator = TrainingOperator.from_model(
        model, optimizer=sgd(model), criterion=nn.MSELoss(), train_loader=loader()
    )
    with TorchTrainer(training_operator_cls=operator, sync="ddp") as run:
        run.train(num_steps=3)
    assert same(weights(model), by_hand(3))


def test_what_cannot_be_is_refused_before_anything_starts():
    with pytest.raises(ConfigurationError, match="reproducible"):
        trainer(sync="ddp", reproducible=True)
    with pytest.raises(ConfigurationError, match="ddp_args"):
        trainer(WithCriterion, config={"gradient_as_bucket_view": True})

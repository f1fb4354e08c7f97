# SPDX-License-Identifier: Apache-2.0
"""``TorchTrainer(sync="ddp")``: torch's DDP on real workers, and one process as its measure."""

import pytest
import torch
from tests.ray.operators import (
    GLOBAL_BATCH,
    STEPS,
    DefaultLoop,
    farthest,
    net,
    one_process,
    problem,
    sgd,
)
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import TorchTrainer, TrainingOperator
from lockstep.errors import GradientNotReducedError
from lockstep.keys import BATCH_SIZE


class OwnStep(DefaultLoop):
    def train_batch(self, batch, batch_info):
        features, targets = batch
        self.optimizer.zero_grad()
        loss = self.criterion(self.model(features), targets)
        loss.backward()
        self.optimizer.step()
        return {"train_loss": loss.item()}


class AroundTheWrapper(OwnStep):
    def setup(self, config):
        super().setup(config)
        if self.world_rank == 1:
            self.model = self.model.module


def trainer(operator, **arguments):
    return TorchTrainer(
        training_operator_cls=operator,
        config={BATCH_SIZE: GLOBAL_BATCH},
        sync="ddp",
        **arguments,
    )


@pytest.mark.parametrize(("operator", "workers"), [(DefaultLoop, 3), (OwnStep, 2)])
@pytest.mark.slow
def test_the_weights_of_one_process(operator, workers):
    # 37 samples in batches of 12: the last batch of an epoch has one sample, for rank 0.
    with trainer(operator, num_workers=workers) as run:
        run.train(num_steps=STEPS)
        trained = run.get_model()
        state = run.state_dict()
        assert run.validate()["num_samples"] == 37
    assert farthest(trained, one_process()) < 1e-12
    # Neither the model nor the checkpoint shows the wrapper.
    assert type(trained) is type(net())
    assert list(state["models"][0]) == list(net().state_dict())


def test_a_way_around_the_wrapper_ends_every_worker():
    with (
        trainer(AroundTheWrapper, num_workers=2) as run,
        pytest.raises(GradientNotReducedError, match="LS101"),
    ):
        run.train(num_steps=1)


@pytest.mark.slow
def test_a_model_handed_over_holds_the_trained_weights_with_rank_0_here():
    model = net()
    loader = DataLoader(TensorDataset(*problem()), GLOBAL_BATCH // 2)
    operator = TrainingOperator.from_model(
        model, optimizer=sgd(model), criterion=nn.MSELoss(), train_loader=loader
    )
    with TorchTrainer(
        training_operator_cls=operator, num_workers=2, sync="ddp", use_local=True
    ) as run:
        run.train()
    whole = DataLoader(TensorDataset(*problem()), GLOBAL_BATCH)
    expected = net()
    optimizer = sgd(expected)
    for features, targets in whole:
        optimizer.zero_grad()
        nn.functional.mse_loss(expected(features), targets).backward()
        optimizer.step()
    assert farthest(model, expected) < 1e-12
    assert isinstance(model(problem()[0]), torch.Tensor)

# SPDX-License-Identifier: Apache-2.0
"""What differs between ranks is refused on all of them, at once: no drift and no hang."""

import pytest
import torch
from tests.ray.operators import DefaultLoop, net
from torch import nn

from lockstep import TorchTrainer
from lockstep.errors import GradientNotReducedError, ReplicasDifferError
from lockstep.keys import BATCH_SIZE


class OwnRate(DefaultLoop):
    def setup(self, config):
        model = net()
        self.register(
            models=model, optimizers=torch.optim.SGD(model.parameters(), lr=1 + self.world_rank)
        )


class LoadsLate(DefaultLoop):
    def setup(self, config):
        super().setup(config)
        if self.world_rank == 0:
            nn.init.zeros_(self.model.second.bias)


class OwnSchedule(DefaultLoop):
    """Not registered: the trainer takes it over after `setup`."""

    def setup(self, config):
        super().setup(config)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1 + self.world_rank)


def start(operator, sync="replicate", **config):
    return TorchTrainer(
        training_operator_cls=operator,
        num_workers=2,
        config={BATCH_SIZE: 12, **config},
        scheduler_step_freq="epoch",
        sync=sync,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("operator", "named"),
    [(OwnRate, "'lr': '2'"), (LoadsLate, "second.bias"), (OwnSchedule, "'step_size': '2'")],
)
def test_what_setup_makes(operator, named):
    with pytest.raises(ReplicasDifferError, match="rank 1 against rank 0") as caught:
        start(operator)
    assert named in str(caught.value)


class OutOfStep(DefaultLoop):
    """Rank 1 runs more or fewer backwards in the second step than rank 0."""

    def train_batch(self, batch, batch_info):
        features, targets = batch
        mine = self.world_rank == 1 and batch_info["global_step"] == 1
        self.optimizer.zero_grad()
        for _ in range(self.config["backwards"] if mine else 1):
            self.criterion(self.model(features), targets).backward()
            self.optimizer.step()
        return {}


def test_numbers_of_backwards():
    with (
        start(OutOfStep, backwards=0) as trainer,
        pytest.raises(GradientNotReducedError, match="left a step out"),
    ):
        trainer.train()


class LeavesStepOut(DefaultLoop):
    """Rank 1 runs the second backward, and does not step."""

    def train_batch(self, batch, batch_info):
        features, targets = batch
        self.optimizer.zero_grad()
        self.criterion(self.model(features), targets).backward()
        if self.world_rank == 0 or batch_info["global_step"] != 1:
            self.optimizer.step()
        return {}


@pytest.mark.parametrize(
    ("sync", "steps"),
    [
        ("replicate", 2),
        pytest.param("ddp", 2, marks=pytest.mark.slow),
        # Ranks meet in the step itself.
        pytest.param("parameter_server", 1, marks=pytest.mark.slow),
    ],
)
def test_a_step_that_one_rank_leaves_out(sync, steps):
    """The next round is refused: until then the replicas have been apart for one step only."""
    with start(LeavesStepOut, sync) as trainer:
        with pytest.raises(GradientNotReducedError):
            trainer.train()
        assert trainer.status()["step"] == steps

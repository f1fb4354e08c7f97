# SPDX-License-Identifier: Apache-2.0
"""A rank that leaves its loop before the others, which wait for it in their next collective."""

import pytest
import torch
from tests.ray.operators import SAMPLES, DefaultLoop, farthest, net, problem, sgd
from torch import nn

from lockstep import TorchTrainer
from lockstep.errors import DataOrderError
from lockstep.keys import BATCH_SIZE, NUM_SAMPLES

BATCH = 12


class LeavesAlone(DefaultLoop):
    leaves = True

    def train_epoch(self, iterator, info):
        for number, (features, targets) in enumerate(iterator, 1):
            self.optimizer.zero_grad()
            self.backward(self.criterion(self.model(features), targets))
            self.optimizer.step()
            if self.leaves and self.world_rank == 1 and number == 2:
                break
        return {}


def one_epoch():
    features, targets = problem()
    model = net()
    optimizer = sgd(model)
    for rows in torch.arange(SAMPLES).split(BATCH):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(features[rows]), targets[rows]).backward()
        optimizer.step()
    return model


def stay(operator):
    operator.leaves = False


@pytest.mark.slow
def test_the_call_ends_within_the_hang_timeout_and_the_run_goes_on():
    with TorchTrainer(
        training_operator_cls=LeavesAlone,
        num_workers=2,
        config={BATCH_SIZE: BATCH},
        hang_timeout_s=6,  # a slow step or answer is none that hangs
    ) as trainer:
        with pytest.raises(
            DataOrderError, match=r"rank 1 left train_epoch after step 2.*rank 0 waits in step 3"
        ):
            trainer.train()
        trainer.apply_all_operators(stay)
        assert trainer.train()[NUM_SAMPLES] == SAMPLES - 2 * BATCH  # the rest of the epoch
        assert trainer.status()["recoveries"] == []
        assert farthest(trainer.get_model(), one_epoch()) < 1e-12

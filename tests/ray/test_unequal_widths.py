# SPDX-License-Identifier: Apache-2.0
"""A worker dies, and the shards that are left to one worker cannot become one batch."""

import pytest
import torch
from torch import nn

from lockstep import TorchTrainer, TrainingOperator
from lockstep.testing import Strike, struck

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

WIDTHS = range(3, 15)


class OfAnyWidth(TrainingOperator):
    """Ready batches, each of another width, in a `train_batch` of its own: one batch per worker."""

    def setup(self, config):
        model = nn.Linear(1, 1, dtype=torch.float64)
        with torch.no_grad():
            model.weight.fill_(0.5), model.bias.fill_(0.0)
        self.model, self.optimizer = self.register(
            models=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.1)
        )
        draws = torch.Generator().manual_seed(3)
        batches = [
            (torch.randn(4, width, generator=draws).double(), torch.zeros(4)) for width in WIDTHS
        ]
        self.register_data(train_loader=batches)

    def train_batch(self, batch, batch_info):
        features, _ = batch
        loss = (self.model(features.mean(dim=1, keepdim=True)) - 1).square().mean()
        self.optimizer.zero_grad()
        self.backward(loss)
        self.optimizer.step()
        return {"train_loss": loss.item()}


def _trained(*strikes):
    operator = struck(OfAnyWidth, *strikes) if strikes else OfAnyWidth
    with TorchTrainer(training_operator_cls=operator, num_workers=2) as trainer:
        result, status = trainer.train(), trainer.status()
        return result["batch_count"], len(status["recoveries"]), trainer.get_model().weight.item()


def test_shards_that_cannot_be_joined_wait_for_the_lost_workers_replacement():
    num_steps, recoveries, weight = _trained(Strike("kill", rank=1, step=2, phase="backward"))
    assert (num_steps, recoveries) == (len(WIDTHS) // 2, 1)
    assert weight == pytest.approx(_trained()[2], rel=1e-12)

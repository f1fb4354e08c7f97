# SPDX-License-Identifier: Apache-2.0
"""A dataset that grows on two ranks while an epoch is open, also where they begin to read anew in
it, as a new group does: every sample of the epoch's beginning comes once."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from harness import side_by_side
from lockstep import TrainingOperator
from lockstep.worker import LoopRequest
from ranks.test_break_group import Workers, pair

__all__ = ["pair"]


def samples(size: int) -> list[torch.Tensor]:
    return [torch.tensor([float(number)], dtype=torch.float64) for number in range(size)]


class Grows(TrainingOperator):
    def setup(self, config: dict) -> None:
        model = nn.Linear(1, 1, dtype=torch.float64)
        self.seen: list[int] = []
        self.data = samples(26)
        self.register(models=model, optimizers=torch.optim.SGD(model.parameters(), lr=1e-4))
        self.model = model
        self.register_data(train_loader=DataLoader(self.data, 5, shuffle=True))

    def compute_loss(self, batch: torch.Tensor, batch_info: object) -> torch.Tensor:
        self.seen += batch.flatten().int().tolist()
        return self.model(batch).mean()


def train(workers: Workers, num_steps: int | None) -> list[int]:
    side_by_side(
        lambda rank: workers.workers[rank].train(LoopRequest("train", num_steps, False, {})), 2
    )
    seen = [number for each in workers.workers for number in each.operator.seen]
    for each in workers.workers:
        each.operator.seen.clear()
    return sorted(seen)


@pytest.mark.parametrize("agrees_anew", [False, True])
def test_an_epoch_has_the_samples_with_which_it_began_on_both_ranks(
    pair: object, agrees_anew: bool
) -> None:
    workers = pair(Grows)
    workers.start()
    seen = train(workers, 1)
    for each in workers.workers:
        each.operator.data += samples(37)[26:]
        if agrees_anew:
            each.cursors["train"].forget_agreement()
    assert sorted(seen + train(workers, None)) == list(range(26))
    assert train(workers, None) == list(range(37))

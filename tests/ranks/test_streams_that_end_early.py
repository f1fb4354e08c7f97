# SPDX-License-Identifier: Apache-2.0
"""`add_dist_sampler=False`, and a stream whose `__len__` is the total over the workers, or too
small: an epoch ends where the streams of all workers have ended.

`lockstep.data.user_sharded_loader`, with workers as threads.
"""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from harness import side_by_side
from lockstep import TorchTrainer, TrainingOperator
from lockstep.errors import DataOrderError, WeightError
from lockstep.worker import LoopRequest
from ranks.test_break_group import Workers, pair

__all__ = ["pair"]

BATCH = 4


def rows(rank: int, size: int) -> list[torch.Tensor]:
    return [torch.tensor([rank + number / 10], dtype=torch.float64) for number in range(size)]


class Part(IterableDataset):
    def __init__(self, claimed: int, rank: int, size: int) -> None:
        self.claimed, self.rows = claimed, rows(rank, size)

    def __len__(self) -> int:
        return self.claimed

    def __iter__(self) -> object:
        return iter(self.rows)


def linear() -> nn.Linear:
    layer = nn.Linear(1, 1, dtype=torch.float64)
    nn.init.ones_(layer.weight), nn.init.zeros_(layer.bias)
    return layer


class Reads(TrainingOperator):
    def setup(self, config: dict) -> None:
        self.model = linear()
        self.register(
            models=self.model, optimizers=torch.optim.SGD(self.model.parameters(), lr=0.1)
        )
        part = Part(config["claimed"], self.world_rank, config["sizes"][self.world_rank])
        self.register_data(
            train_loader=DataLoader(part, BATCH), validation_loader=DataLoader(part, BATCH)
        )

    def compute_loss(self, batch: torch.Tensor, batch_info: object) -> torch.Tensor:
        return self.model(batch).square().mean()

    def validate_batch(self, batch: torch.Tensor, batch_info: object) -> dict:
        return {"val_loss": self.model(batch).square().mean()}


class OwnLoop(Reads):
    def train_epoch(self, iterator: object, info: dict) -> dict:
        return super().train_epoch(iterator, info)


def make(
    pair: object, claimed: int, sizes: list[int], cls: type = Reads, **options: int
) -> Workers:
    workers = pair(cls)
    for each in workers.workers:
        each.spec = replace(
            each.spec,
            config={"claimed": claimed, "sizes": sizes},
            options=replace(each.spec.options, add_dist_sampler=False, **options),
        )
    workers.start()
    return workers


def call(workers: Workers, num_steps: int | None = None, purpose: str = "train") -> list:
    found: list = [None, None]

    def one(rank: int) -> None:
        method = getattr(workers.workers[rank], "train" if purpose == "train" else "validate")
        try:
            found[rank] = method(LoopRequest(purpose, num_steps, False, {}))
        except (DataOrderError, WeightError) as error:
            found[rank] = error

    side_by_side(one, 2)
    return found


def by_hand(sizes: list[int], epochs: int, accumulate: int = 1) -> torch.Tensor:
    """One process, which has the batches of both workers in each step."""
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parts = [rows(rank, size) for rank, size in enumerate(sizes)]
    starts = range(0, max(sizes), BATCH)
    for _ in range(epochs):
        for window in torch.tensor(starts).split(accumulate):
            batch = [row for k in window.tolist() for part in parts for row in part[k : k + BATCH]]
            optimizer.zero_grad()
            model(torch.stack(batch)).square().mean().backward()
            optimizer.step()
    return model.weight


@pytest.mark.parametrize("sizes", [[20, 20], [20, 12], [6, 18]])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_epoch_ends_where_all_streams_have_ended(
    pair: object, sizes: list[int], accumulate: int
) -> None:
    workers = make(pair, 40, sizes, accumulate=accumulate)
    for epoch in (1, 2):
        reports = call(workers)
        assert [each.steps for each in reports] == [5, 5]
        assert [each.samples for each in reports] == sizes
        assert [each.epoch for each in reports] == [epoch, epoch]
    for each in workers.workers:
        torch.testing.assert_close(each.operator.model.weight, by_hand(sizes, 2, accumulate))


def test_steps_go_on_into_the_next_epoch(pair: object) -> None:
    workers = make(pair, 40, [20, 12])
    assert [each.steps for each in call(workers, 7)] == [7, 7]
    assert [each.steps for each in call(workers)] == [3, 3]
    assert [each.epoch for each in call(workers, 1)] == [3, 3]


def test_a_validation_counts_each_row_once(pair: object) -> None:
    reports = call(make(pair, 40, [20, 12]), purpose="validation")
    assert [each.samples for each in reports] == [20, 12]


def test_a_length_that_is_too_small_is_refused_on_both_ranks(pair: object) -> None:
    found = call(make(pair, 12, [20, 8]))
    assert all(isinstance(each, DataOrderError) for each in found), found


def test_a_loop_of_ones_own_is_told_why_no_rank_has_a_sample(pair: object) -> None:
    for error in call(make(pair, 40, [20, 20], OwnLoop)):
        assert isinstance(error, WeightError)
        assert "`__len__`" in str(error)


@pytest.mark.parametrize("cls", [Reads, OwnLoop])
def test_a_worker_alone_ends_with_its_stream(cls: type) -> None:
    config = {"claimed": 40, "sizes": [20]}
    with TorchTrainer(training_operator_cls=cls, config=config, add_dist_sampler=False) as one:
        assert one.train()["batch_count"] == 5
        assert one.train()["batch_count"] == 5
        assert one.status()["epoch"] == 2

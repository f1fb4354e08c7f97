# SPDX-License-Identifier: Apache-2.0
"""A dataset that grows, or shrinks, between two calls while an epoch is open: the epoch ends with
the samples with which it began, and the next one has the present ones.

The cursor is `lockstep.worker.data_cursor`'s.
"""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, Sampler

from lockstep import TorchTrainer, TrainingOperator

NUM_FIRST = 6


class Order(Sampler):
    """A sampler of the user's own, which reads the size when an epoch begins."""

    def __init__(self, data: list) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> object:
        return iter(range(len(self.data)))


class Pairs(Order):
    def __len__(self) -> int:
        return -(-len(self.data) // 2)

    def __iter__(self) -> object:
        return iter(torch.arange(len(self.data)).split(2))


LOADERS = {
    "in order": lambda data: DataLoader(data, 2),
    "shuffled": lambda data: DataLoader(data, 2, shuffle=True),
    "fewer draws": lambda data: DataLoader(data, 2, sampler=RandomSampler(data, num_samples=6)),
    "own sampler": lambda data: DataLoader(data, 2, sampler=Order(data)),
    "own batches": lambda data: DataLoader(data, batch_sampler=Pairs(data)),
}


class Grows(TrainingOperator):
    def setup(self, config: dict) -> None:
        model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
        nn.init.zeros_(model.weight)
        self.seen: list[list[int]] = []
        self.data = samples(config.get("size", NUM_FIRST))
        self.fails = False
        self.model, _ = self.register(
            models=model, optimizers=torch.optim.SGD(model.parameters(), lr=1.0)
        )
        self.register_data(train_loader=LOADERS[config["loader"]](self.data))

    def compute_loss(self, batch: torch.Tensor, batch_info: object) -> torch.Tensor:
        if self.fails:
            self.fails = False
            raise ZeroDivisionError
        self.seen.append([int(value) for value in batch.flatten()])
        return self.model(batch).mean()

    def grow(self) -> None:
        self.data += samples(len(self.data) + 5)[len(self.data) :]

    def take_seen(self) -> list[int]:
        seen, self.seen = self.seen, []
        return [value for batch in seen for value in batch]


def samples(size: int) -> list[torch.Tensor]:
    return [torch.tensor([float(number)], dtype=torch.float64) for number in range(size)]


def trainer(loader: str, size: int = NUM_FIRST, **arguments: object) -> TorchTrainer:
    return TorchTrainer(
        training_operator_cls=Grows, config={"loader": loader, "size": size}, **arguments
    )


EVERY = pytest.mark.parametrize("loader", LOADERS)
TORCHS_ORDERS = pytest.mark.parametrize("loader", ["in order", "shuffled", "fewer draws"])


@EVERY
def test_the_last_window_of_an_epoch_is_closed_where_the_epoch_began_smaller(loader: str) -> None:
    weights = []
    for grows in (False, True):
        with trainer(loader, accumulate=2) as one:
            operator = one.get_local_operator()
            one.train(num_steps=1)
            if grows:
                operator.grow()
            assert one.train()["batch_count"] == 2
            weights.append(operator.model.weight.item())
            one.train(num_steps=2)
            assert one.status()["epoch"] == 2
    assert weights[0] == weights[1] != 0.0


@EVERY
@pytest.mark.parametrize("calls", [(1, 2, 1), (2, 1, 2), (1, 1, 1), (3, 1, 1), (2, 4)])
def test_every_epoch_has_the_samples_with_which_it_began(
    loader: str, calls: tuple[int, ...]
) -> None:
    with trainer(loader) as one:
        operator = one.get_local_operator()
        for steps in calls:
            assert one.train(num_steps=steps)["batch_count"] == steps
            operator.grow()
        if sum(calls) <= 3:
            one.train(num_steps=4 - sum(calls))  # the first step of the second epoch
        seen = operator.take_seen()
        assert sorted(seen[:NUM_FIRST]) == list(range(NUM_FIRST))
        second = seen[NUM_FIRST:]
        assert len(set(second)) == len(second)


@EVERY
def test_the_rest_of_an_epoch_that_was_over_is_the_next_one(loader: str) -> None:
    with trainer(loader) as one:
        operator = one.get_local_operator()
        one.train(num_steps=3)
        operator.grow()
        operator.take_seen()
        one.train()
        size = NUM_FIRST if loader == "fewer draws" else NUM_FIRST + 5
        assert len(set(operator.take_seen())) == size
        assert one.status()["epoch"] == 2


@TORCHS_ORDERS
@pytest.mark.parametrize("seed", range(3))
def test_an_epoch_that_failed_goes_on_in_its_order(loader: str, seed: int) -> None:
    with trainer(loader, seed=seed) as one:
        operator = one.get_local_operator()
        one.train(num_steps=1)
        operator.grow()
        operator.fails = True
        with pytest.raises(ZeroDivisionError):
            one.train()
        assert one.train()["batch_count"] == 2
        assert sorted(operator.take_seen()) == list(range(NUM_FIRST))
        assert one.status()["epoch"] == 1


@TORCHS_ORDERS
def test_an_epoch_that_was_saved_goes_on_with_its_samples_behind_a_load(loader: str) -> None:
    with trainer(loader) as one:
        operator = one.get_local_operator()
        one.train(num_steps=2)
        first = operator.take_seen()
        operator.grow()
        state = one.state_dict()
        one.train()
        rest = operator.take_seen()
        assert sorted(first + rest) == list(range(NUM_FIRST))
        one.load_state_dict(state)
        assert one.train()["batch_count"] == 1
        assert operator.take_seen() == rest
        before = one.state_dict()
    for size in (NUM_FIRST, NUM_FIRST + 5):
        with trainer(loader, size) as other:
            other.load_state_dict(state)
            other.train()
            assert other.get_local_operator().take_seen() == rest
            assert other.get_model().weight.equal(before["models"][0]["weight"])


def test_steps_of_another_size_end_where_the_epoch_ended() -> None:
    with trainer("shuffled") as one:
        one.train(num_steps=2)
        state = one.state_dict()
        first = one.get_local_operator().take_seen()

    class ByOne(Grows):
        def register_data(self, *, train_loader: DataLoader) -> None:
            super().register_data(train_loader=DataLoader(self.data, 1, shuffle=True))

    with TorchTrainer(
        training_operator_cls=ByOne, config={"loader": "shuffled", "size": 11}
    ) as one:
        one.load_state_dict(state)
        assert one.train()["batch_count"] == 2
        rest = one.get_local_operator().take_seen()
        assert sorted(first + rest) == list(range(NUM_FIRST))


@TORCHS_ORDERS
def test_a_state_of_an_earlier_version_goes_on(loader: str) -> None:
    with trainer(loader) as one:
        one.train(num_steps=1)
        state = one.state_dict()
        assert state["position"]["train"].pop("epoch_size") == (6, 6)
        one.load_state_dict(state)
        one.train()
        assert sorted(one.get_local_operator().take_seen()) == list(range(NUM_FIRST))


@TORCHS_ORDERS
@pytest.mark.parametrize("steps", [1, 2])
def test_an_epoch_whose_samples_are_gone_goes_on_with_the_present_ones_and_says_so(
    loader: str, steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    with trainer(loader) as one:
        one.train(num_steps=steps)
        state = one.state_dict()
    with trainer(loader, 4) as other:
        other.load_state_dict(state)
        other.train()
        seen = other.get_local_operator().take_seen()
        assert max(seen) < 4
        is_over = steps == 2 and loader != "fewer draws"
        assert len(seen) == (4 if is_over else 6 - 2 * steps if loader == "fewer draws" else 2)
        assert other.status()["epoch"] == (2 if is_over else 1)
    told = ["began with 6 samples" in each.message for each in caplog.records]
    assert told == ([] if is_over else [True])

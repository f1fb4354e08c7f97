# SPDX-License-Identifier: Apache-2.0
"""A `collate_fn` that leaves samples out, beside those that only lay batches out otherwise.

`lockstep.data.collated_rows`, alone and in a run of two shards.
"""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, default_collate

from lockstep import TorchTrainer, TrainingOperator
from lockstep.data.collated_rows import CollatedRows
from lockstep.errors import WeightError
from lockstep.keys import WEIGHT


def errors(*batches):
    """Whether each of `batches`, which are (samples, batch), is refused."""
    rows = CollatedRows(lambda samples: samples)
    return [rows.weight_error(batch, num_samples) is not None for num_samples, batch in batches]


def pair(*lengths):
    return [torch.zeros(length, 7) for length in lengths]


def test_rows_that_are_missing_are_noticed():
    assert errors((4, pair(3, 3))) == [True]
    assert errors((4, pair(4, 4)), (4, pair(2, 2)), (4, pair(0, 0))) == [False, True, True]
    assert errors((4, pair(2, 2)), (4, pair(4, 4))) == [False, True]
    assert errors((4, {"x": np.zeros((3, 2)), "y": torch.zeros(3), "name": "four"})) == [True]
    with pytest.raises(WeightError, match="returned 3 of 4 samples"):
        raise CollatedRows(list).weight_error(pair(3, 3), 4)


def test_rows_for_equally_many_samples_are_none_that_are_missing():
    pairs = [(4, pair(2, 2)), (8, pair(4, 4)), (2, pair(1, 1))]
    assert errors(*pairs) == [False] * 3


@pytest.mark.parametrize(
    "batch",
    [
        pair(3),  # one tensor shows too little
        [torch.zeros(3, 4, 7), torch.zeros(3, 4)],  # time steps first
        [torch.zeros(3, 2), torch.zeros(5, 2)],  # packed
        [torch.zeros(3), torch.tensor(1.0)],
        pair(5, 5),  # two views of some samples
        "rows",
        [],
    ],
)
def test_tensors_of_another_layout_show_nothing(batch):
    assert errors((4, pair(4, 4)), (4, batch)) == [False, False]


def picture(channels=1):
    return torch.zeros(channels, 5, 5)


@pytest.mark.parametrize(
    "batch",
    [
        [(picture(), 0), (picture(), 1), (picture(), 2), (picture(), 3)],  # collate_fn=list
        [picture(3)] * 4,
        ((picture(),) * 4, (0, 1, 2, 3)),  # tuple(zip(*samples))
        ((picture(),) * 4, tuple({"boxes": torch.zeros(1, 4)} for _ in range(4))),
        {"pictures": [picture(3)] * 4},
        {"inputs": {"pictures": [np.zeros((3, 5, 5))] * 4}, "name": "four"},
    ],
)
def test_samples_along_a_list_show_nothing(batch):
    assert errors((4, pair(4, 4)), (4, batch)) == [False, False]


class Columns(NamedTuple):
    features: torch.Tensor
    targets: torch.Tensor


@pytest.mark.parametrize(
    "batch",
    [
        (torch.zeros(1, 7), torch.zeros(1)),
        (torch.zeros(1, 7), torch.zeros(1, 1, dtype=torch.long)),
        Columns(torch.zeros(1, 7), torch.zeros(1, 7)),
        {"x": torch.zeros(1, 7), "y": torch.zeros(1, 7)},
    ],
)
def test_as_many_columns_as_samples_are_no_samples(batch):
    assert errors((4, pair(4, 4)), (2, batch)) == [False, True]


def test_torchs_own_functions_leave_nothing_out():
    assert CollatedRows(default_collate).weight_error(pair(3, 3), 4) is None


SAMPLES = [
    (torch.tensor([x, 1.0], dtype=torch.float64), torch.tensor([x * x], dtype=torch.float64))
    for x in torch.linspace(-1, 1, 16).tolist()
]
MISSING = (1, 4, 5, 11, 12)


def without_missing(numbers):
    return default_collate([SAMPLES[number] for number in numbers if number not in MISSING])


def line():
    model = nn.Linear(2, 1, dtype=torch.float64)
    nn.init.constant_(model.weight, 0.1)
    nn.init.zeros_(model.bias)
    return model


class Holes(TrainingOperator):
    def setup(self, config):
        self.model, self.optimizer, self.criterion = self.register(
            models=(model := line()),
            optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
            criterion=nn.MSELoss(),
        )
        loader = DataLoader(range(16), batch_size=4, collate_fn=without_missing)
        self.register_data(train_loader=loader, validation_loader=loader)


class Weighed(Holes):
    def compute_loss(self, batch, batch_info):
        return super().compute_loss(batch, batch_info), {WEIGHT: len(batch[0])}


class OwnStep(Holes):
    def train_batch(self, batch, batch_info):
        features, targets = batch
        self.optimizer.zero_grad()
        loss = self.criterion(self.model(features), targets)
        self.backward(loss, weight=len(features) if self.config["weighed"] else None)
        self.optimizer.step()
        return {"train_loss": loss.item()}


def one_process():
    model = line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for start in (0, 8):
        features, targets = without_missing(range(start, start + 8))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(features), targets).backward()
        optimizer.step()
    return model


def assert_equal_weights(model, other):
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def started(operator, **arguments):
    return TorchTrainer(training_operator_cls=operator, num_shards=2, **arguments)


def test_a_shard_does_not_count_for_samples_that_its_batch_does_not_hold():
    with started(Holes) as trainer:
        before = [each.clone() for each in trainer.get_model().parameters()]
        with pytest.raises(WeightError, match="returned 3 of 4 samples"):
            trainer.train()
        for mine, old in zip(trainer.get_model().parameters(), before, strict=True):
            assert torch.equal(mine, old)
        with pytest.raises(WeightError, match="filter in the dataset"):
            trainer.validate()


def test_a_loss_with_a_weight_of_its_own_is_exact_without_them():
    with started(Weighed) as trainer:
        trainer.train()
        trainer.validate()
        assert_equal_weights(trainer.get_model(), one_process())


def test_a_step_of_ones_own_says_what_its_loss_counts_for():
    with (
        started(OwnStep, config={"weighed": False}) as trainer,
        pytest.raises(WeightError, match="returned 5 of 8 samples"),
    ):
        trainer.train()
    with started(OwnStep, config={"weighed": True}) as trainer:
        trainer.train()
        assert_equal_weights(trainer.get_model(), one_process())


class Listed(Holes):
    """Gets each shard as a list of its samples, which all have three rows."""

    def setup(self, config):
        super().setup(config)
        rows = [torch.stack([features] * 3) for features, _ in SAMPLES]
        loader = DataLoader(rows, batch_size=4, collate_fn=list)
        self.register_data(train_loader=loader, validation_loader=loader)

    def compute_loss(self, batch, batch_info):
        features = torch.stack(batch)[:, 0]
        return self.criterion(self.model(features), features[:, :1].square())


def test_a_shard_that_is_a_list_of_samples_counts_for_all_of_them():
    features = torch.stack([features for features, _ in SAMPLES])
    model = line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for rows in features.split(8):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(rows), rows[:, :1].square()).backward()
        optimizer.step()
    loss = nn.functional.mse_loss(model(features), features[:, :1].square()).item()
    with started(Listed) as trainer:
        trainer.train()
        assert_equal_weights(trainer.get_model(), model)
        assert trainer.validate()["val_loss"] == pytest.approx(loss, rel=1e-12)

# SPDX-License-Identifier: Apache-2.0
"""A `compute_loss` that calls the default one several times: `lockstep.operator.shard_results`."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import TorchTrainer, TrainingOperator
from lockstep.errors import WeightError
from lockstep.keys import BATCH_SIZE, NUM_SAMPLES
from lockstep.keys import WEIGHT as WEIGHT_KEY

ROWS = 21
X = torch.randn(ROWS, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
CLASSES = torch.arange(ROWS) % 3 % 2
TOKENS = (CLASSES[:, None] + torch.arange(5)) % 2


class Scores(nn.Module):
    """Scores (N, 2) of the first token of each sample, or (N, 2, 5) of all."""

    def __init__(self, is_dense):
        super().__init__()
        self.linear, self.is_dense = nn.Linear(3, 2), is_dense

    def forward(self, x):
        scores = self.linear(x).transpose(1, 2)
        return scores if self.is_dense else scores[..., 0]


def parts(config):
    torch.manual_seed(0)
    model = Scores(config["targets"].dim() == 2 and not config.get("is_flat")).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.5)


class Chunks(TrainingOperator):
    """Sums over micro-chunks of four rows, for their memory."""

    def setup(self, config):
        model, optimizer = parts(config)
        self.model, self.optimizer, self.criterion = self.register(
            models=model,
            optimizers=optimizer,
            criterion=nn.CrossEntropyLoss(weight=config.get("weight")),
        )
        data = DataLoader(TensorDataset(X, config["targets"]), config[BATCH_SIZE])
        self.register_data(train_loader=data, validation_loader=data)

    def compute_loss(self, batch, batch_info):
        x, y = batch
        pairs = zip(x.split(4), y.split(4), strict=True)
        losses = [
            super(Chunks, self).compute_loss(pair, batch_info) * len(pair[0]) for pair in pairs
        ]
        return sum(losses) / len(x)


class Mines(Chunks):
    """The rows with the largest scores a second time."""

    def compute_loss(self, batch, batch_info):
        x, y = batch
        whole = super(Chunks, self).compute_loss(batch, batch_info)
        hard = super(Chunks, self).compute_loss((x[:2], y[:2]), batch_info)
        return whole + 0 * hard


class FlatSometimesTwice(Chunks):
    """Two calls for a shard of eleven samples, and one for ten."""

    def compute_loss(self, batch, batch_info):
        x, y = batch
        flat = x.flatten(0, 1)[:, None], y.flatten()
        losses = [super(Chunks, self).compute_loss(flat, batch_info) for _ in range(1 + len(x) % 2)]
        return sum(losses) / len(losses)


class Weighed(Chunks):
    def compute_loss(self, batch, batch_info):
        return super().compute_loss(batch, batch_info), {WEIGHT_KEY: len(batch[0])}


def trained(operator, **config):
    with TorchTrainer(training_operator_cls=operator, num_shards=2, config=config) as one:
        validated = one.validate()
        result = one.train()
        assert result[NUM_SAMPLES] == validated[NUM_SAMPLES] == ROWS
        return [validated["val_loss"], *one.get_model().parameters()]


def by_hand(targets, batch):
    """Steps on the mean over all rows of a global batch."""
    model, optimizer = parts({"targets": targets})
    validated = nn.functional.cross_entropy(model(X), targets).item()
    for x, y in zip(X.split(batch), targets.split(batch), strict=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return [validated, *model.parameters()]


@pytest.mark.parametrize("batch", [21, 10])  # 11 and 10 rows; 5 and 5, then 1, in one chunk
@pytest.mark.parametrize("targets", [CLASSES, TOKENS], ids=["classes", "tokens"])
@pytest.mark.parametrize("operator", [Chunks, Mines, Weighed])
def test_a_loss_of_several_calls_counts_for_its_samples(operator, targets, batch):
    """It counted for the targets of the last call: three and two."""
    got = trained(operator, targets=targets, **{BATCH_SIZE: batch})
    for one, true in zip(got, by_hand(targets, batch), strict=True):
        torch.testing.assert_close(one, true, rtol=1e-12, atol=1e-14)


UNEQUAL = torch.tensor([1.0, 9.0], dtype=torch.float64)


@pytest.mark.parametrize(
    "config",
    [
        {"targets": CLASSES.masked_fill(X[:, 0, 0] > 1, -100)},
        {"targets": CLASSES, "weight": UNEQUAL},
    ],
    ids=["ignored", "class weights"],
)
def test_a_loss_of_several_calls_over_other_numbers_of_targets_has_to_say_its_weight(config):
    with pytest.raises(WeightError, match="called 3 times"):
        trained(Chunks, **config, **{BATCH_SIZE: ROWS})
    trained(Weighed, **config, **{BATCH_SIZE: ROWS})


def test_flattened_targets_of_several_calls_have_to_say_their_weight():
    """A shard with two calls counted for its samples, and one with a single call for its tokens."""
    with pytest.raises(WeightError, match="called 2 times"):
        trained(FlatSometimesTwice, targets=TOKENS, is_flat=True, **{BATCH_SIZE: ROWS})

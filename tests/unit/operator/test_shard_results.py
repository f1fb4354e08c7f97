# SPDX-License-Identifier: Apache-2.0
"""Losses weighed by tokens in the default loop, against plain autograd in one process."""

import math

import numpy as np
import pytest
import torch
from tests.tokens import (
    LENGTHS,
    PAD,
    OwnEpoch,
    OwnStep,
    Tokens,
    by_hand,
    farthest,
    net,
    per_token,
    problem,
    sgd,
)
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import TorchTrainer, TrainingOperator
from lockstep.errors import ConfigurationError, MixedWeightsError, WeightError
from lockstep.keys import BATCH_SIZE, NUM_SAMPLES, WEIGHT
from lockstep.operator.shard_results import mean_over_shards

CONFIG = {BATCH_SIZE: 5}


def trainer(operator=Tokens, config=CONFIG, **arguments):
    return TorchTrainer(training_operator_cls=operator, config=config, **arguments)


@pytest.mark.sampled
@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("num_shards", [1, 2, 3, 4])
def test_the_objective_is_the_mean_over_the_tokens_of_the_global_batch(
    num_shards, accumulate, reproducible
):
    true = by_hand(accumulate)
    with trainer(
        num_shards=num_shards, accumulate=accumulate, reproducible=reproducible
    ) as trained:
        trained.train()
        result = trained.train()
        assert farthest(trained.get_model(), true.model) < 1e-12
    assert result["train_loss"] == pytest.approx(true.loss, rel=1e-12)
    assert result["last_train_loss"] == pytest.approx(true.last_loss, rel=1e-12)
    assert result[NUM_SAMPLES] == len(LENGTHS)
    assert WEIGHT not in result


@pytest.mark.parametrize("num_shards", [1, 4])
def test_validation_is_a_mean_over_tokens_too(num_shards):
    features, classes = problem()
    output, real = net()(features), classes != PAD
    with trainer(num_shards=num_shards) as trained:
        result = trained.validate()
    loss = per_token(net(), features, classes).sum().item() / sum(LENGTHS)
    assert result["val_loss"] == pytest.approx(loss, rel=1e-12)
    hits = (output.argmax(dim=-1) == classes)[real].double().mean().item()
    assert result["hits"] == pytest.approx(hits, rel=1e-7)  # a quotient of integers is float32
    assert result[NUM_SAMPLES] == len(LENGTHS)
    assert WEIGHT not in result


def test_a_joint_loss_may_be_weighed_too():
    class Joint(Tokens):
        joint_loss = True

    with trainer(Joint, num_shards=2) as trained:
        trained.train()
        trained.train()
        assert farthest(trained.get_model(), by_hand().model) < 1e-12


def test_weighing_is_done_at_the_root_in_low_precision():
    """20,000 tokens a batch: a gradient multiplied by them would overflow float16."""

    class Large(Tokens):
        def compute_loss(self, batch, batch_info):
            loss, metrics = super().compute_loss(batch, batch_info)
            return loss, {**metrics, WEIGHT: metrics[WEIGHT] * 20_000}

    for precision in ("bf16", "fp16"):
        models = []
        for operator in (Tokens, Large):
            with trainer(operator, num_shards=2, precision=precision) as trained:
                trained.train()
                models.append(trained.get_model())
        assert farthest(models[0], net()) > 0.01
        assert farthest(*models) < 1e-3


@pytest.mark.parametrize("operator", [OwnStep, OwnEpoch])
def test_the_metrics_of_an_own_loop_may_be_weighed(operator):
    true = by_hand()
    with trainer(operator) as trained:
        trained.train()
        result = trained.train()
        assert farthest(trained.get_model(), true.model) < 1e-12
    assert result["train_loss"] == pytest.approx(true.loss, rel=1e-12)
    assert result[NUM_SAMPLES] == len(LENGTHS)
    assert WEIGHT not in result


@pytest.mark.parametrize("num_shards", [1, 2, 4])
def test_a_metric_of_some_shards_counts_for_those_alone(num_shards):
    """Whoever carries them: its mean over the steps must not know."""

    class Sometimes(Tokens):
        def compute_loss(self, batch, batch_info):
            loss, _ = super().compute_loss(batch, batch_info)
            long = [each for each in (batch[1] != PAD).sum(dim=1).tolist() if each > 3]
            return loss, {WEIGHT: len(long), "long": sum(long) / len(long)} if long else {WEIGHT: 0}

    expected = [each for each in LENGTHS if each > 3]
    with trainer(Sometimes, num_shards=num_shards) as trained:
        result = trained.validate()
    assert result["long"] == pytest.approx(sum(expected) / len(expected), rel=1e-12)


def test_a_metric_that_only_some_shards_report_is_averaged_over_their_samples():
    class Sometimes(Tokens):
        def compute_loss(self, batch, batch_info):
            loss, _ = super().compute_loss(batch, batch_info)
            lengths = (batch[1] != PAD).sum(dim=1)
            is_long = lengths.max() > 4
            return loss.nan_to_num(), {"long": lengths.double().mean()} if is_long else {}

    # 4 shards of the batches of 5 have 2, 1, 1 and 1 samples.
    shards = [(0, 2), (2, 3), (3, 4), (4, 5)]
    cut = [LENGTHS[start + a : start + b] for start in range(0, 15, 5) for a, b in shards] + [
        [each] for each in LENGTHS[15:]
    ]
    long = [each for part in cut if max(part) > 4 for each in part]
    with trainer(Sometimes, num_shards=4) as trained:
        result = trained.validate()
    assert result["long"] == pytest.approx(sum(long) / len(long), rel=1e-12)


@pytest.mark.parametrize("num_shards", [1, 2])
def test_a_shard_without_tokens_leaves_the_running_statistics_alone(num_shards):
    class Normed(Tokens):
        def setup(self, config):
            model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 4)).double()
            self.model, self.optimizer = self.register(models=model, optimizers=sgd(model))
            data = TensorDataset(torch.ones(4, 3, dtype=torch.float64) * torch.arange(4)[:, None])
            self.register_data(train_loader=DataLoader(data, config[BATCH_SIZE]))

        def compute_loss(self, batch, batch_info):
            (features,) = batch
            return self.model(features).mean(), {WEIGHT: int(features.max() > 1)}

    with trainer(Normed, config={BATCH_SIZE: 4}, num_shards=num_shards) as trained:
        trained.train()
        norm = trained.get_model()[0]
    # Of two shards the first has features 0 and 1, and no weight; of one, all four.
    expected = 0.0 if num_shards == 2 else 0.15
    assert norm.running_mean.tolist() == pytest.approx([expected] * 3, rel=1e-12)
    assert norm.num_batches_tracked == num_shards % 2


def giving(weight):
    class Giving(Tokens):
        def compute_loss(self, batch, batch_info):
            return super().compute_loss(batch, batch_info)[0], {WEIGHT: weight}

    return Giving


@pytest.mark.parametrize(
    "weight", [-1, math.nan, math.inf, None, "many", torch.ones(2), torch.tensor(-2)]
)
def test_an_impossible_weight_is_refused(weight):
    for call in ("train", "validate"):
        with trainer(giving(weight)) as trained, pytest.raises(WeightError, match="tokens"):
            getattr(trained, call)()


def test_a_global_batch_without_any_tokens_has_no_mean():
    with trainer(giving(0), num_shards=2) as trained, pytest.raises(WeightError, match="zero"):
        trained.train()


class Fickle(Tokens):
    """Brings its weight for some batches only."""

    def compute_loss(self, batch, batch_info):
        loss, metrics = super().compute_loss(batch, batch_info)
        return loss, metrics if batch_info["global_step"] == 0 else {}


def test_weights_by_tokens_and_by_samples_are_not_mixed():
    with trainer(Fickle) as trained, pytest.raises(MixedWeightsError, match="for every batch"):
        trained.train()
    # Nor in a window that spans two calls.
    with trainer(Fickle, accumulate=2) as trained:
        trained.train(num_steps=1)
        with pytest.raises(MixedWeightsError, match="for every batch"):
            trained.train(num_steps=1)


def test_training_by_tokens_does_not_bind_validation():
    class OnlyInTraining(Tokens):
        def compute_loss(self, batch, batch_info):
            loss, metrics = super().compute_loss(batch, batch_info)
            return loss, metrics if self.model.training else {}

    with trainer(OnlyInTraining) as trained:
        trained.train()
        assert trained.validate()[NUM_SAMPLES] == len(LENGTHS)


def test_a_sum_takes_no_weight():
    class Summed(Tokens):
        loss_reduction = "sum"

    with trainer(Summed) as trained, pytest.raises(ConfigurationError, match="no weight"):
        trained.train()


def test_a_weight_is_applied_without_a_synchronisation_where_there_are_no_peers():
    with trainer(wrap_ddp=False) as trained:
        trained.train()
        trained.train()
        assert farthest(trained.get_model(), by_hand().model) < 1e-12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_metrics_of_shards_are_added_up_in_float64(dtype):
    values = torch.tensor([1.0, 1.5, 0.0078125, 40000.0], dtype=dtype, requires_grad=True)
    results = [({"x": value}, weight) for value, weight in zip(values, (3, 1, 4, 5), strict=True)]
    mean = mean_over_shards(results)["x"]
    true = sum(value.item() * weight for value, weight in zip(values, (3, 1, 4, 5), strict=True))
    assert mean.item() == pytest.approx(true / 13, rel=1e-15)
    assert not mean.requires_grad


class Scales(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, features):
        return features * self.factor


SCORES = torch.tensor([[[2.0, 1.0], [0.0, 3.0]], [[1.0, 0.0], [4.0, 1.0]]], dtype=torch.float64)
FEATURES = torch.cat([SCORES, SCORES.flip(0) / 3])
CLASSES = torch.tensor([[0, -100], [-100, -100], [1, 1], [0, -100]])
"""Of the first shard one target counts, of the second one three: as many as there are samples."""


class HasIgnoredTargets(TrainingOperator):
    def setup(self, config):
        model = Scales()
        self.register(models=model, optimizers=sgd(model), criterion=nn.CrossEntropyLoss())
        loader = DataLoader(TensorDataset(FEATURES, CLASSES), config[BATCH_SIZE])
        self.register_data(train_loader=loader, validation_loader=loader)


@pytest.mark.parametrize("num_shards", [1, 2, 4])
def test_as_many_targets_as_samples_are_targets_all_the_same(num_shards):
    loss = nn.functional.cross_entropy(FEATURES, CLASSES).item()
    hits = (FEATURES.argmax(1) == CLASSES)[CLASSES != -100].double().mean().item()
    with trainer(HasIgnoredTargets, {BATCH_SIZE: 4}, num_shards=num_shards) as trained:
        validated = trained.validate()
        assert validated["val_loss"] == pytest.approx(loss, rel=1e-12)
        assert validated["val_accuracy"] == pytest.approx(hits, rel=1e-12)
        assert trained.train()["train_loss"] == pytest.approx(loss, rel=1e-12)


@pytest.mark.parametrize("of_numpy", [np.float32, np.bool_, lambda value: np.array([value])])
def test_a_metric_of_numpy_is_the_mean_over_the_shards_of_a_worker(of_numpy):
    class Measures(Tokens):
        def compute_loss(self, batch, batch_info):
            loss, _ = super().compute_loss(batch, batch_info)
            return loss.nan_to_num(), {"seen": of_numpy(float(batch[0].mean() > 0))}

    # Batches of 5 are shards of 3 and 2, and the last one of 4 is two of 2.
    cut = problem()[0].split([3, 2, 3, 2, 3, 2, 2, 2])
    expected = sum(len(part) * float(part.mean() > 0) for part in cut) / len(LENGTHS)
    assert 0 < expected < 1
    with trainer(Measures, num_shards=2) as trained:
        assert trained.validate()["seen"] == pytest.approx(expected, rel=1e-12)


class Sometimes(TrainingOperator):
    """A metric that some batches do not have: which of the shards, depends on their number."""

    def setup(self, config):
        model = nn.Linear(1, 1)
        self.model, self.optimizer = self.register(
            models=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.1)
        )
        data = DataLoader(TensorDataset(torch.arange(12.0)[:, None]), config[BATCH_SIZE])
        self.register_data(train_loader=data, validation_loader=data)

    def compute_loss(self, batch, batch_info):
        (x,) = batch
        large = x[x > 5]
        metrics = {"large": large.mean().item() if len(large) else None, "never": None}
        return self.model(x).square().mean(), metrics


@pytest.mark.parametrize("call", ["train", "validate"])
def test_a_shard_whose_metric_is_none_is_left_out_of_its_mean(call, recwarn):
    """Shards of two rows each: 0, 1 | 2, 3 | 4, 5 have none, and 6, 7 | 8, 9 | 10, 11 have."""
    found = []
    for num_shards, batch in ((1, 2), (2, 4), (3, 6), (6, 12)):
        with trainer(Sometimes, {BATCH_SIZE: batch}, num_shards=num_shards) as one:
            found.append(getattr(one, call)())
    assert [each["large"] for each in found] == [pytest.approx(8.5)] * 4
    assert [each["never"] for each in found] == [None] * 4
    assert not [each for each in recwarn if "large" in str(each.message)]

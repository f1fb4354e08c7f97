# SPDX-License-Identifier: Apache-2.0
"""Settings of an optimizer that `compute_loss` changes, where a rank has no samples in a step.

Nine samples in global batches of four: the third step has one, which is rank 0's.
"""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from harness import assert_same, reset, rows
from lockstep import TrainingOperator
from lockstep.errors import LostUpdateError
from lockstep.keys import BATCH_SIZE
from lockstep.worker import LoopRequest, WorkerSpec
from ranks.table import run_workers
from ranks.table_operators import mlp

X, EPOCHS = rows(9, 4, seed=30), 2


def sgd(model, kind):
    lr = torch.tensor(0.01, dtype=torch.float64) if kind == "a tensor" else 0.01
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.5)


class WarmsUp(TrainingOperator):
    """The rate follows the number of the step, as in scripts without a scheduler."""

    def setup(self, config):
        model = reset(mlp(), 7)
        self.model, self.optimizer = self.register(
            models=model, optimizers=sgd(model, config["kind"])
        )
        self.register_data(train_loader=DataLoader(TensorDataset(X), config[BATCH_SIZE]))

    def compute_loss(self, batch, batch_info):
        change_settings(self.optimizer, self.global_step, self.config["kind"])
        return self.model(batch[0]).square().mean()


def change_settings(optimizer, step, kind):
    for group in optimizer.param_groups:
        if kind == "a tensor":
            group["lr"].fill_(0.01 * (step + 1))
        else:
            group["lr"] = 0.01 * (step + 1)
        if kind == "several":
            group["momentum"], group["nesterov"] = 0.9 - 0.1 * (step == 2), step == 2


def one_process(kind):
    model = reset(mlp(), 7)
    optimizer, step = sgd(model, kind), 0
    for _ in range(EPOCHS):
        for x in X.split(4):
            change_settings(optimizer, step, kind)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            step += 1
    return weights(model)


def weights(model):
    return {name: each.detach().clone() for name, each in model.named_parameters()}


def trained(operator_cls, num_workers, kind, num_shards=None):
    """Each rank's weights and settings."""
    config = {BATCH_SIZE: 4, "kind": kind}
    spec = WorkerSpec(operator_cls, config, num_workers, num_shards or num_workers, seed=0)

    def body(worker):
        for _ in range(EPOCHS):
            worker.train(LoopRequest("train", None, False, {}))
        return weights(worker.operator.model), worker.operator.optimizer.param_groups[0]

    return run_workers(spec, body)


@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.parametrize("kind", ["a number", "a tensor", "several"])
def test_a_rank_without_samples_steps_with_the_settings_of_the_others(kind, num_workers):
    """It stepped with those of its last own forward, and the replicas differed for good."""
    for got, settings in trained(WarmsUp, num_workers, kind):
        assert_same(got, one_process(kind))
        assert isinstance(settings["lr"], torch.Tensor) is (kind == "a tensor")


class OfEachRank(WarmsUp):
    """A setting that ranks have of their own, for parameters that are local, say."""

    def compute_loss(self, batch, batch_info):
        if self.global_step == 0:
            self.optimizer.param_groups[0]["of_this_rank"] = self.world_rank
        return super().compute_loss(batch, batch_info)


def test_what_no_forward_has_changed_stays_a_ranks_own():
    settings = [each["of_this_rank"] for _, each in trained(OfEachRank, 2, "a number")]
    assert settings == [0, 1]


class Decays(WarmsUp):
    """The rate follows from the one before."""

    def compute_loss(self, batch, batch_info):
        decay(self.optimizer)
        return self.model(batch[0]).square().mean()


def decay(optimizer):
    for group in optimizer.param_groups:
        group["lr"] *= 0.9


def decayed_by_hand(kind):
    model = reset(mlp(), 7)
    optimizer = sgd(model, kind)
    for _ in range(EPOCHS):
        for x in X.split(4):
            decay(optimizer)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    return weights(model), float(optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize("kind", ["a number", "a tensor"])
@pytest.mark.parametrize(("num_workers", "num_shards"), [(1, 1), (1, 2), (2, 2), (2, 3), (2, 4)])
def test_a_relative_change_is_made_once_a_batch(num_workers, num_shards, kind):
    """It was made once for each shard, so that a rank with two of them went on with less."""
    expected, rate = decayed_by_hand(kind)
    for got, settings in trained(Decays, num_workers, kind, num_shards):
        assert_same(got, expected)
        assert float(settings["lr"]) == pytest.approx(rate, rel=1e-14)


class FollowsItsSamples(WarmsUp):
    def compute_loss(self, batch, batch_info):
        self.optimizer.param_groups[0]["lr"] = float(batch[0].sum())
        return self.model(batch[0]).square().mean()


def test_settings_that_differ_between_shards_are_refused():
    with pytest.raises(LostUpdateError, match="different settings"):
        trained(FollowsItsSamples, 1, "a number", 2)

# SPDX-License-Identifier: Apache-2.0
"""Steps around one that is replayed: the gradient of each layer, the loss of each sample."""

import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import TorchTrainer, TrainingOperator
from lockstep.trainer.step_examination import (
    ExaminedStep,
    StepExamination,
    loss_name,
    outstanding_layers,
)
from lockstep.trainer.step_replay import replay_run

ROWS, OF_SHARD, BAD = 48, 4, 29


class Regression(TrainingOperator):
    """One target is a thousand times too large; dropout, batch norm, clipping by the trainer."""

    def setup(self, config):
        generator = torch.Generator().manual_seed(0)
        features = torch.randn(ROWS, 3, generator=generator)
        targets = features.sum(dim=1, keepdim=True)
        targets[BAD] *= 1000
        model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))
        self.model, self.optimizer, self.criterion = self.register(
            models=model,
            optimizers=torch.optim.SGD(model.parameters(), lr=1e-4),
            criterion=nn.MSELoss(),
        )
        self.register_data(train_loader=self.loader(TensorDataset(features, targets)))

    def loader(self, data):
        return DataLoader(data, OF_SHARD, shuffle=True)


class OwnLoop(Regression):
    def train_batch(self, batch, batch_info):
        features, targets = batch
        loss = self.criterion(self.model(features), targets)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return {"train_loss": loss.item()}


class NeedsTwo(Regression):
    """No batch of one sample."""

    def compute_loss(self, batch, batch_info):
        if len(batch[0]) == 1:
            raise ValueError("a pair, please")
        return super().compute_loss(batch, batch_info)


class Stateful(Regression):
    """Its loss depends on whatever a forward or `compute_loss` has changed before."""

    def setup(self, config):
        super().setup(config)
        self.calls, self.seen, self.by_name = 0, [], {}
        self.model.register_buffer("queue", torch.zeros(()))

    def compute_loss(self, batch, batch_info):
        features, targets = batch
        features.mul_(1.01)
        self.calls += 1
        self.seen.append(len(features))
        self.by_name["last"] = len(self.seen)
        self.model.queue += 0.01
        state = self.calls + len(self.seen) + self.by_name["last"] + self.model.queue
        state = state + torch.randn(())
        return self.criterion(self.model(features), targets) * (1 + 0.01 * state)


class TwoPlayers(TrainingOperator):
    """While the first optimizer steps, the second one's gradient is that of the batch before."""

    def setup(self, config):
        torch.manual_seed(0)
        models = [nn.Linear(3, 2), nn.Linear(2, 1, dtype=torch.complex64)]
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in models]
        self.models, self.optimizers = self.register(models=models, optimizers=optimizers)
        features = torch.randn(16, 3, generator=torch.Generator().manual_seed(0))
        self.register_data(train_loader=DataLoader(TensorDataset(features), 4))

    def train_batch(self, batch, batch_info):
        for player, optimizer in enumerate(self.optimizers):
            output = self.models[0](batch[0])
            if player:
                output = self.models[1](output.detach().to(torch.complex64)).abs()
            loss = output.square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        gradients = [each.grad.norm().item() for each in self.models[1].parameters()]
        return {"train_loss": loss.item(), "norm": math.hypot(*gradients)}


class OneRefused(Regression):
    """One sample is none that can stand alone."""

    def compute_loss(self, batch, batch_info):
        if len(batch[0]) == 1 and float(batch[1]) > 100:
            raise ValueError("what a height")
        return super().compute_loss(batch, batch_info)


class Listed(Regression):
    """Gets a list of sequences of unequal lengths, each with its target."""

    def loader(self, data):
        samples = [(x.expand(1 + n % 3, 3), y) for n, (x, y) in enumerate(data)]
        return DataLoader(samples, OF_SHARD, shuffle=True, collate_fn=list)

    def compute_loss(self, batch, batch_info):
        features = torch.stack([sequence[0] for sequence, _ in batch])
        targets = torch.stack([target for _, target in batch])
        return self.criterion(self.model(features), targets)


def trained(folder, operator_cls, *, epochs=2, **arguments):
    arguments = {"num_shards": 2, "reproducible": True} | arguments
    with TorchTrainer(
        training_operator_cls=operator_cls,
        checkpoint_dir=folder,
        checkpoint_every=4,
        **arguments,
    ) as trainer:
        for _ in range(epochs):
            trainer.train()


def examined(folder, operator_cls, steps, step):
    examination = StepExamination(steps)
    report = replay_run(
        partial(TorchTrainer, training_operator_cls=operator_cls),
        folder=folder,
        step=step,
        inspection=examination,
    )
    assert report.same_bits, str(report)
    assert [each.step for each in examination.examined] == list(steps)
    return examination


def test_samples_in_a_list_are_examined_one_by_one(tmp_path):
    trained(tmp_path, Listed, epochs=1)
    examination = examined(tmp_path, Listed, range(1, 7), 3)
    assert not any(each.no_samples_because for each in examination.examined)
    assert all(len(each.samples) == 2 * OF_SHARD for each in examination.examined)
    (bad,) = [each for each in examination.examined if each.samples[0].name == f"dataset[{BAD}]"]
    assert bad.samples[0].loss > 1000 * bad.samples[1].loss


@pytest.mark.parametrize("arguments", [{}, {"clip_grad_norm": 0.5}, {"precision": "bf16"}])
def test_the_bad_sample_is_the_largest_of_its_step(tmp_path, arguments):
    """Although examining it runs the user's loss on each sample, the step keeps its bits."""
    trained(tmp_path, Regression, **arguments)
    examination = examined(tmp_path, Regression, range(1, 13), 7)
    assert not any(each.no_samples_because for each in examination.examined)
    assert all(len(each.samples) == 2 * OF_SHARD for each in examination.examined)
    worst = [each for each in examination.examined if each.samples[0].name == f"dataset[{BAD}]"]
    assert len(worst) == 2, "once in each of two epochs"
    for bad in worst:
        assert bad.samples[0].loss > 1000 * bad.samples[1].loss
        others = [each for each in examination.examined if each not in worst]
        assert bad.norm > 50 * max(each.norm for each in others), "the norm before clipping"
        layer, _, times = outstanding_layers(bad, examination.examined)[0]
        assert times > 50
        assert layer in ("0", "1", "3")


def test_the_norms_are_those_of_the_gradient(tmp_path):
    trained(tmp_path, Regression, num_shards=1)
    (step,) = examined(tmp_path, Regression, range(1, 2), 1).examined
    norms = []

    class Plain(Regression):
        def compute_loss(self, batch, batch_info):
            loss = super().compute_loss(batch, batch_info)
            gradients = torch.autograd.grad(loss, [*self.model.parameters()], retain_graph=True)
            norms.append(math.hypot(*(float(each.norm()) for each in gradients)))
            return loss

    with TorchTrainer(training_operator_cls=Plain, reproducible=True, num_shards=1) as trainer:
        trainer.train(num_steps=1)
    assert step.norm == pytest.approx(norms[0], rel=1e-5)
    assert step.norm == pytest.approx(math.hypot(*step.norms.values()))


def test_a_loop_of_its_own_has_norms_and_says_why_it_has_no_samples(tmp_path):
    trained(tmp_path, OwnLoop, num_shards=1, reproducible=False)
    examination = examined(tmp_path, OwnLoop, range(3, 6), 4)
    assert all(each.norm > 0 for each in examination.examined)
    assert not any(each.samples for each in examination.examined)
    assert all("compute_loss" in each.no_samples_because for each in examination.examined)


def test_a_loss_that_takes_no_single_sample_says_so(tmp_path):
    trained(tmp_path, NeedsTwo)
    examination = examined(tmp_path, NeedsTwo, range(3, 6), 4)
    reasons = {each.no_samples_because for each in examination.examined}
    assert reasons == {"ValueError: a pair, please"}
    assert all(each.norm > 0 for each in examination.examined)


def test_one_sample_that_cannot_stand_alone_hides_its_own_step_only(tmp_path):
    trained(tmp_path, OneRefused)
    steps = examined(tmp_path, OneRefused, range(1, 7), 3).examined
    unknown = [each for each in steps if each.no_samples_because is not None]
    assert [each.no_samples_because for each in unknown] == ["ValueError: what a height"]
    assert all(bool(each.samples) is (each not in unknown) for each in steps)


def test_what_a_loss_changes_is_put_back_after_the_samples(tmp_path):
    trained(tmp_path, Stateful)
    examination = examined(tmp_path, Stateful, range(1, 7), 3)  # asserts the same bits
    assert all(each.samples for each in examination.examined)


def test_each_optimizers_gradient_is_taken_before_its_own_step(tmp_path):
    trained(tmp_path, TwoPlayers, num_shards=1, reproducible=False)
    steps = examined(tmp_path, TwoPlayers, range(1, 5), 2).examined
    assert [sorted(each.norms) for each in steps] == [["models.0", "models.1"]] * 4
    assert all(each.norms["models.0"] > 0 for each in steps)
    for each in steps:
        assert each.norms["models.1"] == pytest.approx(each.metrics["norm"], rel=1e-5)


def test_accumulated_gradients_belong_to_the_step_that_closes_their_window(tmp_path):
    trained(tmp_path, Regression, accumulate=2)
    examination = examined(tmp_path, Regression, range(1, 6), 3)
    assert [each.norm is not None for each in examination.examined] == [False, True] * 2 + [False]
    assert all(len(each.samples) == 2 * OF_SHARD for each in examination.examined)


def test_the_loss_is_the_metric_that_says_so():
    step = ExaminedStep(1, (0, 0), {"accuracy": 0.5, "train_loss": 2.0}, [], {}, [])
    assert loss_name([step]) == "train_loss"
    assert loss_name([]) == "train_loss"


def test_a_gradient_that_is_no_number_stands_first():
    steps = [
        ExaminedStep(n, (0, n), {}, [], {"a": 2.0, "b": b}, [])
        for n, b in enumerate([1.0, math.nan, 1.0])
    ]
    assert outstanding_layers(steps[1], steps)[0][0] == "b"

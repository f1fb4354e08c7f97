# SPDX-License-Identifier: Apache-2.0
"""Models with buffers, random numbers or parameters in the loss; what is drawn and moved.

`lockstep.operator.registration` and `lockstep.operator.shard_buffers` in whole runs.
"""

import copy
import subprocess
import sys

import numpy as np
import pytest
import torch
from tests.unit.trainer.programs import (
    BATCH,
    SAMPLES,
    Regression,
    linear,
    loader,
    problem,
    same,
    sgd,
    trainer,
    weights,
)
from torch import nn

import lockstep
from lockstep import TrainingOperator
from lockstep.randomness import RandomState


class ScaledLoss(nn.Module):
    """A criterion that is part of the model: it holds a parameter and a buffer."""

    def __init__(self):
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def forward(self, output, target):
        if self.training:
            self.count += 1
        return ((output - target).square() * self.log_scale.exp() - self.log_scale).mean()


class WithCriterion(TrainingOperator):
    def setup(self, config):
        self.model, self.criterion = linear(), ScaledLoss()
        parameters = [*self.model.parameters(), *self.criterion.parameters()]
        self.optimizer = torch.optim.SGD(parameters, lr=0.1)
        self.register(models=self.model, optimizers=self.optimizer, criterion=self.criterion)
        self.register_data(train_loader=loader(), validation_loader=loader())


class SharesItsBias(nn.Module):
    """A criterion that holds a parameter of the model's."""

    def __init__(self, bias):
        super().__init__()
        self.bias = bias

    def forward(self, output, target):
        return (output - target).square().mean() + self.bias.square().sum()


class WithSharedBias(TrainingOperator):
    def setup(self, config):
        self.model = linear()
        self.criterion = SharesItsBias(self.model.bias)
        self.optimizer = sgd(self.model)
        self.register(models=self.model, optimizers=self.optimizer, criterion=self.criterion)
        self.register_data(train_loader=loader())


def test_a_parameter_of_two_modules_is_clipped_once():
    features, target = problem()
    model = linear()
    criterion, optimizer = SharesItsBias(model.bias), sgd(model)
    optimizer.zero_grad()
    criterion(model(features[:BATCH]), target[:BATCH]).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    with trainer(WithSharedBias, clip_grad_norm=0.1) as one:
        one.train(num_steps=1)
        assert same(weights(one.get_model()), weights(model))


class WithACopiedLocalLayer(TrainingOperator):
    """The local layer's gradient is much longer than the other one's."""

    def setup(self, config):
        model = nn.Sequential(linear(), lockstep.local(nn.Linear(1, 1).double()))
        self.model = copy.deepcopy(model)
        self.register(models=self.model, optimizers=sgd(self.model))
        self.register_data(train_loader=loader())

    def compute_loss(self, batch, batch_info):
        features, target = batch
        own = 100.0 * self.model[1](torch.ones(1, 1, dtype=torch.float64)).sum()
        return (self.model[0](features) - target).square().mean() + own


@pytest.mark.parametrize("wrap_ddp", [True, False])
def test_a_deep_copy_of_a_local_layer_is_no_part_of_the_norm_that_is_clipped(wrap_ddp):
    features, target = problem()
    model = linear()
    optimizer = sgd(model)
    (model(features[:BATCH]) - target[:BATCH]).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    with trainer(WithACopiedLocalLayer, clip_grad_norm=0.1, wrap_ddp=wrap_ddp) as one:
        if wrap_ddp:
            assert one.verify(num_steps=2).ok
        one.train(num_steps=1)
        assert same(weights(one.get_model()[0]), weights(model))


def test_a_criterion_with_parameters_is_trained_and_saved(tmp_path):
    features, target = problem()
    model, criterion = linear(), ScaledLoss()
    optimizer = torch.optim.SGD([*model.parameters(), *criterion.parameters()], lr=0.1)
    for start in range(0, SAMPLES, BATCH):
        optimizer.zero_grad()
        criterion(model(features[start : start + BATCH]), target[start : start + BATCH]).backward()
        optimizer.step()
    with trainer(WithCriterion) as one:
        one.train()
        one.validate()
        trained = one.get_local_operator().criterion
        assert same(trained.log_scale.detach(), criterion.log_scale.detach())
        assert trained.count == 4  # `validate` puts the criterion, too, into eval mode
        assert same(weights(one.get_model()), weights(model))
        path = one.save(tmp_path / "run.pt")
    with trainer(WithCriterion) as one:
        one.load(path)
        loaded = one.get_local_operator().criterion
        assert torch.equal(loaded.log_scale, trained.log_scale)
        assert loaded.count == 4


class Normalised(TrainingOperator):
    def setup(self, config):
        torch.manual_seed(2)
        self.model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)).double()
        self.optimizer = sgd(self.model)
        self.register(models=self.model, optimizers=self.optimizer, criterion=nn.MSELoss())
        self.register_data(train_loader=loader(), validation_loader=loader())


def test_running_statistics_are_those_of_plain_training():
    features, target = problem()
    torch.manual_seed(2)
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)).double()
    optimizer = sgd(model)
    for start in range(0, SAMPLES, BATCH):
        optimizer.zero_grad()
        rows = slice(start, start + BATCH)
        nn.functional.mse_loss(model(features[rows]), target[rows]).backward()
        optimizer.step()
    with trainer(Normalised) as one:
        one.train()
        one.validate()
        got = one.get_model().state_dict()
    for name, value in model.state_dict().items():
        assert same(got[name], value), name


class Dropped(TrainingOperator):
    def setup(self, config):
        self.model = nn.Sequential(nn.Linear(3, 16), nn.Dropout(0.5), nn.Linear(16, 2)).double()
        self.optimizer = sgd(self.model)
        self.register(models=self.model, optimizers=self.optimizer, criterion=nn.MSELoss())
        self.register_data(train_loader=loader(shuffle=True))


def dropped(seed):
    with trainer(Dropped, seed=seed) as one:
        one.train(num_steps=6)
        return weights(one.get_model())


def test_dropout_initial_weights_and_order_follow_from_the_seed():
    first = dropped(seed=1)
    torch.manual_seed(99)
    np.random.seed(99)
    assert torch.equal(dropped(seed=1), first)
    assert not torch.allclose(dropped(seed=2), first)


def same_random_state(before, after):
    return (
        torch.equal(before.cpu, after.cpu)
        and before.python == after.python
        and all(np.array_equal(a, b) for a, b in zip(before.numpy, after.numpy, strict=True))
    )


def test_random_numbers_threads_and_flags_are_as_before_after_each_call(tmp_path):
    before = RandomState.capture()
    threads = torch.get_num_threads()
    flags = torch.are_deterministic_algorithms_enabled(), torch.is_grad_enabled()

    def check():
        assert same_random_state(before, RandomState.capture())
        assert torch.get_num_threads() == threads
        assert flags == (torch.are_deterministic_algorithms_enabled(), torch.is_grad_enabled())

    one = trainer(Dropped)
    check()
    for call in (
        lambda: one.train(num_steps=5),
        one.train,
        one.state_dict,
        lambda: one.load(one.save(tmp_path / "run.pt")),
        one.get_model,
        one.shutdown,
    ):
        call()
        check()


def test_random_numbers_are_as_before_after_a_failure_too():
    class Failing(Dropped):
        def compute_loss(self, batch, batch_info):
            raise ZeroDivisionError

    with trainer(Failing) as one:
        before = RandomState.capture()
        with pytest.raises(ZeroDivisionError):
            one.train()
        assert same_random_state(before, RandomState.capture())


PROGRAM = """
import sys
from tests.unit.trainer.programs import Regression, trainer
with trainer(Regression, use_local=True) as one:
    one.train(num_steps=5)
    one.validate()
    one.load_state_dict(one.state_dict())
    one.get_model()
    one.apply_all_workers(int)
print("ray" in sys.modules, "torch.distributed" in sys.modules and
      sys.modules["torch.distributed"].is_initialized())
"""


@pytest.mark.slow
def test_one_worker_needs_neither_ray_nor_a_process_group():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": ":".join(sys.path), "PATH": ""},
    )
    assert done.stdout.split() == ["False", "False"]


def test_precisions_of_the_default_loop_train():
    class Single(Regression):
        def setup(self, config):
            self.model = linear().float()
            self.optimizer, self.criterion = sgd(self.model), nn.MSELoss()
            self.register(models=self.model, optimizers=self.optimizer, criterion=self.criterion)
            self.register_data(train_loader=loader())

        def compute_loss(self, batch, batch_info):
            features, target = (tensor.float() for tensor in batch)
            output = self.model(features)
            self.dtype = output.dtype
            return self.criterion(output, target)

    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        with trainer(Single, precision=precision) as one:
            losses = [one.train()["train_loss"] for _ in range(4)]
            assert one.get_local_operator().dtype == dtype
        assert losses[-1] < losses[0]


class Distilled(TrainingOperator):
    """A student beside a frozen teacher, through a criterion that drops inputs while it trains."""

    def setup(self, config):
        self.model, self.teacher = linear(), normalised_teacher()
        self.criterion = nn.Sequential(nn.Dropout(0.5), nn.Flatten(0)).eval()
        self.optimizer = sgd(self.model)
        self.register(
            models=[self.model, self.teacher], optimizers=self.optimizer, criterion=self.criterion
        )
        self.register_data(train_loader=loader(), validation_loader=loader())

    def compute_loss(self, batch, batch_info):
        output = self.model(batch[0])
        return distance(self.criterion, output, self.teacher(batch[0]))


def normalised_teacher():
    teacher = nn.Sequential(linear(seed=1), nn.BatchNorm1d(2, dtype=torch.float64))
    teacher[1].running_mean.fill_(0.5)
    return teacher.requires_grad_(False).eval()


def distance(criterion, output, target):
    return criterion(output - target).square().mean()


def test_what_no_optimizer_trains_keeps_its_mode():
    model, teacher, dropout = linear(), normalised_teacher(), nn.Identity()
    optimizer = sgd(model)
    for _ in range(2):
        for features, _ in loader():
            optimizer.zero_grad()
            distance(dropout, model(features), teacher(features)).backward()
            optimizer.step()
    with trainer(Distilled) as one:
        one.train()
        one.validate()
        one.train()
        models = one.get_model()
    assert same(weights(models[0]), weights(model))
    assert torch.equal(models[1][1].running_mean, teacher[1].running_mean)


class ValidatesInBatches(Normalised):
    """Validates in the middle of an epoch, as evaluation every few steps does."""

    def train_batch(self, batch, batch_info):
        self.modes = [*getattr(self, "modes", []), self.model.training]
        metrics = super().train_batch(batch, batch_info)
        self.validate(loader(), {})
        return metrics


def test_a_validation_leaves_the_modes_as_it_found_them():
    with trainer(ValidatesInBatches) as one:
        one.train()
        operator = one.get_local_operator()
        assert operator.modes == [True] * 4
        operator.model.eval()
        operator.model[0].train()
        one.validate()
        assert [each.training for each in operator.model] == [True, False]

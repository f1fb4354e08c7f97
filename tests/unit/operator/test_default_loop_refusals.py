# SPDX-License-Identifier: Apache-2.0
"""Optimizers that the default loop cannot step end the first `train`, and not `validate`."""

import pytest
import torch
from tests.unit.trainer.programs import Regression, by_hand, linear, loader, same, trainer, weights
from torch import nn

import lockstep
from lockstep.errors import ConfigurationError
from lockstep.operator import Options
from lockstep.worker import LoopRequest, WorkerSpec
from ranks.table import worker_outcomes


class TwoOptimizers(Regression):
    def setup(self, config):
        model = nn.Sequential(linear(), nn.Linear(2, 2).double())
        optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model]
        self.register(models=model, optimizers=optimizers, criterion=nn.MSELoss())
        self.optimizer = optimizers[0]
        self.register_data(train_loader=loader(), validation_loader=loader())


class StepsTheSecondAfterwards(TwoOptimizers):
    def setup(self, config):
        super().setup(config)
        self.steps = 0

    def after_step(self):
        self.steps += 1


class StepsTheSecond(TwoOptimizers):
    def after_step(self):
        second = self._lockstep.registered.optimizers[1]
        second.step()
        second.zero_grad()


class SwitchesLater(Regression):
    """Both optimizers hold all parameters."""

    def setup(self, config):
        model = linear()
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2)]
        self.register(models=model, optimizers=optimizers, criterion=nn.MSELoss())
        self.optimizer = optimizers[0]
        self.register_data(train_loader=loader(), validation_loader=loader())


class HasAFrozenLayerLeft(TwoOptimizers):
    def setup(self, config):
        super().setup(config)
        self._lockstep.registered.plain_models()[0][1].requires_grad_(False)


class Closure(Regression):
    def setup(self, config):
        model = linear()
        optimizer = torch.optim.LBFGS(model.parameters())
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=optimizer, criterion=nn.MSELoss()
        )
        self.register_data(train_loader=loader(), validation_loader=loader())


@pytest.mark.parametrize(
    ("operator_cls", "text"), [(TwoOptimizers, "2 were registered"), (Closure, "closure")]
)
def test_what_the_default_loop_would_not_step_is_refused(operator_cls, text):
    with trainer(operator_cls) as one:
        one.validate()
        with pytest.raises(ConfigurationError, match=text):
            one.train()


def test_a_second_optimizer_may_step_after_the_first_one():
    with trainer(StepsTheSecondAfterwards) as one:
        one.train(num_steps=2)
        assert one.get_local_operator().steps == 2


def test_a_second_optimizer_that_after_step_steps_calls_no_after_step(caplog):
    with trainer(StepsTheSecond) as one:
        before = one.get_model()[1].weight.clone()
        one.train(num_steps=2)
        assert not torch.equal(one.get_model()[1].weight, before)
    assert "has not" not in caplog.text


def test_a_second_optimizer_that_nobody_steps_is_told_once(caplog):
    with trainer(StepsTheSecondAfterwards) as one:
        one.train(num_steps=2)
        one.train(num_steps=2)
    assert caplog.text.count("SGD has stepped and SGD has not") == 1


@pytest.mark.parametrize("operator_cls", [SwitchesLater, HasAFrozenLayerLeft])
def test_other_optimizers_without_parameters_of_their_own_that_train_are_no_matter(operator_cls):
    with trainer(operator_cls) as one:
        one.train(num_steps=1)


def put_another_optimizer(operator):
    operator.optimizer = torch.optim.SGD(operator.model.parameters(), lr=0.001)


class CallsTheDefaultBatch(Regression):
    def train_epoch(self, iterator, info):
        for batch in iterator:
            result = self.train_batch(batch, info)
        return result


@pytest.mark.parametrize("operator_cls", [Regression, CallsTheDefaultBatch])
def test_another_optimizer_in_the_place_of_the_registered_one_is_refused(operator_cls):
    with trainer(operator_cls) as one:
        one.train(num_steps=1)
        before = weights(one.get_model()).clone()
        one.apply_all_operators(put_another_optimizer)
        with pytest.raises(ConfigurationError, match="no checkpoint would hold it"):
            one.train(num_steps=1)
        assert torch.equal(weights(one.get_model()), before)


class Wrapper(torch.optim.Optimizer):
    """Steps the one whose groups it has, as a package's around any optimizer does."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.__dict__["inner"], name)

    def step(self, closure=None):
        return self.inner.step()


class Wraps(Regression):
    def setup(self, config):
        super().setup(config)
        self.optimizer = Wrapper(self.optimizer)


def test_a_wrapper_of_the_registered_optimizer_may_be_stepped():
    with trainer(Wraps) as one:
        one.train(num_steps=3)
        assert same(weights(one.get_model()), by_hand(3))


class OfEachItsOwn(Regression):
    def setup(self, config):
        model = nn.Sequential(linear(), nn.Linear(2, 2).double())
        lockstep.local(model[1])
        self.model, self.optimizer, self.criterion = self.register(
            models=model,
            optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
            criterion=nn.MSELoss(),
        )
        self.register_data(train_loader=loader())


@pytest.mark.parametrize("num_workers", [1, 2])
def test_one_worker_alone_may_not_skip_a_step_of_fp16(num_workers):
    spec = WorkerSpec(
        OfEachItsOwn, {}, num_workers, num_shards=2, seed=0, options=Options(precision="fp16")
    )

    def body(worker):
        return worker.train(LoopRequest("train", 1, False, {}))

    for result in worker_outcomes(spec, body):
        assert isinstance(result, ConfigurationError) == (num_workers == 2)
        assert num_workers == 1 or "fp16" in str(result)

# SPDX-License-Identifier: Apache-2.0
"""What is behind an optimizer's step decides whether a step that fails there counts."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.errors import TrainerClosedError
from lockstep.operator import Options
from lockstep.worker import LoopRequest, WorkerSpec
from ranks.table import run_workers
from unit.trainer.programs import (
    Regression,
    by_hand,
    linear,
    loader,
    problem,
    same,
    sgd,
    trainer,
    weights,
)


class RaisesOnce(torch.optim.lr_scheduler.StepLR):
    """Lowers the rate, and raises then, in its third step."""

    def step(self, epoch=None):
        super().step(epoch)
        if self.last_epoch == 3:
            raise LookupError("no such metric")


class Scheduled(Regression):
    """The default loop; its scheduler steps with each batch."""

    scheduler = RaisesOnce

    def setup(self, config):
        self.model = linear()
        self.optimizer = sgd(self.model)
        self.register(
            models=self.model,
            optimizers=self.optimizer,
            criterion=torch.nn.MSELoss(),
            schedulers=self.scheduler(self.optimizer, 1, gamma=0.9),
        )
        self.register_data(train_loader=loader())


def test_a_step_of_the_default_loop_whose_scheduler_fails_counts(caplog):
    good = type("Good", (Scheduled,), {"scheduler": torch.optim.lr_scheduler.StepLR})
    with trainer(good, scheduler_step_freq="batch") as run:
        run.train()
        expected = weights(run.get_model())
    with trainer(Scheduled, scheduler_step_freq="batch") as run:
        with pytest.raises(LookupError):
            run.train()
        assert run.status()["step"] == 3
        assert "step 2 counts: its optimizers had stepped when the loop failed" in caplog.text
        run.train()
        assert same(weights(run.get_model()), expected)


def test_the_first_step_of_the_default_loop_counts_too():
    class Fails(torch.optim.lr_scheduler.StepLR):
        def step(self, epoch=None):
            super().step(epoch)
            if self.last_epoch == 1:
                raise LookupError("no such metric")

    first = type("First", (Scheduled,), {"scheduler": Fails})
    with trainer(first, scheduler_step_freq="batch") as run:
        with pytest.raises(LookupError):
            run.train()
        assert run.status()["step"] == 1
        assert same(weights(run.get_model()), by_hand(1))


class FailsHalfWay(torch.optim.SGD):
    """Changes weights in its fourth step, and raises before the step is complete."""

    steps = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.steps += 1
        if self.steps == 4:
            next(iter(self.param_groups[0]["params"])).add_(1)
            raise LookupError("out of memory")
        return super().step(closure)


@pytest.mark.parametrize("is_own", [False, True])
def test_a_step_that_its_optimizer_has_not_finished_does_not_count(is_own):
    class HalfWay(Regression):
        def setup(self, config):
            self.model = linear()
            self.optimizer = FailsHalfWay(self.model.parameters(), lr=0.1)
            self.register(
                models=self.model, optimizers=self.optimizer, criterion=torch.nn.MSELoss()
            )
            self.register_data(train_loader=loader())

    bases = (HalfWay, OwnLoop) if is_own else (HalfWay,)
    with trainer(type("Operator", bases, {})) as run:
        with pytest.raises(LookupError):
            run.train()
        with pytest.raises(TrainerClosedError, match="cannot go back"):
            run.get_model()


class OwnLoop(Regression):
    def setup(self, config):
        model = torch.nn.Sequential(torch.nn.BatchNorm1d(3).double(), linear())
        self.model, self.optimizer = self.register(models=model, optimizers=sgd(model))
        self.register_data(train_loader=loader())

    def train_batch(self, batch, batch_info):
        features, target = batch
        self.optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(self.model(features), target)
        loss.backward()
        self.optimizer.step()
        self.log(loss.detach())
        return {"train_loss": loss.item()}

    def log(self, loss):
        pass


class Gathers(OwnLoop):
    def log(self, loss):
        lockstep.gather(loss.reshape(1))


@pytest.mark.parametrize("sync", ["replicate", "ddp"])
@pytest.mark.parametrize("operator_cls", [OwnLoop, Gathers])
def test_weights_are_copied_for_a_loop_that_gathers_behind_its_step_and_for_no_other(
    operator_cls, sync
):
    options = Options(sync=sync, check_finite=True)
    spec = WorkerSpec(operator_cls, {}, 2, num_shards=2, seed=0, options=options)

    def body(worker):
        worker.train(LoopRequest("train", 3, False, {}))
        return worker.rollback._loop.may_communicate_after_optimizer

    assert run_workers(spec, body) == [operator_cls is Gathers] * 2


class Normalised(Regression):
    def setup(self, config):
        self.model = torch.nn.Sequential(torch.nn.BatchNorm1d(3).double(), linear())
        self.optimizer, self.criterion = sgd(self.model), torch.nn.MSELoss()
        self.register(models=self.model, optimizers=self.optimizer, criterion=self.criterion)
        self.register_data(train_loader=loader())


def test_a_call_that_begins_within_a_window_leaves_the_statistics_as_they_are():
    with trainer(Normalised, accumulate=3) as run:
        run.train(num_steps=4)
        through = run.get_model()[0].running_mean
        assert run.get_model()[0].num_batches_tracked == 4
    with trainer(Normalised, accumulate=3) as run:
        for _ in range(4):
            run.train(num_steps=1)
        assert run.get_model()[0].num_batches_tracked == 4
        assert torch.equal(run.get_model()[0].running_mean, through)


class OfPairs(Regression):
    """Its own loss; what is last in a batch is no target of the criterion."""

    def setup(self, config):
        self.model = linear()
        self.optimizer = sgd(self.model)
        self.criterion = torch.nn.CrossEntropyLoss(weight=torch.ones(2, dtype=torch.float64))
        self.register(models=self.model, optimizers=self.optimizer, criterion=self.criterion)
        features, _ = problem()
        data = TensorDataset(features, torch.zeros(len(features)).long(), torch.arange(22) + 50)
        self.register_data(train_loader=DataLoader(data, 6))

    def compute_loss(self, batch, batch_info):
        return self.criterion(self.model(batch[0]), batch[1])


def test_a_loss_of_ones_own_may_have_batches_of_any_form():
    with trainer(OfPairs) as run:
        assert run.train()["batch_count"] == 4

# SPDX-License-Identifier: Apache-2.0
"""The step that would put a first NaN or infinity into the weights is not taken, and named."""

import traceback
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep import TrainingOperator
from lockstep.errors import NonFiniteError
from lockstep.operator.non_finite_check import add_non_finite_checks
from unit.trainer.programs import sgd, trainer

BAD_ROW = 13


class Poisoned(TrainingOperator):
    """One sample makes the logarithm of a negative number."""

    average = None

    def setup(self, config):
        torch.manual_seed(0)
        hidden, last = nn.Linear(3, 4), nn.Linear(4, 1)
        self.model = nn.Sequential(hidden, nn.BatchNorm1d(4), Logarithm(), last).double()
        self.optimizer, self.criterion = self.stepper(), nn.MSELoss()
        self.register(
            models=self.model, optimizers=self.optimizer, criterion=self.criterion, ema=self.average
        )
        x = torch.rand(16, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        x[config.get("bad_row", BAD_ROW)] = config["bad"]
        self.register_data(train_loader=DataLoader(TensorDataset(x, x[:, :1]), 2))

    def stepper(self):
        return sgd(self.model)


class Logarithm(nn.Module):
    def forward(self, x):
        return x + 0 * x.sum()


class OwnLoop(Poisoned):
    def train_batch(self, batch, batch_info):
        features, target = batch
        self.optimizer.zero_grad()
        loss = self.criterion(self.model(features), target)
        self.backward(loss)
        self.optimizer.step()
        return {"train_loss": loss.item()}


def weights(run):
    return {k: v.clone() for k, v in run.get_local_operator().model.state_dict().items()}


def poisoned(operator=Poisoned, bad=float("nan"), bad_row=BAD_ROW, **arguments):
    return trainer(operator, num_shards=4, config={"bad": bad, "bad_row": bad_row}, **arguments)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e308])
def test_a_step_that_is_not_finite_is_not_taken_and_says_why(bad):
    with poisoned(bad=bad) as run:
        run.train(num_steps=1)
        parameters = list(run.get_local_operator().model.parameters())
        before = [parameter.detach().clone() for parameter in parameters]
        with pytest.raises(NonFiniteError) as caught:
            run.train()
        assert all(map(torch.equal, before, parameters))
    said = str(caught.value)
    assert "[LS115] a step would put NaN or infinity into the weights, and was not taken" in said
    batch = "in shard 2, 2 samples on rank 0 (dataset[12, 13], global batch 1 of epoch 0)"
    assert f"{batch}, the loss is" in said
    # The gradient is all ranks': the samples tell whose they are.
    assert caught.value.details["where"] == "step 2"
    assert ("first in the output of `0` (Linear)" in said) == (bad != 1e308)
    assert "check_finite=False" in said


class GoesOn(Poisoned):
    """A step that is not finite is left out, and the run goes on."""

    average = 0.9

    def train_batch(self, batch, batch_info):
        try:
            return {**super().train_batch(batch, batch_info), "skipped": 0}
        except NonFiniteError:
            return {"skipped": 1}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_caught_step_is_left_out_and_leaves_nothing_behind(accumulate):
    """Of an epoch's two global batches the second holds the sample."""
    with poisoned(GoesOn, accumulate=accumulate) as run:
        if accumulate == 1:
            assert run.train(num_steps=1)["skipped"] == 0
        before, average = weights(run), run.get_averaged_model().state_dict()
        assert run.train()["skipped"] > 0
        assert all(map(torch.equal, before.values(), weights(run).values()))
        now = run.get_averaged_model().state_dict()
        assert all(map(torch.equal, average.values(), now.values()))


def test_several_models_are_told_apart():
    class Two(Poisoned):
        def setup(self, config):
            first, second = nn.Linear(3, 3).double(), nn.Linear(3, 1).double()
            self.model, self.criterion = nn.Sequential(first, second), nn.MSELoss()
            self.optimizer = sgd(second)
            self.register(
                models=[first, second], optimizers=self.optimizer, criterion=self.criterion
            )
            x = torch.full((8, 3), float("nan"), dtype=torch.float64)
            self.register_data(train_loader=DataLoader(TensorDataset(x, x[:, :1]), 2))

    with trainer(Two, num_shards=4) as run, pytest.raises(NonFiniteError) as caught:
        run.train()
    assert "the gradient of `1.weight`, `1.bias`" in str(caught.value)


def test_a_micro_batch_before_the_last_is_looked_at_too():
    """The first of two global batches has the sample; the step is taken after the second."""
    with poisoned(accumulate=2, bad_row=3) as run, pytest.raises(NonFiniteError) as caught:
        run.train()
    said = str(caught.value)
    assert "(dataset[2, 3], global batch 0 of epoch 0), the loss is nan" in said
    assert "first in the output of `0` (Linear)" in said
    assert "the backward is not" not in said


def test_a_window_that_two_calls_share_is_looked_at_as_a_whole():
    with poisoned(accumulate=2, bad_row=3) as run:
        run.train(num_steps=1)
        with pytest.raises(NonFiniteError, match=r"batch 0 of epoch 0.*the loss is nan"):
            run.train(num_steps=1)


def test_what_cannot_be_computed_again_is_not_called_finite():
    class Once(Poisoned):
        def compute_loss(self, batch, batch_info):
            if not torch.is_grad_enabled():
                raise RuntimeError("a gradient penalty needs gradients")
            return super().compute_loss(batch, batch_info)

    with poisoned(Once) as run, pytest.raises(NonFiniteError) as caught:
        run.train()
    assert "the batch in shard 2, 2 samples on rank 0 (dataset[12, 13]" in str(caught.value)
    assert "the backward is not" not in str(caught.value)


def test_a_backward_that_is_not_finite_is_told_from_a_loss():
    class Root(Poisoned):
        def compute_loss(self, batch, batch_info):
            loss = super().compute_loss(batch, batch_info)
            first = next(self.model.parameters())
            return loss + (first - first.detach()).square().sum().sqrt()

    with poisoned(Root, bad=0.5) as run, pytest.raises(NonFiniteError) as caught:
        run.train()
    assert "the gradient of `0.weight`" in str(caught.value)
    assert "every forward and every loss is finite: the backward is not" in str(caught.value)
    assert "set_detect_anomaly(True)" in caught.value.details["fix"]


class OwnEpoch(Poisoned):
    def train_epoch(self, iterator, info):
        for batch in iterator:
            OwnLoop.train_batch(self, batch, info)
        return {}


@pytest.mark.parametrize("operator", [OwnLoop, OwnEpoch])
def test_a_loop_of_ones_own_does_not_step_either_and_is_explained(operator):
    with poisoned(operator) as run, pytest.raises(NonFiniteError, match="the gradient of") as said:
        run.train()
    assert "in shard 0, 8 samples on rank 0 (dataset[8, 9, 10, 11, 12" in str(said.value)
    lines = traceback.extract_tb(said.value.__traceback__)
    assert any(line.line == "self.optimizer.step()" for line in lines), "the user's line"
    assert "the loss is nan, first in the output of `0` (Linear)" in str(said.value)


class Overflowing(Poisoned):
    """All gradients are finite."""

    def stepper(self):
        kind = getattr(torch.optim, self.config["kind"])
        options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
        return kind(self.model.parameters(), lr=0.1, **options)


class OverflowingOwnLoop(Overflowing):
    train_batch = OwnLoop.train_batch


@pytest.mark.parametrize("kind", ["SGD", "Adam"])
@pytest.mark.parametrize("operator", [Overflowing, OverflowingOwnLoop])
def test_a_step_that_overflows_by_itself_is_taken_back(operator, kind):
    config = {"bad": 0.5, "kind": kind}
    with trainer(operator, num_shards=4, config=config) as run:
        run.train(num_steps=1)
        operator = run.get_local_operator()
        before = [parameter.detach().clone() for parameter in operator.model.parameters()]
        state = state_of(operator.optimizer)
        operator.optimizer.param_groups[0]["lr"] = 1e308
        operator.optimizer.param_groups[0]["weight_decay"] = 1e10
        with pytest.raises(NonFiniteError) as caught:
            run.train(num_steps=1)
        assert all(map(torch.equal, before, operator.model.parameters()))
        assert all(map(torch.equal, state, state_of(operator.optimizer)))
    assert "a step put NaN or infinity into the weights, which are as they were" in str(
        caught.value
    )
    assert "learning rate 1e+308" in str(caught.value)
    assert "the gradients are finite, and the step itself overflowed" in str(caught.value)


def test_a_step_with_a_learning_rate_that_is_no_number_is_taken_back():
    with trainer(Poisoned, config={"bad": 0.5}) as run:
        run.train(num_steps=1)
        operator = run.get_local_operator()
        before = [parameter.detach().clone() for parameter in operator.model.parameters()]
        operator.optimizer.param_groups[0]["lr"] = float("nan")
        with pytest.raises(NonFiniteError, match="learning rate nan"):
            run.train(num_steps=1)
        assert all(map(torch.equal, before, operator.model.parameters()))


def state_of(optimizer):
    return [value.clone() for held in optimizer.state.values() for value in held.values()]


class Closure(Poisoned):
    """The step computes its gradients itself, several times."""

    def stepper(self):
        return torch.optim.LBFGS(self.model.parameters(), lr=0.1, max_iter=3)

    def train_batch(self, batch, batch_info):
        features, target = batch

        def closure():
            self.optimizer.zero_grad()
            loss = self.criterion(self.model(features), target)
            self.backward(loss)
            return loss

        return {"train_loss": self.optimizer.step(closure).item()}


def test_a_step_with_a_closure_that_is_not_finite_is_taken_back():
    with poisoned(Closure) as run:
        run.train(num_steps=1)
        parameters = list(run.get_local_operator().model.parameters())
        before = [parameter.detach().clone() for parameter in parameters]
        with pytest.raises(NonFiniteError) as caught:
            run.train()
        assert all(map(torch.equal, before, parameters))
    assert "a step put NaN or infinity into the weights" in str(caught.value)
    assert "the loss is nan, first in the output of `0` (Linear)" in str(caught.value)


class Scaled(Poisoned):
    """A scaler of the user's own leaves the step out."""

    def setup(self, config):
        super().setup(config)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def train_batch(self, batch, batch_info):
        features, target = batch
        self.optimizer.zero_grad()
        loss = self.criterion(self.model(features), target)
        self.backward(self.scaler.scale(loss))
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return {"train_loss": 0.0}


def test_a_step_that_a_scaler_leaves_out_is_no_error():
    with poisoned(Scaled) as run:
        run.train(num_steps=1)
        operator = run.get_local_operator()
        before = [parameter.detach().clone() for parameter in operator.model.parameters()]
        run.train()
        assert all(map(torch.equal, before, operator.model.parameters()))
        assert operator.scaler.get_scale() == 2.0**9


def test_who_wants_to_goes_on():
    with poisoned(check_finite=False) as run:
        run.train()
        assert not all(bool(v.isfinite().all()) for v in weights(run).values())


def test_numbers_whose_squares_overflow_are_finite():
    class Large(Poisoned):
        def compute_loss(self, batch, batch_info):
            return super().compute_loss(batch, batch_info) * 1e200

    with poisoned(Large, bad=0.5, clip_grad_norm=None) as run:
        run.get_local_operator().optimizer.param_groups[0]["lr"] = 1e-300
        run.train(num_steps=1)


class FindsItsOwnRate(torch.optim.Optimizer):
    """As some optimizers for transformers do, whose groups say None."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": None})

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(parameter.grad, alpha=-1e-3)


def test_an_optimizer_without_a_learning_rate_is_looked_at_as_well():
    class Operator(Poisoned):
        def stepper(self):
            return FindsItsOwnRate(self.model.parameters())

    with poisoned(Operator) as run:
        run.train(num_steps=1)
        with pytest.raises(NonFiniteError, match="was not taken"):
            run.train()


class InShards(nn.Module):
    """A weight in shards beside one of this rank's own."""

    def __init__(self):
        super().__init__()
        mesh = DeviceMesh("cpu", [0])
        self.shared = nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]))
        self.own = lockstep.local(nn.Parameter(torch.ones(3)))
        for parameter in self.parameters():
            parameter.grad = torch.ones_like(parameter)


@pytest.fixture
def in_shards():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield InShards()
    dist.destroy_process_group()


def checked(model, **settings):
    """An optimizer of the model's parameters whose steps are checked."""
    state = SimpleNamespace(
        context=SimpleNamespace(options=SimpleNamespace(check_finite=True)), steps_taken_back=0
    )
    operator = SimpleNamespace(_lockstep=state, world_rank=0, global_step=0)
    run = SimpleNamespace(models=[model], modules=lambda: [model])
    optimizer = torch.optim.SGD(model.parameters(), **settings)

    def add(before, after):
        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)

    add_non_finite_checks(operator, run, SimpleNamespace(add=add))
    return optimizer


def test_a_step_of_shards_and_of_a_parameter_of_one_rank(in_shards):
    checked(in_shards, lr=0.5).step()
    assert in_shards.shared.to_local().equal(torch.full((4, 2), 0.5))
    assert in_shards.own.equal(torch.full((3,), 0.5))


@pytest.mark.parametrize(("name", "rank"), [("shared", ""), ("own", "rank 0, ")])
def test_a_gradient_in_shards_or_of_one_rank_is_named(in_shards, name, rank):
    getattr(in_shards, name).grad.mul_(torch.nan)
    with pytest.raises(NonFiniteError, match=rf"where +{rank}step 1\n  got +the.* of `{name}`\n"):
        checked(in_shards, lr=0.5).step()


@pytest.mark.parametrize("name", ["shared", "own"])
def test_a_step_that_overflows_in_shards_or_on_one_rank_is_taken_back(in_shards, name):
    with torch.no_grad():
        getattr(in_shards, name).grad.mul_(1e30)
    with pytest.raises(NonFiniteError, match=rf"as they were before it\n.*\n  got +`{name}`;"):
        checked(in_shards, lr=1e20).step()
    assert in_shards.shared.to_local().equal(torch.ones(4, 2))
    assert in_shards.own.equal(torch.ones(3))

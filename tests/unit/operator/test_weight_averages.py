# SPDX-License-Identifier: Apache-2.0
"""What follows an optimizer's step: averages of the weights, and `after_step`."""

from itertools import pairwise

import pytest
import torch
from tests.unit.trainer.programs import Regression, linear, loader, problem, same, sgd, trainer
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lockstep import TrainingOperator
from lockstep.errors import CheckpointError, ConfigurationError, LockstepError
from lockstep.keys import SCHEDULER_STEP

DECAY = 0.8


class Averaged(TrainingOperator):
    """The default loop; a layer with running statistics, so that buffers are averaged too."""

    def setup(self, config):
        model = nn.Sequential(linear(), nn.BatchNorm1d(2, dtype=torch.float64))
        self.model, self.optimizer, self.criterion, self.ema = self.register(
            models=model,
            optimizers=sgd(model),
            criterion=nn.MSELoss(),
            ema=config.get("ema", DECAY),
        )
        self.register_data(train_loader=loader(), validation_loader=loader())


def by_hand(steps, accumulate=1, clip=None):
    """torch's average of the model that plain autograd trains."""
    features, targets = problem()
    model = nn.Sequential(linear(), nn.BatchNorm1d(2, dtype=torch.float64))
    optimizer = sgd(model)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY), use_buffers=True)
    batches = [slice(start, start + 6) for start in range(0, 22, 6)]
    windows = [batches[n : n + accumulate] for n in range(0, len(batches), accumulate)]
    for step in range(steps):
        window = windows[step % len(windows)]
        optimizer.zero_grad()
        samples = sum(len(features[rows]) for rows in window)
        for rows in window:
            loss = nn.functional.mse_loss(model(features[rows]), targets[rows])
            (loss * len(features[rows]) / samples).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        average.update_parameters(model)
        average.module[1].num_batches_tracked.copy_(model[1].num_batches_tracked)
    return average.module


def equal(model, other):
    pairs = zip(model.state_dict().values(), other.state_dict().values(), strict=True)
    return all(same(mine.double(), theirs.double()) for mine, theirs in pairs)


@pytest.mark.parametrize("sync", ["replicate", "data_parallel"])
def test_an_average_is_torchs(sync):
    with trainer(Averaged, sync=sync) as one:
        one.train(num_steps=6)
        assert equal(one.get_averaged_model(), by_hand(6))
        assert not equal(one.get_model(), by_hand(6))


class Masked(nn.Module):
    """Buffers that never change: infinities, and integers too large for a product in floats."""

    def __init__(self):
        super().__init__()
        self.linear = linear()
        self.register_buffer("mask", torch.full((2,), float("-inf")))
        self.register_buffer("places", torch.arange(2**24 - 3, 2**24 + 4))

    def forward(self, x):
        return self.linear(x)


def test_buffers_that_are_no_running_statistics_are_the_models():
    class Constants(Averaged):
        def setup(self, config):
            model = Masked()
            self.model, self.optimizer, self.criterion, self.ema = self.register(
                models=model, optimizers=sgd(model), criterion=nn.MSELoss(), ema=0.9
            )
            self.register_data(train_loader=loader())

    with trainer(Constants) as one:
        one.train(num_steps=6)
        averaged, fresh = one.get_averaged_model(), Masked()
        assert torch.equal(averaged.mask, fresh.mask)
        assert torch.equal(averaged.places, fresh.places)
        assert not torch.equal(averaged.linear.weight, one.get_model().linear.weight)


class SetsBuffers(Masked):
    """Buffers that a forward makes, or replaces by longer ones."""

    def __init__(self):
        super().__init__()
        self.register_buffer("center", None)
        self.register_buffer("rows", torch.ones(2, dtype=torch.float64).to_sparse())
        self.register_buffer("wide", torch.ones(1).expand(8))

    def forward(self, x):
        self.center = torch.full((1,), 100.0)
        self.rows = torch.ones(len(x), dtype=torch.float64).to_sparse()
        return super().forward(x)


class Holds(nn.Module):
    """An activation on the module, and weights that are computed from others."""

    def __init__(self):
        super().__init__()
        with pytest.warns(FutureWarning):
            self.linear = nn.utils.weight_norm(linear())
        self(torch.ones(1, 3, dtype=torch.float64))

    def forward(self, x):
        self.last = self.linear(x)
        return self.last


@pytest.mark.parametrize("make", [SetsBuffers, Holds])
def test_an_average_goes_by_names(make, tmp_path):
    class Named(Averaged):
        def setup(self, config):
            self.model = make()
            self.optimizer, self.criterion = sgd(self.model), nn.MSELoss()
            *_, self.ema = self.register(
                models=self.model, optimizers=self.optimizer, criterion=self.criterion, ema=0.9
            )
            self.register_data(train_loader=loader())

    with trainer(Named) as one:
        one.train()
        one.train()
        averaged, model = (
            dict(m.state_dict()) for m in (one.get_averaged_model(), one.get_model())
        )
        assert averaged.keys() == model.keys()
        for name in averaged.keys() & {"mask", "places", "center", "rows", "wide"}:
            assert torch.equal(averaged[name].to_dense(), model[name].to_dense()), name
        assert not any(torch.equal(averaged[n], model[n]) for n in averaged if "linear" in n)
        state = one.state_dict()
        one.load_state_dict(state)
        one.train()


def test_a_parameter_that_an_average_has_not_is_refused():
    class Grows(Averaged):
        def compute_loss(self, batch, batch_info):
            self.model.later = nn.Parameter(torch.ones(1))
            return super().compute_loss(batch, batch_info)

    with trainer(Grows) as one, pytest.raises(LockstepError, match="later"):
        one.train()


def test_an_average_counts_steps_and_not_the_batches_of_a_window():
    # Four batches an epoch: a window of three, and one of one.
    with trainer(Averaged, accumulate=3, clip_grad_norm=0.1) as one:
        one.train(num_steps=3)
        assert equal(one.get_averaged_model(), by_hand(1, accumulate=3, clip=0.1))
        one.train()
        one.train()
        assert equal(one.get_averaged_model(), by_hand(4, accumulate=3, clip=0.1))


def test_a_call_that_ends_in_a_window_and_goes_on_averages_nothing_twice(tmp_path):
    with trainer(Averaged, accumulate=3) as one:
        one.train(num_steps=5)
        path = one.save(tmp_path / "state")
        one.train(num_steps=1)
        one.load(path)  # back to the start of the window
        one.train(num_steps=4)
        assert equal(one.get_averaged_model(), by_hand(4, accumulate=3))


def test_a_saved_average_goes_on(tmp_path):
    with trainer(Averaged) as one:
        one.train(num_steps=3)
        path = one.save(tmp_path / "state")
    with trainer(Averaged) as other:
        other.load(path)
        other.train(num_steps=3)
        assert equal(other.get_averaged_model(), by_hand(6))


class Plain(Averaged):
    def setup(self, config):
        model = nn.Sequential(linear(), nn.BatchNorm1d(2, dtype=torch.float64))
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=sgd(model), criterion=nn.MSELoss()
        )
        self.register_data(train_loader=loader(), validation_loader=loader())


def test_a_state_without_averages_begins_them_at_its_weights():
    with trainer(Plain) as plain:
        plain.train(num_steps=3)
        state, weights = plain.state_dict(), plain.get_model()
    with trainer(Averaged) as one:
        one.train(num_steps=2)
        one.load_state_dict(state)
        assert equal(one.get_averaged_model(), weights)
        one.train(num_steps=1)
        assert equal(one.get_averaged_model(), one.get_model())


def test_an_average_is_not_thrown_away_by_a_load():
    with trainer(Averaged) as one:
        state = one.state_dict()
    with trainer(Plain) as plain, pytest.raises(CheckpointError, match=r"1 averages \(ema\)"):
        plain.load_state_dict(state)


def test_there_is_no_average_without_ema():
    with trainer(Plain) as plain, pytest.raises(ConfigurationError, match=r"ema=0\.999"):
        plain.get_averaged_model()


class Evaluates(Averaged):
    """The page's way to validate the average: the default loop calls `self.model`."""

    def validate(self, val_iterator, info):
        trained, self.model = self.model, self.ema
        try:
            return super().validate(val_iterator, info)
        finally:
            self.model = trained


def test_validation_of_the_average_leaves_it_as_it_is():
    features, targets = problem()
    with trainer(Evaluates) as one:
        one.train(num_steps=5)
        average = by_hand(5).eval()
        loss = nn.functional.mse_loss(average(features), targets).item()
        assert one.validate()["val_loss"] == pytest.approx(loss, rel=1e-12)
        assert equal(one.get_averaged_model(), average)


@pytest.mark.parametrize("given", [1.5, 0, False, "0.9", nn.Linear(1, 1), lambda model: model])
def test_something_else_than_an_average_is_refused(given):
    with pytest.raises(ConfigurationError, match=r"ema="):
        trainer(Averaged, config={"ema": given})


def test_true_is_the_usual_decay_and_a_function_makes_any_average():
    for ema in (True, lambda model: AveragedModel(model), AveragedModel(by_hand(0))):
        with trainer(Averaged, config={"ema": ema}) as one:
            first = one.get_model()[0].weight
            weights = []
            for _ in range(2):
                one.train(num_steps=1)
                weights.append(one.get_model()[0].weight)
            decay = 0.999 if ema is True else 0.5
            expected = decay * weights[0] + (1 - decay) * weights[1]
            assert same(one.get_averaged_model()[0].weight, expected)
            assert not same(first, expected)


def test_an_average_of_another_model_is_refused():
    with pytest.raises(ConfigurationError, match="one AveragedModel"):
        trainer(Averaged, config={"ema": AveragedModel(nn.Linear(1, 1))})


class Halves(TrainingOperator):
    """Two optimizers share one model, and a second model steps in every other batch."""

    def setup(self, config):
        one, two = linear(0), linear(1)
        self.models, self.optimizers, self.averages = self.register(
            models=[one, two],
            optimizers=[
                torch.optim.SGD([one.weight], lr=0.1),
                torch.optim.SGD([one.bias], lr=0.1),
                torch.optim.SGD(two.parameters(), lr=0.1),
            ],
            ema=DECAY,
        )
        self.register_data(train_loader=loader())

    def train_batch(self, batch, batch_info):
        features, targets = batch
        steps_both = batch_info["global_step"] % 2 == 1
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        used = self.models if steps_both else self.models[:1]
        loss = sum(nn.functional.mse_loss(model(features), targets) for model in used)
        loss.backward()
        for optimizer in self.optimizers if steps_both else self.optimizers[:2]:
            optimizer.step()
        return {"train_loss": loss.item()}


def test_a_model_is_averaged_once_a_batch_in_which_one_of_its_optimizers_stepped():
    with trainer(Halves) as one:
        one.train()
        counts = one.apply_all_operators(lambda op: [int(a.n_averaged) for a in op.averages])[0]
    assert counts == [4, 2]


class TellsOfSteps(Regression):
    def setup(self, config):
        super().setup(config)
        self.after, self.drawn = [], []

    def after_step(self):
        self.after.append(self.model.weight.detach().clone())
        self.drawn.append(torch.rand(()).item())
        self.model.weight.clamp_(-0.5, 0.5)

    def state_dict(self):
        return {"after": self.after, "drawn": self.drawn}


class OwnBatch(TellsOfSteps):
    def train_batch(self, batch, batch_info):
        self.optimizer.zero_grad()
        loss = self.compute_loss(batch, batch_info)
        loss.backward()
        self.optimizer.step()
        return {"train_loss": loss.item()}


class OwnEpoch(TellsOfSteps):
    def train_epoch(self, iterator, info):
        for batch in iterator:
            OwnBatch.train_batch(self, batch, info)
        return {"train_loss": 0.0}


@pytest.mark.parametrize("operator", [TellsOfSteps, OwnBatch, OwnEpoch])
def test_after_step_follows_each_step_in_any_loop(operator):
    with trainer(operator) as one:
        one.train()
        told = one.state_dict()["operator"]
        weight = one.get_model().weight
    features, targets = problem()
    model = linear()
    optimizer = sgd(model)
    for step, start in enumerate(range(0, 22, 6)):
        rows = slice(start, start + 6)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(features[rows]), targets[rows]).backward()
        optimizer.step()
        assert same(told["after"][step], model.weight)
        with torch.no_grad():
            model.weight.clamp_(-0.5, 0.5)
    assert same(weight, model.weight)
    assert len(told["after"]) == 4
    assert len(set(told["drawn"])) == 4


class Overflows(TellsOfSteps):
    """The second step's gradients are infinite, and a scaler leaves the step out."""

    def setup(self, config):
        model = linear().float()
        self.model, self.optimizer, self.criterion, self.ema = self.register(
            models=model, optimizers=sgd(model), criterion=nn.MSELoss(), ema=DECAY
        )
        self.register_data(train_loader=loader())
        self.after, self.drawn = [], []

    def compute_loss(self, batch, batch_info):
        features, targets = batch
        loss = nn.functional.mse_loss(self.model(features.float()), targets.float())
        return loss * (float("inf") if batch_info["global_step"] == 1 else 1)


def test_a_step_that_a_scaler_left_out_is_followed_by_nothing():
    weights = []
    with trainer(Overflows, precision="fp16") as one:
        for _ in range(8):
            weights.append(one.get_model().weight)
            one.train(num_steps=1)
        weights.append(one.get_model().weight)
        told = one.state_dict()["operator"]
        (count,) = one.apply_all_operators(lambda op: int(op.ema.n_averaged))
    taken = sum(not torch.equal(a, b) for a, b in pairwise(weights))
    assert 0 < taken < 8
    assert len(told["after"]) == count == taken


class CallsSuper(Regression):
    """The default step, with something of the user's own around it."""

    def train_batch(self, batch, batch_info):
        features, targets = batch
        return {**super().train_batch((features + 0, targets), batch_info), "seen": 1.0}


class EpochOfDefaultSteps(Regression):
    def train_epoch(self, iterator, info):
        losses = [self.train_batch(batch, info)["train_loss"] for batch in iterator]
        return {"train_loss": float(sum(losses))}


ASKED = [{"clip_grad_norm": 0.05}, {"accumulate": 3}, {"accumulate": 3, "clip_grad_norm": 0.05}]


@pytest.mark.parametrize("operator", [CallsSuper, EpochOfDefaultSteps])
@pytest.mark.parametrize("asked", ASKED)
def test_what_the_default_step_does_it_does_when_it_is_called(operator, asked):
    trained = []
    for cls in (Regression, operator):
        with trainer(cls, **asked) as one:
            one.train()
            one.train(num_steps=3)
            trained.append(one.get_model())
    assert equal(*trained)


class StepsBesides(Regression):
    def train_batch(self, batch, batch_info):
        if batch_info["global_step"] < 2:
            return super().train_batch(batch, batch_info)
        return OwnBatch.train_batch(self, batch, batch_info)


@pytest.mark.parametrize("asked", [*ASKED, {"precision": "fp16"}])
def test_a_step_outside_the_default_loop_is_refused_before_it_is_taken(asked):
    with trainer(StepsBesides, **asked) as one:
        one.train(num_steps=2)
        with pytest.raises(ConfigurationError, match="the step was not taken") as caught:
            one.train(num_steps=2)
    assert "super().train_batch()" in str(caught.value)


class LeavesOut(Regression):
    def train_batch(self, batch, batch_info):
        if batch_info["global_step"] == 2:
            return {"train_loss": 0.0}
        return super().train_batch(batch, batch_info)


class ReadsAhead(Regression):
    def train_epoch(self, iterator, info):
        losses = [self.train_batch(batch, info)["train_loss"] for batch in list(iterator)]
        return {"train_loss": float(sum(losses))}


@pytest.mark.parametrize("operator", [LeavesOut, ReadsAhead])
def test_a_batch_that_falls_out_of_its_window_is_refused(operator):
    with (
        trainer(operator, accumulate=2) as one,
        pytest.raises(ConfigurationError, match="did not go through train_batch once"),
    ):
        one.train()


class NeverCalls(Regression):
    def train_batch(self, batch, batch_info):
        self.optimizer.zero_grad()
        self.criterion(self.model(batch[0]), batch[1]).backward()
        self.optimizer.step()
        return {}


@pytest.mark.parametrize("asked", [*ASKED, {"precision": "fp16"}, {"reproducible": True}])
def test_a_loop_that_is_plainly_ones_own_is_refused_before_anything_starts(asked):
    with pytest.raises(ConfigurationError, match="has its own train_batch"):
        trainer(NeverCalls, **asked)


def test_shards_come_one_by_one_only_without_an_override():
    with pytest.raises(ConfigurationError, match="reproducible belongs to the default loop"):
        trainer(CallsSuper, reproducible=True)


def test_a_scheduler_stays_the_default_loops_where_the_step_is_called():
    class Scheduled(CallsSuper):
        def setup(self, config):
            model = linear()
            optimizer = sgd(model)
            self.model, self.optimizer, self.criterion, self.scheduler = self.register(
                models=model,
                optimizers=optimizer,
                criterion=nn.MSELoss(),
                schedulers=torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
            )
            self.register_data(train_loader=loader())

        def train_batch(self, batch, batch_info):
            assert batch_info[SCHEDULER_STEP] == "batch"
            return super().train_batch(batch, batch_info)

    with trainer(Scheduled, scheduler_step_freq="batch", accumulate=2) as one:
        one.train()
        (rate,) = one.apply_all_operators(lambda op: op.optimizer.param_groups[0]["lr"])
    assert rate == pytest.approx(0.1 / 4)

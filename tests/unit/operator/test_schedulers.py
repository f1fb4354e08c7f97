# SPDX-License-Identifier: Apache-2.0
"""When registered schedulers step: every one of them, assigned to an attribute or not.

`lockstep.operator.default_loops` steps them, `lockstep.operator.registered_schedulers` finds them.
"""

import signal

import pytest
import torch
from tests.unit.trainer.programs import linear, loader, sgd, trainer
from torch import nn
from torch.optim.lr_scheduler import (
    LinearLR,
    MultiStepLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from lockstep import TrainingOperator
from lockstep.errors import ConfigurationError, NonFiniteError


def scheduled(make):
    class Scheduled(TrainingOperator):
        def setup(self, config):
            model = self.model = linear()
            self.optimizer = sgd(model)
            back = self.register(
                models=model,
                optimizers=self.optimizer,
                criterion=nn.MSELoss(),
                schedulers=make(self.optimizer),
            )
            assert len(back) == 4
            self.register_data(train_loader=loader(), validation_loader=loader())

    return Scheduled


def halves(optimizer):
    return StepLR(optimizer, 1, gamma=0.5)


def learning_rate(one):
    return one.get_local_operator().optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize(
    ("freq", "expected"), [("epoch", 0.1 * 0.5**2), ("batch", 0.1 * 0.5**8), ("manual", 0.1)]
)
def test_when_a_scheduler_steps(freq, expected):
    with trainer(scheduled(halves), scheduler_step_freq=freq) as one:
        one.train()
        one.train()
        one.validate()
        assert learning_rate(one) == pytest.approx(expected, rel=1e-12)


def test_a_list_of_schedulers_steps_as_a_whole():
    operator = scheduled(lambda optimizer: [halves(optimizer), halves(optimizer)])
    with trainer(operator, scheduler_step_freq="epoch") as one:
        one.train()
        assert learning_rate(one) == pytest.approx(0.1 * 0.5**2)


def test_update_scheduler_gives_the_metric_to_those_that_take_one():
    def both(optimizer):
        return [ReduceLROnPlateau(optimizer, patience=0, factor=0.1), halves(optimizer)]

    with trainer(scheduled(both), scheduler_step_freq="manual") as one:
        one.train()
        one.update_scheduler(1.0)
        assert learning_rate(one) == pytest.approx(0.05)
        one.update_scheduler(torch.tensor(2.0))
        assert learning_rate(one) == pytest.approx(0.05 * 0.1 * 0.5)
        one.update_scheduler(metric=0.5)
        assert learning_rate(one) == pytest.approx(0.05 * 0.1 * 0.5 * 0.5)


def test_update_scheduler_without_a_scheduler_says_what_to_register():
    with trainer() as one:
        with pytest.raises(ConfigurationError, match=r"schedulers=..."):
            one.update_scheduler(1.0)
        assert one.train()["batch_count"] == 4


def keeps(make, own_loop=False, name="scheduler"):
    """An operator whose scheduler is an attribute alone, as RaySGD's default loops wanted it."""

    class Keeps(TrainingOperator):
        def setup(self, config):
            self.model, self.optimizer, self.criterion = self.register(
                models=(model := linear()), optimizers=sgd(model), criterion=nn.MSELoss()
            )
            setattr(self, name, make(self.optimizer))
            self.register_data(train_loader=loader())

    class OwnStep(Keeps):
        def train_batch(self, batch, batch_info):
            metrics = super().train_batch(batch, batch_info)
            getattr(self, name).step()
            return metrics

    return OwnStep if own_loop else Keeps


@pytest.mark.parametrize(("freq", "epochs"), [("epoch", 2), ("batch", 8), ("manual", 0)])
def test_self_scheduler_steps_and_is_saved_without_being_registered(freq, epochs, tmp_path):
    expected = 0.1 * 0.5**epochs
    with trainer(keeps(halves), scheduler_step_freq=freq) as one:
        one.train()
        one.train()
        assert learning_rate(one) == pytest.approx(expected, rel=1e-12)
        path = one.save(tmp_path / "state")
        one.update_scheduler(1.0)
        assert learning_rate(one) == pytest.approx(expected * 0.5, rel=1e-12)
    with trainer(keeps(halves), scheduler_step_freq=freq) as one:
        one.load(path)
        assert one.get_local_operator().scheduler.last_epoch == epochs


class Foreign:
    """A scheduler of another package."""

    def __init__(self, optimizer):
        self.optimizer, self.steps = optimizer, 0

    def step(self):
        self.steps += 1

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


def test_a_scheduler_of_another_package_steps_too():
    with trainer(keeps(Foreign), scheduler_step_freq="epoch") as one:
        one.train()
        assert one.get_local_operator().scheduler.steps == 1


@pytest.mark.parametrize("kind", [list, tuple, lambda each: dict(enumerate(each))])
def test_each_of_several_schedulers_steps_and_is_saved(kind):
    def both(optimizer):
        return kind([halves(optimizer), halves(optimizer)])

    with trainer(keeps(both), scheduler_step_freq="epoch") as one:
        one.train()
        assert learning_rate(one) == pytest.approx(0.1 * 0.5**2, rel=1e-12)
        assert len(one.state_dict()["schedulers"]) == 2


def test_a_scheduler_beside_one_that_is_registered_is_named():
    class Two(TrainingOperator):
        def setup(self, config):
            model = linear()
            optimizer = sgd(model)
            self.rates = [halves(optimizer), halves(optimizer)]
            self.register(
                models=model,
                optimizers=optimizer,
                criterion=nn.MSELoss(),
                schedulers=self.rates[1],
            )
            self.register_data(train_loader=loader())

    with pytest.raises(ConfigurationError, match=r"self\.rates is a .*that nothing steps"):
        trainer(Two, scheduler_step_freq="epoch")


def test_a_warmup_before_milestones_passes_them_after_a_load():
    def rates(optimizer):
        warmup, decay = LinearLR(optimizer, 0.1, total_iters=2), MultiStepLR(optimizer, [1])
        return SequentialLR(optimizer, [warmup, decay], milestones=[2])

    with trainer(keeps(rates), scheduler_step_freq="epoch") as one:
        one.train()
        state = one.state_dict()
        for _ in range(3):
            one.train()
        expected = learning_rate(one)
    with trainer(keeps(rates), scheduler_step_freq="epoch") as other:
        other.load_state_dict(state)
        for _ in range(3):
            other.train()
        assert learning_rate(other) == expected < 0.011


def test_a_loop_of_ones_own_steps_what_it_has_and_self_scheduler_is_saved():
    with trainer(keeps(halves, own_loop=True)) as one:
        one.train()
        assert learning_rate(one) == pytest.approx(0.1 * 0.5**4, rel=1e-12)
        assert one.state_dict()["schedulers"][0]["last_epoch"] == 4
    with trainer(keeps(halves, own_loop=True, name="decay")) as one:
        one.train()
        assert learning_rate(one) == pytest.approx(0.1 * 0.5**4, rel=1e-12)


@pytest.mark.parametrize(
    ("make", "name", "freq"),
    [
        (halves, "scheduler", None),
        (halves, "decay", "epoch"),
        (lambda optimizer: [halves(optimizer)], "schedulers", "epoch"),
        (lambda optimizer: {"main": halves(optimizer)}, "rates", "manual"),
    ],
)
def test_a_scheduler_that_nothing_would_step_is_named(make, name, freq):
    with pytest.raises(ConfigurationError, match=rf"self\.{name} is a .*that nothing steps"):
        trainer(keeps(make, name=name), scheduler_step_freq=freq)


def test_parts_of_a_registered_chain_are_not_schedulers_of_their_own():
    class Chained(TrainingOperator):
        def setup(self, config):
            model = linear()
            optimizer = sgd(model)
            self.warmup, self.decay = halves(optimizer), halves(optimizer)
            chain = SequentialLR(optimizer, [self.warmup, self.decay], milestones=[1])
            self.register(
                models=model, optimizers=optimizer, criterion=nn.MSELoss(), schedulers=chain
            )
            self.register_data(train_loader=loader())

    with trainer(Chained, scheduler_step_freq="epoch") as one:
        one.train()
        assert len(one.state_dict()["schedulers"]) == 1


class Overflows(TrainingOperator):
    """The first gradients overflow at the scale with which fp16 begins."""

    def setup(self, config):
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
        self.model, self.optimizer, self.criterion, self.scheduler = self.register(
            models=model,
            optimizers=optimizer,
            criterion=nn.MSELoss(),
            schedulers=StepLR(optimizer, 1, gamma=0.5),
        )
        self.register_data(train_loader=loader())

    def compute_loss(self, batch, batch_info):
        return 16.0 * self.model(batch[0].float()).float().sum()


def test_a_step_that_fp16_leaves_out_is_none_of_the_schedule():
    steps = 0

    def count(*_):
        nonlocal steps
        steps += 1

    with trainer(Overflows, precision="fp16", scheduler_step_freq="batch") as one:
        operator = one.get_local_operator()
        operator.optimizer.register_step_post_hook(count)
        one.train(num_steps=20)
        assert 0 < steps < 20
        assert operator.scheduler.last_epoch == steps


class Once:
    """A scheduler that does something in its first step."""

    def __init__(self, act):
        self.act, self.steps = act, 0

    def step(self):
        self.steps += 1
        if self.steps == 1:
            self.act()

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


def fail():
    raise LookupError("a schedule that fails once")


def interrupt():
    signal.raise_signal(signal.SIGINT)


def with_a_second(act):
    return scheduled(lambda optimizer: [halves(optimizer), Once(act), halves(optimizer)])


@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("freq", ["epoch", "batch"])
def test_a_schedule_before_one_that_fails_steps_once_for_its_epoch(freq, saves):
    """As for a batch: those before it have stepped, those behind it do not step."""
    per_call, calls = (1, 4) if freq == "batch" else (4, 1)
    with trainer(with_a_second(fail), scheduler_step_freq=freq) as one:
        with pytest.raises(LookupError, match="fails once"):
            one.train(num_steps=per_call)
        assert learning_rate(one) == pytest.approx(0.05, rel=1e-12)
        assert one.status()["step"] == per_call
        if saves:
            one.load_state_dict(one.state_dict())
        for _ in range(calls):
            one.train(num_steps=per_call)
        assert learning_rate(one) == pytest.approx(0.05 * 0.25**calls, rel=1e-12)
        assert one.status()["epochs_finished"] == (2 if freq == "epoch" else 1)


def test_ctrl_c_at_the_end_of_an_epoch_comes_when_all_schedules_have_stepped():
    with trainer(with_a_second(interrupt), scheduler_step_freq="epoch") as one:
        with pytest.raises(KeyboardInterrupt):
            one.train()
        assert learning_rate(one) == pytest.approx(0.1 * 0.25, rel=1e-12)
        one.train()
        assert learning_rate(one) == pytest.approx(0.1 * 0.25**2, rel=1e-12)
        assert one.status()["epochs_finished"] == 2
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


class LeavesOutNan(keeps(halves)):
    """The recipe for a step whose gradient is not finite."""

    def compute_loss(self, batch, batch_info):
        loss = self.criterion(self.model(batch[0]), batch[1])
        return loss * (float("nan") if batch_info["batch_idx"] == 1 else 1.0)

    def train_batch(self, batch, batch_info):
        try:
            return {**super().train_batch(batch, batch_info), "skipped": 0}
        except NonFiniteError:
            return {"skipped": 1}


def test_a_step_that_a_loop_leaves_out_is_none_of_the_schedule():
    with trainer(LeavesOutNan, scheduler_step_freq="batch") as one:
        assert one.train()["skipped"] > 0
        assert learning_rate(one) == pytest.approx(0.1 * 0.5**3, rel=1e-12)


class StepsByHand(scheduled(lambda optimizer: Once(int))):
    """Writes its weights itself: nobody sees its steps."""

    def train_batch(self, batch, batch_info):
        return {"train_loss": 0.0}


def test_a_loop_that_steps_no_optimizer_has_its_schedule():
    with trainer(StepsByHand, scheduler_step_freq="batch") as one:
        one.train()
        assert one.state_dict()["schedulers"] == [{"steps": 4}]


class AccumulatesByHand(scheduled(halves)):
    """One optimizer step for the four batches of an epoch."""

    def train_batch(self, batch, batch_info):
        loss = nn.functional.mse_loss(self.model(batch[0]), batch[1])
        loss.backward()
        if batch_info["batch_idx"] == 3:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return {"train_loss": loss.item()}


class ScalesByHand(AccumulatesByHand):
    """A step for each batch; the scaler leaves out the first."""

    def train_batch(self, batch, batch_info):
        self.scaler = getattr(self, "scaler", None) or torch.amp.GradScaler("cpu", init_scale=2.0)
        self.optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.model(batch[0]), batch[1])
        factor = float("inf") if batch_info["batch_idx"] == 0 else 1.0
        self.scaler.scale(loss * factor).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return {"train_loss": loss.item()}


@pytest.mark.parametrize(("operator", "steps"), [(AccumulatesByHand, 1), (ScalesByHand, 3)])
def test_a_schedule_by_batch_steps_with_the_optimizer_of_a_loop_of_ones_own(operator, steps):
    with trainer(operator, scheduler_step_freq="batch") as one:
        one.train()
        assert learning_rate(one) == pytest.approx(0.1 * 0.5**steps, rel=1e-12)

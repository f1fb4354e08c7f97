# SPDX-License-Identifier: Apache-2.0
"""After an exception or Ctrl-C in a step, one worker goes on from the last committed step."""

import signal
import threading

import pytest
import torch
from tests.ray.surviving import (
    AroundTheEpoch,
    Classifier,
    CountsItsLosses,
    FreezesInItsLoss,
    FreezesInTurn,
    FreezesInTurnInItsOwnEpoch,
    LearnsABaseline,
    Momentum,
    OwnEpoch,
    SharpnessAware,
    TwoPlayers,
    Windows,
    digest,
    digest_of,
    trainer_of,
)
from torch import nn

from lockstep.errors import ConfigurationError, NonFiniteError, TrainerClosedError
from lockstep.tensor_tree import tensors_in
from lockstep.testing import Strike
from unit.trainer.programs import (
    STEPS_PER_EPOCH,
    Regression,
    by_hand,
    linear,
    loader,
    same,
    sgd,
    trainer,
    weights,
)

# `Windows` steps its scheduler with each batch, and its optimizer with each second one.
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")

BEFORE_THE_STEP = ["data", "forward", "backward", "buckets", "optimizer"]


def one_worker(operator_cls, *strikes, **arguments):
    return trainer_of(operator_cls, strikes, **{"num_workers": 1, "num_shards": 2} | arguments)


def finished(run):
    """The rest of the first epoch, and two more."""
    left = run.train()["batch_count"]
    run.train()
    run.train(num_steps=4)
    return left, digest(run)


def undisturbed(operator_cls, **arguments):
    with one_worker(operator_cls, **arguments) as run:
        return finished(run)


@pytest.mark.parametrize("phase", BEFORE_THE_STEP)
@pytest.mark.parametrize("action", ["raise", pytest.param("interrupt", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "operator_cls",
    [
        Classifier,
        pytest.param(TwoPlayers, marks=pytest.mark.slow),
        pytest.param(Windows, marks=pytest.mark.slow),
        pytest.param(SharpnessAware, marks=pytest.mark.slow),
    ],
)
def test_the_run_ends_with_the_bits_of_one_that_nobody_left(operator_cls, action, phase):
    error = KeyboardInterrupt if action == "interrupt" else RuntimeError
    batches, expected = undisturbed(operator_cls)
    # Its window begins with batch 4, and its optimizer steps in batch 5.
    at = 5 if operator_cls is Windows and phase == "optimizer" else 4
    with one_worker(operator_cls, Strike(action, 0, at, phase)) as run:
        with pytest.raises(error):
            run.train()
        assert run.status()["step"] == 4
        assert finished(run) == (batches - 4, expected)


@pytest.mark.parametrize("phase", ["buckets", "optimizer", "applied"])
def test_an_optimizer_within_another_one_goes_back_with_it(phase):
    """Its momentum, and what the other one has changed before any step is seen."""
    with one_worker(SharpnessAware) as run:
        _, expected = finished(run)
        average = digest_of(run.get_averaged_model())
    with one_worker(SharpnessAware, Strike("raise", 0, 4, phase)) as run:
        with pytest.raises(RuntimeError, match="struck"):
            run.train()
        assert run.status()["step"] == 4
        assert finished(run)[1] == expected
        assert digest_of(run.get_averaged_model()) == average


class Drifts(nn.Module):
    """Adds what it has seen so far; a state_dict does not have it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(10), persistent=False)

    def forward(self, features):
        self.seen += features.detach().mean(dim=0)
        return features + self.seen


class OwnEpochThatDrifts(OwnEpoch):
    def register(self, *, models, **given):
        return super().register(models=nn.Sequential(Drifts(), models), **given)


def test_buffers_that_no_state_has_go_back_to_the_beginning_of_a_call():
    with one_worker(OwnEpochThatDrifts) as run:
        _, expected = finished(run)
    with one_worker(OwnEpochThatDrifts, Strike("raise", 0, 4, "backward")) as run:
        with pytest.raises(RuntimeError, match="struck"):
            run.train()
        assert run.status()["step"] == 0
        assert finished(run)[1] == expected


class HoldsOneBack(TwoPlayers):
    """The second player's optimizer is not registered."""

    fails = False

    def register(self, *, optimizers, **given):
        return super().register(optimizers=optimizers[0], **given)[0], optimizers

    def train_batch(self, batch, batch_info):
        result = super().train_batch(batch, batch_info)
        if self.fails and self.global_step == 1:
            self.fails = False
            raise LookupError("behind both")
        return result


class FailsHoldingOneBack(HoldsOneBack):
    fails = True


def test_an_optimizer_that_nobody_registered_goes_back_too():
    expected = undisturbed(HoldsOneBack)[1]
    with one_worker(FailsHoldingOneBack) as run:
        with pytest.raises(LookupError, match="behind both"):
            run.train()
        assert run.status()["step"] == 1
        assert finished(run)[1] == expected


@pytest.mark.parametrize("operator_cls", [Classifier, Windows])
def test_a_ctrl_c_in_the_step_takes_effect_when_it_is_committed(operator_cls):
    batches, expected = undisturbed(operator_cls)
    with one_worker(operator_cls, Strike("interrupt", 0, 5, "applied")) as run:
        with pytest.raises(KeyboardInterrupt):
            run.train()
        assert run.status()["step"] == 6
        assert finished(run) == (batches - 6, expected)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.sampled
@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer"])
@pytest.mark.parametrize(
    "operator_cls",
    [
        FreezesInItsLoss,
        FreezesInTurn,
        FreezesInTurnInItsOwnEpoch,
        LearnsABaseline,
        CountsItsLosses,
        Momentum,
    ],
)
def test_a_step_that_fails_leaves_nothing_of_it(operator_cls, phase):
    """Nothing stays frozen or in ``eval()``, and the user's own state is that of before."""
    expected = undisturbed(operator_cls)[1]
    with one_worker(operator_cls, Strike("raise", rank=0, step=2, phase=phase)) as run:
        with pytest.raises(RuntimeError):
            run.train()
        assert finished(run)[1] == expected


def test_a_state_of_ones_own_may_be_none_and_has_to_be_copied():
    class Later(LearnsABaseline):
        def state_dict(self):
            return None if self.seen < 2 else super().state_dict()

        def load_state_dict(self, state):
            super().load_state_dict(state)

    with one_worker(Later, Strike("raise", rank=0, step=1, phase="backward")) as run:
        with pytest.raises(RuntimeError, match="struck"):
            run.train()
        assert run.train(num_steps=1)["num_samples"] == 16

    class Unlike(LearnsABaseline):
        def state_dict(self):
            return {"lock": threading.Lock()}

    with (
        pytest.raises(ConfigurationError, match="cannot be copied"),
        one_worker(Unlike) as run,
    ):
        run.train()


def test_a_ctrl_c_in_a_step_that_fails_is_not_lost():
    """A loop that catches the step's error and goes on would have to be interrupted again."""
    strikes = [Strike("interrupt", 0, 5, "applied"), Strike("raise", 0, 5, "applied")]
    with one_worker(Classifier, *strikes) as run:
        with pytest.raises(KeyboardInterrupt) as caught:
            run.train()
        assert "struck in step 5" in str(caught.value.__context__)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


class HandlesCtrlC(Classifier):
    """The operator's code sets a handler of its own in the first step."""

    def compute_loss(self, batch, batch_info):
        signal.signal(signal.SIGINT, handle_nothing)
        return super().compute_loss(batch, batch_info)


def handle_nothing(number, frame):
    """Does nothing."""


def test_a_handler_that_the_operator_sets_stays():
    before = signal.getsignal(signal.SIGINT)
    try:
        with one_worker(HandlesCtrlC, scheduler_step_freq="batch") as run:
            run.train(num_steps=1)
            assert signal.getsignal(signal.SIGINT) is handle_nothing
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("phase", ["forward", "applied"])
@pytest.mark.parametrize("action", ["raise", "interrupt"])
def test_a_call_of_an_epoch_of_ones_own_is_taken_back_as_a_whole(action, phase):
    error = KeyboardInterrupt if action == "interrupt" else RuntimeError
    batches, expected = undisturbed(OwnEpoch)
    with one_worker(OwnEpoch, Strike(action, 0, 4, phase)) as run:
        with pytest.raises(error):
            run.train()
        assert run.status()["step"] == 0
        assert finished(run) == (batches, expected)


@pytest.mark.slow
@pytest.mark.parametrize("step", [0, 1, 2, 3])
@pytest.mark.parametrize("operator_cls", [Classifier, AroundTheEpoch])
def test_an_accumulation_window_is_begun_again(operator_cls, step):
    """Two calls, so that the second may begin in the middle of a window."""
    arguments = {"accumulate": 3, "scheduler_step_freq": "epoch"}
    batches, expected = undisturbed(operator_cls, **arguments)
    with one_worker(operator_cls, Strike("raise", 0, step, "backward"), **arguments) as run:
        done = run.train(num_steps=1)["batch_count"] if step else 0
        with pytest.raises(RuntimeError, match="struck"):
            run.train()
        window = step - step % 3 if operator_cls is Classifier else 0
        assert run.status()["step"] == window
        left, got = finished(run)
        assert left == batches - max(window, done)
        assert got == expected


@pytest.mark.parametrize("steps", [3, 10])
@pytest.mark.parametrize("operator_cls", [CountsItsLosses, Momentum])
def test_a_state_that_is_saved_in_a_window_is_that_of_its_start(operator_cls, steps):
    """The window's first batch is computed again, from what the second one had not seen yet."""
    expected = undisturbed(operator_cls, accumulate=2)[1]
    with one_worker(operator_cls, accumulate=2) as run:
        run.train(num_steps=steps)
        state = run.state_dict()
        assert state["global_step"] == steps - 1
    with one_worker(operator_cls, accumulate=2) as run:
        run.load_state_dict(state)
        run.train(num_steps=18 - (steps - 1))
        assert digest(run) == expected


def test_after_a_failed_validation_all_of_it_is_counted():
    with one_worker(Classifier, Strike("raise", 0, 3, "validation")) as run:
        run.train(num_steps=3)
        before = digest(run)
        with pytest.raises(RuntimeError, match="struck in step 3, validation"):
            run.validate()
        assert digest(run) == before
        assert run.validate()["num_samples"] == 104


def test_save_and_get_model_give_the_last_committed_step(tmp_path):
    class Failing(Regression):
        def compute_loss(self, batch, batch_info):
            if batch_info["global_step"] == 3:
                raise LookupError
            return super().compute_loss(batch, batch_info)

    with trainer(Failing) as run:
        with pytest.raises(LookupError):
            run.train()
        path = run.save(tmp_path / "run.pt")
        assert same(weights(run.get_model()), by_hand(3))
    with trainer() as another:
        another.load(path)
        assert another.train()["batch_count"] == STEPS_PER_EPOCH - 3
        assert same(weights(another.get_model()), by_hand(4))


@pytest.mark.slow
def test_several_replicas_in_one_process_go_back_too():
    expected = undisturbed(Classifier, sync="data_parallel")[1]
    strike = Strike("raise", 0, 4, "backward")
    with one_worker(Classifier, strike, sync="data_parallel") as run:
        with pytest.raises(RuntimeError, match="struck"):
            run.train()
        assert run.status()["step"] == 4
        assert finished(run)[1] == expected


@pytest.mark.slow
@pytest.mark.parametrize("argument", ["wrap_ddp", "add_dist_sampler"])
def test_one_worker_goes_back_also_where_several_could_not(argument):
    arguments = {argument: False, "num_shards": 2 if argument == "wrap_ddp" else 1}
    expected = undisturbed(Classifier, **arguments)[1]
    with one_worker(Classifier, Strike("raise", 0, 4, "backward"), **arguments) as run:
        with pytest.raises(RuntimeError, match="struck"):
            run.train()
        assert run.status()["step"] == 4
        assert (run.get_local_operator()._lockstep.sync is None) == (argument == "wrap_ddp")
        assert finished(run)[1] == expected


class LateError(Regression):
    """An error after the step, when nobody copies weights before a step any more."""

    fails_at = 3

    def train_batch(self, batch, batch_info):
        result = super().train_batch(batch, batch_info)
        if self.global_step == self.fails_at:
            raise LookupError("no such metric")
        return result


class LateOwnLoop(LateError):
    """Its scheduler steps with each batch, behind the loop's own code."""

    def setup(self, config):
        self.model = linear()
        self.optimizer, self.criterion = sgd(self.model), nn.MSELoss()
        schedulers = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.9)
        self.register(
            models=self.model,
            optimizers=self.optimizer,
            criterion=self.criterion,
            schedulers=schedulers,
            ema=0.5,
        )
        self.register_data(train_loader=loader())


class LateAfterStep(LateOwnLoop):
    """What is done after each step fails in one of them."""

    train_batch = Regression.train_batch

    def after_step(self):
        if self.global_step == self.fails_at:
            raise LookupError("no such metric")


class LateOwnScaler(LateAfterStep):
    """A scaler of its own, whose `update` comes behind what fails."""

    def setup(self, config):
        super().setup(config)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def train_batch(self, batch, batch_info):
        features, target = batch
        self.optimizer.zero_grad()
        loss = self.criterion(self.model(features), target)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return {"train_loss": loss.item()}


@pytest.mark.parametrize(
    ("operator", "precision"),
    [
        (LateOwnLoop, "fp32"),
        (LateAfterStep, "fp32"),
        (LateAfterStep, "fp16"),
        (LateOwnScaler, "fp32"),
    ],
)
def test_a_step_whose_loop_fails_behind_its_optimizer_counts(operator, precision, caplog):
    arguments = {"scheduler_step_freq": "batch", "precision": precision}
    with trainer(type("Good", (operator,), {"fails_at": None}), **arguments) as good:
        good.train()
        good.train()
        expected = good.state_dict()
    with trainer(operator, **arguments) as run:
        with pytest.raises(LookupError):
            run.train()
        assert run.status()["step"] == 4
        assert "step 3 counts: its optimizers had stepped when the loop failed" in caplog.text
        run.train()
        assert run.status()["step"] == 2 * STEPS_PER_EPOCH
        got = run.state_dict()
    for key in ("models", "optimizers", "schedulers", "ema"):
        assert repr(got[key]) == repr(expected[key]), key
        assert all(
            map(torch.equal, tensors_in(got[key]), tensors_in(expected[key])),
        ), key


def test_weights_that_have_moved_in_part_are_not_given_out_as_those_of_before():
    class TwoSteps(Regression):
        """Both optimizers step behind all communication; an error comes between them."""

        def setup(self, config):
            self.model, self.other = linear(1), linear(2)
            self.optimizers = [sgd(self.model), sgd(self.other)]
            self.register(models=[self.model, self.other], optimizers=self.optimizers)
            self.register_data(train_loader=loader())

        def train_batch(self, batch, batch_info):
            features, target = batch
            loss = (self.model(features) + self.other(features) - target).square().mean()
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            loss.backward()
            self.optimizers[0].step()
            if self.global_step == 3:
                raise LookupError("no such metric")
            self.optimizers[1].step()
            return {"train_loss": loss.item()}

    with trainer(TwoSteps) as run:
        with pytest.raises(LookupError):
            run.train()
        for call in (run.train, run.get_model, run.state_dict):
            with pytest.raises(TrainerClosedError, match="cannot go back") as caught:
                call()
            assert "create a new TorchTrainer; load(path)" in str(caught.value)


def test_a_step_that_is_not_finite_is_behind_one_where_its_samples_are_left_out():
    class NotFinite(Regression):
        bad = True

        def compute_loss(self, batch, batch_info):
            loss = super().compute_loss(batch, batch_info)
            return loss * float("nan") if self.bad and batch_info["global_step"] == 2 else loss

    with trainer(NotFinite) as run:
        with pytest.raises(NonFiniteError):
            run.train()
        run.get_local_operator().bad = False
        run.train()
        assert same(weights(run.get_model()), by_hand(4))


def test_a_step_that_was_taken_back_is_computed_again():
    """Also in a loop of one's own, in which steps are not copied any more."""

    class Own(Regression):
        def train_batch(self, batch, batch_info):
            features, target = batch
            self.optimizer.zero_grad()
            loss = nn.functional.mse_loss(self.model(features), target)
            loss.backward()
            self.optimizer.step()
            return {"train_loss": loss.item()}

    with trainer(Own) as run:
        run.train(num_steps=3)
        group = run.get_local_operator().optimizer.param_groups[0]
        group["lr"] = float(torch.finfo(torch.float64).max)
        group["weight_decay"] = 1e10
        with pytest.raises(NonFiniteError, match="as they were before it"):
            run.train()
        assert same(weights(run.get_model()), by_hand(3))
        group["lr"], group["weight_decay"] = 0.1, 0
        run.train()
        assert same(weights(run.get_model()), by_hand(4))

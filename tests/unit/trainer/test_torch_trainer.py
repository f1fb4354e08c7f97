# SPDX-License-Identifier: Apache-2.0
"""From construction to shutdown: callbacks, failures, functions on workers, the bar."""

import contextlib
import os
import pty
import re
import subprocess
import sys
import termios
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tests.unit.trainer.programs import (
    Regression,
    by_hand,
    linear,
    loader,
    same,
    sgd,
    trainer,
    weights,
)
from torch import nn

from lockstep import Callback, TorchTrainer
from lockstep.engine import inline_engine
from lockstep.errors import ConfigurationError, TrainerClosedError, WrongUseError
from lockstep.keys import BATCH_SIZE


class DropsOut(Regression):
    """Between two draws of its second step it waits for another run that is as far."""

    def compute_loss(self, batch, batch_info):
        features, targets = batch
        first = nn.functional.dropout(features, 0.5)
        if self.global_step == 1:
            with contextlib.suppress(threading.BrokenBarrierError):
                self.config["barrier"].wait(0.3)
        return self.criterion(self.model(first + nn.functional.dropout(features, 0.5)), targets)


def test_two_threads_with_a_trainer_each_draw_their_own_numbers():
    """The generators of random numbers are the process's."""

    def trained(barrier):
        with trainer(DropsOut, config={"barrier": barrier}) as one:
            one.train()
            return weights(one.get_model())

    alone, barrier = trained(threading.Barrier(1)), threading.Barrier(2)
    with ThreadPoolExecutor() as pool:
        for got in pool.map(trained, [barrier, barrier]):
            assert torch.equal(got, alone)


def test_an_idle_trainer_answers_while_another_thread_trains():
    """A dataset may ask another trainer in a thread of its own."""

    class Asks(Regression):
        def compute_loss(self, batch, batch_info):
            with ThreadPoolExecutor() as pool:
                assert pool.submit(self.config["idle"].status).result(30)["step"] == 0
            return super().compute_loss(batch, batch_info)

    with trainer() as idle, trainer(Asks, config={"idle": idle}) as one:
        assert one.train(num_steps=1)["batch_count"] == 1


def test_a_call_that_gets_no_turn_is_an_error_and_interrupts_nothing(monkeypatch):
    """The other trainer's call waits for this one: without a limit neither would end."""
    monkeypatch.setattr(inline_engine, "_PATIENCE_S", 0.1)

    class Asks(Regression):
        def compute_loss(self, batch, batch_info):
            with ThreadPoolExecutor() as pool:
                asked = pool.submit(self.config["other"].train, num_steps=1)
                assert isinstance(asked.exception(30), WrongUseError)
            return super().compute_loss(batch, batch_info)

    with trainer() as other, trainer(Asks, config={"other": other}) as one:
        one.train(num_steps=1)
        assert other._workers.failure is None
        other.train()
        assert same(weights(other.get_model()), by_hand(4))


class Notes(Callback):
    def __init__(self, name, notes):
        self.name, self.notes = name, notes

    def on_start(self, trainer):
        self.notes.append((self.name, "start", trainer.state_dict()["global_step"]))

    def on_train_end(self, trainer, result):
        self.notes.append((self.name, "train", result["batch_count"]))
        result.clear()

    def on_validate_end(self, trainer, result):
        self.notes.append((self.name, "validate", sorted(result)))

    def on_shutdown(self, trainer):
        self.notes.append((self.name, "shutdown", trainer.state_dict()["global_step"]))


def test_callbacks_are_called_in_the_order_given():
    notes = []
    with trainer(callbacks=[Notes("a", notes), Notes("b", notes)]) as one:
        assert one.train(num_steps=3)["num_samples"] == 18
        one.train(num_steps=1, reduce_results=False)
        one.validate()
    one.shutdown()
    keys = ["batch_count", "last_val_loss", "num_samples", "val_loss"]
    assert notes == [
        (name, *note)
        for note in [("start", 0), ("train", 3), ("train", 1), ("validate", keys), ("shutdown", 4)]
        for name in "ab"
    ]


class FailsAt(Callback):
    def __init__(self, event):
        setattr(self, event, self.fail)

    def fail(self, trainer, *args):
        self.trainer = trainer
        raise ZeroDivisionError


def test_a_failing_callback_at_the_start_ends_the_workers():
    callback = FailsAt("on_start")
    with pytest.raises(ZeroDivisionError):
        trainer(callbacks=[callback])
    with pytest.raises(TrainerClosedError):
        callback.trainer.train()


def test_a_failing_callback_in_between_leaves_the_trainer_usable():
    with trainer(callbacks=[FailsAt("on_train_end")]) as one:
        with pytest.raises(ZeroDivisionError):
            one.train()
        assert one.validate()["batch_count"] == 4


def test_a_failing_callback_at_the_end_does_not_keep_the_workers():
    one = trainer(callbacks=[FailsAt("on_shutdown")])
    with pytest.raises(ZeroDivisionError):
        one.shutdown()
    with pytest.raises(TrainerClosedError):
        one.train()


def test_every_call_after_shutdown_says_so():
    one = trainer()
    one.train(num_steps=1)
    one.shutdown()
    one.shutdown(force=True)
    calls = [
        one.train, one.validate, one.get_model, one.get_local_operator, one.state_dict,
        lambda: one.update_scheduler(1), lambda: one.save("x"), lambda: one.load("x"),
        lambda: one.load_state_dict({}), lambda: one.apply_all_workers(int),
        lambda: one.apply_all_operators(int), lambda: one.train(num_steps=0),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(RuntimeError, match="was shut down") as caught:
            call()
        assert isinstance(caught.value, TrainerClosedError)
        assert "create a new TorchTrainer" in str(caught.value)
    assert one.config == {}


def test_the_context_manager_shuts_down_also_after_an_error():
    with trainer() as one:
        pass
    with pytest.raises(TrainerClosedError):
        one.train()
    with pytest.raises(KeyError), trainer() as one:
        raise KeyError
    with pytest.raises(TrainerClosedError):
        one.train()


def test_nothing_of_a_trainer_stays_with_an_optimizer_that_outlives_it():
    model = linear()
    optimizer = sgd(model)

    class OwnStep(Regression):
        def setup(self, config):
            self.register(models=model, optimizers=optimizer)
            self.register_data(train_loader=loader())

        def train_batch(self, batch, batch_info):
            features, targets = batch
            optimizer.zero_grad()
            self.backward(nn.functional.mse_loss(model(features), targets))
            optimizer.step()
            return {}

    with trainer(OwnStep) as one:
        one.train(num_steps=2)
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


class Failing(Regression):
    def compute_loss(self, batch, batch_info):
        if batch_info["global_step"] == 2:
            raise LookupError("the second step")
        return super().compute_loss(batch, batch_info)


def test_a_users_exception_arrives_as_itself_and_leaves_the_committed_steps():
    with trainer(Failing) as one:
        with pytest.raises(LookupError, match="the second step") as caught:
            one.train()
        assert type(caught.value) is LookupError
        assert "rank 0" in "\n".join(caught.value.__notes__)
        assert one.status()["step"] == 2
        assert same(weights(one.get_model()), by_hand(2))
        with pytest.raises(LookupError, match="the second step"):
            one.train()


def test_a_failed_trainer_can_be_replaced_from_what_was_saved(tmp_path):
    one = trainer(Failing)
    one.train(num_steps=2)
    path = one.save(tmp_path / "run.pt")
    with pytest.raises(LookupError):
        one.train()
    one.shutdown()
    with trainer() as another:
        another.load(path)
        another.train(num_steps=6)
        assert same(weights(another.get_model()), by_hand(8))


def test_an_exception_in_setup_arrives_as_itself():
    class Broken(Regression):
        def setup(self, config):
            raise LookupError("no data")

    with pytest.raises(LookupError, match="no data"):
        trainer(Broken)


def test_functions_on_workers_and_operators():
    with trainer() as one:
        assert one.apply_all_workers(os.getpid) == [os.getpid()]
        assert one.apply_all_operators(lambda operator: operator.world_rank) == [0]
        assert one.apply_all_operators(lambda operator: operator) == [one.get_local_operator()]
        with pytest.raises(ZeroDivisionError):
            one.apply_all_workers(lambda: 1 / 0)
        assert one.train()["batch_count"] == 4


class Refusing(Regression):
    """Raises in the method that `config` names."""

    def raise_in(self, method):
        if self.config["in"] == method:
            raise LookupError(method)

    def predict_batch(self, batch, batch_info):
        self.raise_in("predict_batch")

    def state_dict(self):
        self.raise_in("state_dict")

    def load_state_dict(self, state):
        self.raise_in("load_state_dict")


def raise_in_function(*_):
    raise LookupError("a function")


@pytest.mark.parametrize(
    ("place", "call"),
    [
        ("predict_batch", lambda one: one.predict(loader())),
        ("state_dict", lambda one: one.state_dict()),
        ("load_state_dict", lambda one: one.load_state_dict({**one.state_dict(), "operator": {}})),
        ("a function", lambda one: one.apply_all_workers(raise_in_function)),
        ("a function", lambda one: one.apply_all_operators(raise_in_function)),
    ],
)
def test_beside_training_too_an_exception_carries_its_rank_and_the_run_goes_on(place, call):
    with trainer(Refusing, config={"in": place}) as one:
        with pytest.raises(LookupError, match=place) as caught:
            call(one)
        assert type(caught.value) is LookupError
        assert caught.value.__notes__ == ["raised on rank 0"]
        one.get_local_operator().config["in"] = None
        assert one.train()["batch_count"] == 4


def test_the_hook_comes_first_and_once():
    calls = []

    class Noting(Regression):
        def setup(self, config):
            calls.append("setup")
            super().setup(config)

    with trainer(Noting, initialization_hook=lambda: calls.append("hook")) as one:
        one.train()
    assert calls == ["hook", "setup"]


def test_the_config_is_the_trainers_and_setup_sees_its_share():
    config = {BATCH_SIZE: 7, "lr": 1}

    class Sees(Regression):
        def setup(self, config):
            super().setup(config)
            self.batch_size = config[BATCH_SIZE]
            config["added"] = True

    with trainer(Sees, config=config, num_shards=2) as one:
        assert one.config is config
        assert one.get_local_operator().batch_size == 4
        assert one.get_local_operator().batch_size.whole == 7
    assert config == {BATCH_SIZE: 7, "lr": 1}
    with trainer(Sees, config={BATCH_SIZE: 1}) as one:
        assert "added" not in one.config


def test_without_a_config_setup_gets_an_empty_dict():
    with trainer() as one:
        assert one.config == {}
        assert one.get_local_operator().config == {}


# ------------------------------------------------------------------------------ the bar

DRAWS = """
from tests.unit.trainer.programs import Regression, trainer
class Slow(Regression):
    def compute_loss(self, batch, batch_info):
        import time; time.sleep(0.15)
        return super().compute_loss(batch, batch_info)
with trainer(Slow, use_tqdm=True) as one:
    one.train()
"""


def _draw(stderr):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen([sys.executable, "-c", DRAWS], stderr=stderr, env=environment)


@pytest.mark.slow
def test_the_bar_shows_total_loss_and_speed_in_a_terminal():
    main, terminal = pty.openpty()
    termios.tcsetwinsize(main, (24, 120))  # tqdm draws nothing in a terminal without columns
    with _draw(terminal) as process:
        os.close(terminal)
        drawn = b""
        with contextlib.suppress(OSError):  # Linux reports the other end's closing as EIO
            while chunk := os.read(main, 4096):
                drawn += chunk
    os.close(main)
    assert process.returncode == 0
    text = drawn.decode()
    assert re.search(r"train.* [1-4]/4 ", text), text
    assert re.search(r"loss=\d", text), text
    assert re.search(r"samples/s=\d", text), text


@pytest.mark.slow
def test_no_bar_where_nobody_looks():
    with _draw(subprocess.PIPE) as process:
        assert process.stderr.read() == b""
    assert process.returncode == 0


def test_an_engine_that_ray_would_have_to_run_says_what_to_install():
    blocked = """
import sys
sys.modules["ray"] = None
from tests.unit.trainer.programs import Regression, trainer
try:
    trainer(Regression, num_workers=2)
except RuntimeError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", blocked],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert 'pip install "lockstep-train[ray]"' in done.stdout


def test_configuration_errors_are_value_errors():
    assert issubclass(ConfigurationError, ValueError)
    with pytest.raises(ValueError, match="num_workers=0"):
        TorchTrainer(training_operator_cls=Regression, num_workers=0)

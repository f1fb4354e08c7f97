# SPDX-License-Identifier: Apache-2.0
"""A run that stops, and goes on from the checkpoints that it left, ends where it would have."""

import logging
import os
import resource
import shutil
import signal
import threading
from pathlib import Path

import pytest
import torch
from tests.unit.checkpoint.test_directory_lock import locks_in_another_process
from tests.unit.trainer.programs import Regression, Streaming, loader, sgd, trainer, weights
from tests.unit.trainer.test_state_transfer import Everything, halve_rate, rate
from torch import nn

from lockstep import TrainingOperator, checkpoint
from lockstep.errors import CheckpointError, CheckpointWriteError, ConfigurationError

TOTAL = 14


class OwnBatch(Regression):
    """Gradients of two batches in one step: between them nothing may be saved."""

    def train_batch(self, batch, batch_info):
        features, targets = batch
        if self.global_step % 2 == 0:
            self.optimizer.zero_grad()
        loss = self.criterion(self.model(features), targets)
        loss.backward()
        if self.global_step % 2 == 1:
            self.optimizer.step()
        return {"train_loss": loss.item()}


class OwnEpoch(Regression):
    """It reads a batch ahead: what it holds between two batches nobody else knows."""

    def train_epoch(self, iterator, info):
        ahead = next(iterator, None)
        while ahead is not None:
            (features, targets), ahead = ahead, next(iterator, None)
            self.optimizer.zero_grad()
            self.backward(self.criterion(self.model(features), targets), weight=len(features))
            self.optimizer.step()
        return {}


def steps_in(folder):
    return [int(path.stem.removeprefix("step-")) for path in sorted(Path(folder).glob("step-*"))]


def interrupted(folder, operator, parts, every, **arguments):
    """The weights after `parts`, each of which another trainer trains."""
    for part in parts:
        with trainer(
            operator, checkpoint_dir=folder, checkpoint_every=every, resume="auto", **arguments
        ) as one:
            step = one.status()["step"]
            one.train(num_steps=part - step)
            got = weights(one.get_model())
    return got


@pytest.mark.parametrize(
    ("operator", "arguments"),
    [
        (Everything, {"scheduler_step_freq": "batch", "seed": 3}),
        (Everything, {"scheduler_step_freq": "epoch"}),
        (Regression, {"accumulate": 3, "config": {"shuffle": True}}),
        (Streaming, {}),
        (OwnBatch, {}),
        (OwnEpoch, {}),
    ],
)
def test_it_goes_on_as_if_it_had_not_stopped(tmp_path, operator, arguments):
    with trainer(operator, **arguments) as one:
        one.train(num_steps=TOTAL)
        expected = weights(one.get_model())
    got = interrupted(tmp_path, operator, (5, 11, TOTAL), 3, **arguments)
    assert torch.equal(got, expected)


def test_which_steps_are_kept(tmp_path):
    with trainer(checkpoint_dir=tmp_path, checkpoint_every=2, keep_checkpoints=2) as one:
        for _ in range(4):
            one.train(num_steps=2)
        assert steps_in(tmp_path) == [6, 8]
        one.train(num_steps=1)
        assert steps_in(tmp_path) == [6, 8]
        state = checkpoint.read(tmp_path / "step-0000000008.ckpt")
    place = {"epoch": 1, "step": 4, "is_over": True, "samples_per_step": 6}
    place["epoch_size"] = (22, 22)
    assert (state["global_step"], state["position"]["train"]) == (8, place)


@pytest.mark.parametrize("way", ["resume", "load"])
def test_after_going_back_the_checkpoints_of_the_abandoned_steps_are_set_aside(tmp_path, way):
    with trainer(checkpoint_dir=tmp_path, checkpoint_every=1, keep_checkpoints=100) as one:
        for _ in range(8):
            one.train(num_steps=1)
    third = tmp_path / "step-0000000003.ckpt"
    resume = third if way == "resume" else "auto"
    with trainer(checkpoint_dir=tmp_path, checkpoint_every=5, resume=resume) as one:
        if way == "load":
            one.load(third)
        one.train(num_steps=3)
    assert steps_in(tmp_path) == [2, 3, 5]
    assert len(list(tmp_path.glob("set-aside-*"))) == 5


class PressesCtrlC(Regression):
    """In the second step, which is committed before the key takes effect."""

    def after_step(self):
        if self.global_step == 1:
            signal.raise_signal(signal.SIGINT)


def test_one_that_was_due_when_a_call_was_interrupted_is_made_up_for(tmp_path):
    with trainer(PressesCtrlC, checkpoint_dir=tmp_path, checkpoint_every=2) as one:
        with pytest.raises(KeyboardInterrupt):
            one.train()
        assert one.status()["step"] == 2
        one.train(num_steps=1)
        assert steps_in(tmp_path) == [2]


def test_a_window_is_not_cut(tmp_path):
    with trainer(checkpoint_dir=tmp_path, checkpoint_every=1, accumulate=3) as one:
        one.train(num_steps=2)
        assert steps_in(tmp_path) == []
        one.train(num_steps=1)
        assert steps_in(tmp_path) == [3]


def test_epochs_that_are_left(tmp_path):
    """The loop that the documentation shows trains as many epochs as were asked for."""
    for stop in (4, 6, 12, 99):
        with trainer(checkpoint_dir=tmp_path, checkpoint_every=2, resume="auto") as one:
            while one.status()["epochs_finished"] < 3 and one.status()["step"] < stop:
                one.train(num_steps=None if stop == 99 else 2)
            assert one.status()["step"] == min(stop, 12)


def test_shards_and_seed_come_from_the_checkpoint(tmp_path):
    arguments = {"checkpoint_dir": tmp_path, "checkpoint_every": 2}
    with trainer(num_shards=2, seed=7, **arguments) as one:
        one.train(num_steps=2)
    with trainer(resume="auto", **arguments) as one:
        assert one.status()["shards"] == 2
        state = one.state_dict()
        assert (state["num_shards"], state["seed"], state["global_step"]) == (2, 7, 2)
    with pytest.raises(CheckpointError, match="another seed"):
        trainer(resume="auto", seed=8, **arguments)
    with pytest.raises(CheckpointError, match="at most 2 workers"):
        trainer(resume="auto", num_workers=3, **arguments)


def test_a_path_to_go_on_from(tmp_path):
    with trainer() as one:
        one.train(num_steps=3)
        path = one.save(tmp_path / "mine.pt")
    with trainer(resume=path) as one:
        assert one.status()["step"] == 3
    with pytest.raises(FileNotFoundError):
        trainer(resume=tmp_path / "none.pt")


def test_a_run_from_elsewhere_deletes_no_checkpoint_of_another_one(tmp_path):
    with trainer() as one:
        one.train(num_steps=3)
        path = one.save(tmp_path / "mine.pt")
    arguments = {"checkpoint_dir": tmp_path / "run", "keep_checkpoints": 2}
    with trainer(checkpoint_every=1, seed=8, **arguments) as one:
        one.train(num_steps=2)
        one.train(num_steps=1)
    theirs = [each.read_bytes() for each in sorted((tmp_path / "run").glob("step-*"))]
    with trainer(checkpoint_every=2, resume=path, **arguments) as one:
        one.apply_all_operators(halve_rate)  # and what changes here is not in one of theirs
        one.train(num_steps=3)
        one.train(num_steps=2)
    assert steps_in(tmp_path / "run") == [6, 8]
    aside = sorted((tmp_path / "run").glob("set-aside-*"))
    assert [each.read_bytes() for each in aside] == theirs
    with trainer(resume="auto", **arguments) as one:
        assert (one.status()["step"], one.state_dict()["seed"]) == (8, 0)


@pytest.mark.parametrize(("before", "now"), [("replicate", "fsdp"), ("fsdp", "replicate")])
def test_a_change_before_the_first_step_under_another_sync_is_kept(tmp_path, before, now):
    arguments = {"checkpoint_dir": tmp_path, "checkpoint_every": 2, "resume": "auto"}
    with trainer(sync=before, **arguments) as one:
        one.train(num_steps=2)
    with trainer(sync=now, **arguments) as one:
        one.apply_all_operators(halve_rate)
        one.train(num_steps=1)
    with trainer(sync=now, **arguments) as one:
        assert (one.status()["step"], rate(one)) == (2, 0.05)
    assert steps_in(tmp_path) == [2]


def test_a_new_run_does_not_mix_with_an_old_one(tmp_path):
    with trainer(checkpoint_dir=tmp_path, checkpoint_every=1) as one:
        one.train(num_steps=1)
    with pytest.raises(ConfigurationError, match="resume=") as caught:
        trainer(checkpoint_dir=tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_another_program_is_refused_until_the_run_is_shut_down(tmp_path):
    one = trainer(checkpoint_dir=tmp_path, checkpoint_every=1)
    one.train(num_steps=1)
    assert not locks_in_another_process(tmp_path)
    one.shutdown()
    assert locks_in_another_process(tmp_path)


@pytest.mark.parametrize(
    "arguments",
    [
        {"checkpoint_every": 3},
        {"resume": "auto"},
        {"checkpoint_dir": "x", "checkpoint_every": 0},
        {"checkpoint_dir": "x", "keep_checkpoints": 0},
        {"checkpoint_dir": 3},
        {"resume": True},
    ],
)
def test_arguments_that_cannot_be_right(arguments):
    with pytest.raises(ConfigurationError):
        trainer(**arguments)
    assert not os.path.exists("x")


def test_a_damaged_checkpoint_is_named_and_passed_over(tmp_path, caplog):
    with trainer(checkpoint_dir=tmp_path, checkpoint_every=2) as one:
        one.train(num_steps=2)
        one.train(num_steps=2)
    newest = tmp_path / "step-0000000004.ckpt"
    newest.write_bytes(newest.read_bytes()[:-100])
    with trainer(checkpoint_dir=tmp_path, checkpoint_every=2, resume="auto") as one:
        assert one.status()["step"] == 2
    assert str(newest) in caplog.text


# ------------------------------------------------------------------------- failing to write


class Large(TrainingOperator):
    """400 kB, so that a limit of 100 kB is met by its checkpoints only."""

    def setup(self, config):
        model = nn.Linear(3, 2, dtype=torch.float64)
        large = nn.Linear(200, 500).requires_grad_(False)
        _, self.optimizer, self.criterion = self.register(
            models=[model, large], optimizers=sgd(model), criterion=nn.MSELoss()
        )
        self.model = model
        self.register_data(train_loader=loader())

    def compute_loss(self, batch, batch_info):
        features, targets = batch
        return self.criterion(self.model(features), targets)


@pytest.fixture
def little_room():
    """As a full disk: no file may grow beyond 100 kB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_no_room_is_an_error_that_loses_nothing(tmp_path, little_room, caplog):
    with trainer(Large, checkpoint_dir=tmp_path, checkpoint_every=2) as one:
        one.train(num_steps=2)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        little_room()
        with pytest.raises(CheckpointWriteError) as caught:
            one.train(num_steps=3)
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert caught.value.result["num_samples"] == 22 - 2 * 6 + 6
        assert "larger than allowed" in str(caught.value)
        assert "larger than allowed" in caplog.text
        assert steps_in(tmp_path) == [2]
        one.train(num_steps=1)
        assert steps_in(tmp_path) == [2, 6]


def test_the_old_checkpoint_stays_until_the_changed_one_is_there(tmp_path, little_room):
    one = trainer(Large, checkpoint_dir=tmp_path, checkpoint_every=2)
    one.train(num_steps=2)
    one.apply_all_operators(halve_rate)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    little_room()
    with pytest.raises(CheckpointWriteError, match="larger than allowed") as caught:
        one.train(num_steps=1)
    assert caught.value.result["batch_count"] == 1
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    one.shutdown()
    with trainer(Large, checkpoint_dir=tmp_path, resume="auto") as one:
        assert (one.status()["step"], rate(one)) == (2, 0.1)


def fill_weights(value):
    def fill(operator):
        for parameter in operator.model.parameters():
            parameter.data.fill_(value)

    return fill


def test_ctrl_c_as_a_changed_state_is_written_leaves_no_later_one_under_its_step(
    tmp_path, monkeypatch
):
    """In the driver's own process the state that is written is no copy."""
    may_write, write = threading.Event(), checkpoint.write

    def with_ctrl_c(path, state):
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        may_write.wait()  # not in the main thread, which the signal interrupts
        return write(path, state)

    with trainer(checkpoint_dir=tmp_path, checkpoint_every=2) as one:
        one.train(num_steps=2)
        one.apply_all_operators(fill_weights(1.0))
        with monkeypatch.context() as interrupted, pytest.raises(KeyboardInterrupt):
            interrupted.setattr(checkpoint, "write", with_ctrl_c)
            one.train()
        one.apply_all_operators(fill_weights(2.0))
        may_write.set()
        one._disk.writer.wait()
        (weight, bias) = checkpoint.read(tmp_path / "step-0000000002.ckpt")["models"][0].values()
        assert not (weight == 2.0).any()
        assert not (bias == 2.0).any()


def test_a_failure_that_a_later_checkpoint_made_up_for_is_only_logged(
    tmp_path, caplog, little_room
):
    class Freed(Large):
        def compute_loss(self, batch, batch_info):
            if self.global_step == 2:
                writer.finish()  # the checkpoint of this step has failed
                resource.setrlimit(resource.RLIMIT_FSIZE, before)
            return super().compute_loss(batch, batch_info)

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with trainer(Freed, checkpoint_dir=tmp_path, checkpoint_every=2) as one:
        writer = one._disk.writer
        little_room()
        one.train(num_steps=5)
    assert "could not be written" in caplog.text
    assert steps_in(tmp_path) == [4]


def test_the_directory_has_gone(tmp_path):
    """What a read-only or unmounted directory comes to, for root as well."""
    folder = tmp_path / "run"
    with trainer(checkpoint_dir=folder, checkpoint_every=2) as one:
        shutil.rmtree(folder)
        folder.touch()
        with pytest.raises(CheckpointWriteError, match="a file, not a folder"):
            one.train(num_steps=2)
        folder.unlink()
        one.train(num_steps=2)
        assert steps_in(folder) == [4]


def test_what_cannot_be_saved_is_said_and_training_goes_on(tmp_path):
    class Odd(Regression):
        def state_dict(self):
            return {"odd": object()}

    with trainer(Odd, checkpoint_dir=tmp_path, checkpoint_every=2) as one:
        with pytest.raises(CheckpointWriteError, match="odd") as caught:
            one.train(num_steps=4)
        assert caught.value.result["batch_count"] == 4
        assert one.status()["step"] == 4


def test_shutdown_leaves_nothing_pending(tmp_path):
    class Fails(Regression):
        def compute_loss(self, batch, batch_info):
            if self.global_step == 3:
                raise ZeroDivisionError
            return super().compute_loss(batch, batch_info)

    with (
        pytest.raises(ZeroDivisionError),
        trainer(Fails, checkpoint_dir=tmp_path, checkpoint_every=2) as one,
    ):
        one.train()
    assert steps_in(tmp_path) == [2]


# ---------------------------------------------------------------------------------- SIGTERM


class Warned(Regression):
    """The machine is about to be taken away."""

    def compute_loss(self, batch, batch_info):
        if self.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().compute_loss(batch, batch_info)


class WarnedInOwnEpoch(OwnEpoch):
    def train_epoch(self, iterator, info):
        for count, batch in enumerate(iterator):
            if count == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            self.backward(self.criterion(self.model(batch[0]), batch[1]))
        return {}


@pytest.fixture
def own_handler():
    calls = []
    before = signal.signal(signal.SIGTERM, lambda *_: calls.append(1))
    yield calls
    signal.signal(signal.SIGTERM, before)


def test_sigterm_saves_then_ends(tmp_path, caplog):
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with (
            pytest.raises(SystemExit) as caught,
            trainer(Warned, checkpoint_dir=tmp_path, checkpoint_every=100) as one,
        ):
            one.train()
        assert caught.value.code == 128 + signal.SIGTERM
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)
    assert steps_in(tmp_path) == [3]
    assert "SIGTERM" in caplog.text


def test_sigterm_in_the_last_step(tmp_path, own_handler):
    with trainer(Warned, checkpoint_dir=tmp_path) as one:
        one.train(num_steps=3)
    assert steps_in(tmp_path) == [3]
    assert own_handler == [1]


def test_ones_own_handler_decides(tmp_path, own_handler):
    handler = signal.getsignal(signal.SIGTERM)
    with trainer(Warned, checkpoint_dir=tmp_path) as one:
        result = one.train()
        assert signal.getsignal(signal.SIGTERM) is handler
    assert result["batch_count"] == 4
    assert steps_in(tmp_path) == [3]
    assert own_handler == [1]


def test_without_a_directory_the_signal_is_nobodys_business(own_handler):
    with trainer(Warned) as one:
        one.train()
    assert own_handler == [1]


def test_sigterm_in_a_loop_of_ones_own_saves_the_beginning_of_the_call(tmp_path, own_handler):
    with trainer(WarnedInOwnEpoch, checkpoint_dir=tmp_path) as one:
        one.train()
        one.train()
    assert steps_in(tmp_path)[0] == 0
    assert len(own_handler) == 2


def test_the_log_says_what_is_safe(tmp_path, caplog):
    with caplog.at_level(logging.INFO, "lockstep.checkpoint"):
        with trainer(checkpoint_dir=tmp_path, checkpoint_every=2) as one:
            one.train(num_steps=2)
        with trainer(checkpoint_dir=tmp_path, resume="auto"):
            pass
    assert "step 2 is safe" in caplog.text
    assert "going on after step 2" in caplog.text


def test_a_state_that_counts_no_steps_is_gone_on_from(tmp_path):
    with trainer() as one:
        state = one.state_dict()
    del state["global_step"]
    checkpoint.write(tmp_path / "state", state)
    with trainer(resume=tmp_path / "state") as one:
        assert one.status()["step"] == 0

# SPDX-License-Identifier: Apache-2.0
"""After an exception or Ctrl-C in a step, the workers go on from the last committed step."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from tests.ray.operators import DefaultLoop
from tests.ray.surviving import (
    GLOBAL_BATCH,
    Classifier,
    FreezesInItsLoss,
    OwnEpoch,
    TwoPlayers,
    digest,
    trainer_of,
    undisturbed,
)

from lockstep.engine.idle_worker_eviction import evict_idle_workers
from lockstep.errors import NonFiniteError, TrainerClosedError
from lockstep.keys import BATCH_SIZE
from lockstep.testing import Strike, struck

EXACT = {"replicate": {"reproducible": True}, "ddp": {}, "parameter_server": {}}


def rest_of(trainer):
    """The rest of the first epoch, and what `surviving.run` does after it; the digest."""
    batches = trainer.train()["batch_count"]
    trainer.train()
    trainer.train()
    trainer.train(num_steps=4)
    return batches, digest(trainer)


@pytest.mark.parametrize(
    ("sync", "phase"),
    [
        pytest.param("replicate", "data", marks=pytest.mark.slow),
        pytest.param("replicate", "forward", marks=pytest.mark.slow),
        ("replicate", "backward"),
        ("replicate", "applied"),
        ("ddp", "backward"),
        pytest.param("parameter_server", "forward", marks=pytest.mark.slow),
        pytest.param("parameter_server", "backward", marks=pytest.mark.slow),
    ],
)
def test_the_run_ends_with_the_bits_of_one_that_nobody_left(sync, phase):
    arguments = {"sync": sync, **EXACT[sync]}
    _, expected = undisturbed(Classifier, **arguments)
    with trainer_of(Classifier, [Strike("raise", 1, 4, phase)], **arguments) as trainer:
        pids = trainer.apply_all_workers(os.getpid)
        with pytest.raises(RuntimeError, match=f"struck in step 4, {phase}") as caught:
            trainer.train()
        assert "raised on rank 1" in "\n".join(caught.value.__notes__)
        # What the other rank has stepped with and committed counts, and is taken over.
        done = trainer.status()["step"]
        assert done == (5 if phase == "applied" else 4)
        assert rest_of(trainer) == (7 - done, expected)
        assert trainer.apply_all_workers(os.getpid) == pids
        assert trainer.status()["recoveries"] == []


def wait_for(path):
    while not path.exists():
        time.sleep(0.01)


class Late(Classifier):
    """Both ranks fail behind the optimizer's step; the second one has done more by then."""

    def train_batch(self, batch, batch_info):
        features, classes = batch
        self.optimizer.zero_grad()
        loss = self.criterion(self.model(features), classes)
        loss.backward()
        self.optimizer.step()
        if self.global_step == 5 and self.world_rank in self.config["failing"]:
            stepped = Path(self.config["stepped"])
            if self.world_rank == 0:
                stepped.touch()
            if self.world_rank == 1:
                wait_for(stepped)
                with torch.no_grad():
                    next(self.model.parameters()).add_(1)
            raise LookupError("no such metric")
        return {"train_loss": loss.item()}


@pytest.mark.parametrize("sync", ["replicate", "ddp"])
def test_a_step_whose_loop_fails_behind_its_optimizer_on_all_ranks_counts(sync, tmp_path, caplog):
    arguments = {"sync": sync, "scheduler_step_freq": "batch"}
    none = {"config": {BATCH_SIZE: GLOBAL_BATCH, "failing": ()}}
    with trainer_of(Late, **{**arguments, **none}) as trainer:
        trainer.train()
        expected = digest(trainer)
    config = {BATCH_SIZE: GLOBAL_BATCH, "failing": (0, 1), "stepped": tmp_path / "stepped"}
    both = {"config": config}
    with trainer_of(Late, **{**arguments, **both}) as trainer:
        with pytest.raises(LookupError):
            trainer.train()
        assert trainer.status()["step"] == 6
        assert "step 5 counts: its optimizers had stepped when the loop failed" in caplog.text
        assert trainer.train()["batch_count"] == 1
        assert digest(trainer) == expected
        assert trainer.status()["recoveries"] == []


class InterruptsDriver(Classifier):
    """Somebody presses Ctrl-C while rank 1 is in a step."""

    def compute_loss(self, batch, batch_info):
        if self.world_rank == 1 and batch_info["global_step"] == 4 and self.is_first():
            os.kill(self.config["driver"], signal.SIGINT)
        return super().compute_loss(batch, batch_info)

    def is_first(self):
        was_there, self.was_there = getattr(self, "was_there", False), True
        return not was_there


def test_after_ctrl_c_the_model_is_there_and_training_goes_on(tmp_path):
    _, expected = undisturbed(Classifier, reproducible=True)
    config = {BATCH_SIZE: 16, "driver": os.getpid()}
    arguments = {"config": config, "reproducible": True, "scheduler_step_freq": "batch"}
    with trainer_of(InterruptsDriver, **arguments) as trainer:
        pids = trainer.apply_all_workers(os.getpid)
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        before = digest(trainer)
        path = trainer.save(tmp_path / "run.pt")
        done = trainer.status()["step"]
        assert done >= 4
        # The epoch may have come to its end while the signal was on its way.
        if done < 7:
            trainer.train()
        trainer.train()
        trainer.train()
        trainer.train(num_steps=4)
        assert digest(trainer) == expected
        assert trainer.apply_all_workers(os.getpid) == pids
        trainer.load(path)
        assert digest(trainer) == before


@pytest.mark.parametrize(
    ("operator_cls", "phase"),
    [
        (TwoPlayers, "backward"),
        (OwnEpoch, "backward"),
        pytest.param(FreezesInItsLoss, "forward", marks=pytest.mark.slow),
    ],
)
def test_loops_and_losses_of_ones_own_go_back_too(operator_cls, phase):
    _, expected = undisturbed(operator_cls)
    with trainer_of(operator_cls, [Strike("raise", 1, 4, phase)]) as trainer:
        with pytest.raises(RuntimeError, match="struck"):
            trainer.train()
        # Only a `train_epoch` knows what lies between two batches: its whole call is undone.
        done = 0 if operator_cls is OwnEpoch else 4
        assert trainer.status()["step"] == done
        assert rest_of(trainer) == (7 - done, expected)


def test_a_failed_validation_is_begun_again():
    with trainer_of(Classifier, [Strike("raise", 1, 3, "validation")]) as trainer:
        trainer.train(num_steps=3)
        with pytest.raises(RuntimeError, match="struck in step 3, validation"):
            trainer.validate()
        assert trainer.validate()["num_samples"] == 104
        assert trainer.train()["batch_count"] == 4


class NotFiniteOnce(Classifier):
    def compute_loss(self, batch, batch_info):
        loss = super().compute_loss(batch, batch_info)
        if self.world_rank == 1 and batch_info["global_step"] == 4 and not self.config["mended"]:
            return loss * float("nan")
        return loss


def mend(operator):
    operator.config["mended"] = True


def test_behind_a_step_that_is_not_finite_training_goes_on():
    _, expected = undisturbed(Classifier)
    config = {BATCH_SIZE: 16, "mended": False}
    arguments = {"config": config, "scheduler_step_freq": "batch"}
    with trainer_of(NotFiniteOnce, **arguments) as trainer:
        with pytest.raises(NonFiniteError, match="the loss is nan"):
            trainer.train()
        trainer.apply_all_operators(mend)
        assert rest_of(trainer) == (3, expected)


def test_fsdp_without_copies_in_memory_says_that_it_cannot_go_back():
    arguments = {"sync": "fsdp", "memory_checkpoint_every": None}
    with trainer_of(Classifier, [Strike("raise", 1, 2, "forward")], **arguments) as trainer:
        with pytest.raises(RuntimeError, match="struck"):
            trainer.train()
        for call in (trainer.train, trainer.get_model):
            with pytest.raises(TrainerClosedError, match="struck in step 2") as caught:
                call()
            assert "memory_checkpoint_every=None: they cannot go back to the" in str(caught.value)
            assert "create a new TorchTrainer; load(path)" in str(caught.value)


@pytest.mark.other_workers
def test_rank_0_in_the_driver_goes_back_with_the_others():
    _, expected = undisturbed(Classifier, reproducible=True)
    arguments = {"use_local": True, "reproducible": True}
    strikes = [Strike("interrupt", 0, 4, "applied"), Strike("raise", 0, 6, "backward")]
    with trainer_of(Classifier, strikes, **arguments) as trainer:
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        assert trainer.status()["step"] == 5
        with pytest.raises(RuntimeError, match="struck"):
            trainer.train()
        assert rest_of(trainer) == (1, expected)


@pytest.mark.slow
def test_what_was_left_makes_room_for_another_trainer(caplog):
    """Of two cells of a notebook the second, mended, is run again; the cluster has four CPUs."""
    failing = [Strike("raise", 0, 2, "backward")]
    with trainer_of(Classifier, failing, num_workers=3) as before:
        with pytest.raises(RuntimeError, match="struck"):
            before.train()
        with trainer_of(Classifier, num_workers=3) as after:
            after.train(num_steps=1)
            said = "another TorchTrainer needed the room of these workers"
            assert [one for one in caplog.messages if said in one and "call save()" in one]
            with pytest.raises(TrainerClosedError, match="struck in step 2") as caught:
                before.get_model()
            assert said in caught.value.details["cause"]
            assert "before the other trainer is made" in caught.value.details["fix"]


@pytest.mark.slow
def test_a_trainer_that_was_left_and_closed_has_no_room_to_give(caplog):
    failing = [Strike("raise", 0, 2, "backward")]
    with (
        trainer_of(Classifier, failing, num_workers=3) as closed,
        pytest.raises(RuntimeError, match="struck"),
    ):
        closed.train()
    evict_idle_workers()
    assert not [one for one in caplog.messages if "needed the room" in one]


@pytest.mark.slow
def test_a_worker_that_dies_after_a_call_was_left_is_an_incident(caplog):
    """Nobody calls anything meanwhile; the next call finds one worker, and other bits."""
    with trainer_of(Classifier, [Strike("raise", 1, 2, "backward")]) as trainer:
        pids = trainer.apply_all_workers(os.getpid)
        with pytest.raises(RuntimeError, match="struck"):
            trainer.train()
        os.kill(pids[1], signal.SIGKILL)
        with caplog.at_level("WARNING", "lockstep.recovery"):
            assert trainer.status()["workers"] == 1
        (recovery,) = trainer.status()["recoveries"]
        assert "rank 1" in recovery["lost"][0]
        assert (recovery["step"], recovery["workers"]) == (2, 1)
        assert not recovery["same_bits"]
        assert [record.message for record in caplog.records if "recovered in" in record.message]


@pytest.mark.other_workers
def test_one_worker_elsewhere_goes_back():
    operator_cls = struck(DefaultLoop, Strike("raise", 0, 2, "backward"))
    arguments = {"num_workers": 1, "resources_per_worker": {"lane": 1}}
    with trainer_of(operator_cls, **arguments) as trainer:
        with pytest.raises(RuntimeError, match="struck"):
            trainer.train()
        assert trainer.status()["step"] == 2
        assert trainer.train()["batch_count"] == 1

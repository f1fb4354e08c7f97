# SPDX-License-Identifier: Apache-2.0
"""Schedulers step when Lightning's own trainer steps them, however calls divide the epochs.

An epoch ends once: behind a checkpoint of its last step, and where a stream ends late.
"""

import copy
import warnings

import pytest
import torch
from tests.unit.integrations.lightning.modules import (
    GLOBAL_BATCH,
    STEPS,
    Classifier,
    by_lightning,
    farthest,
    loader,
    problem,
)
from tests.unit.integrations.lightning.two_threads import on_two_threads
from torch.utils.data import DataLoader, IterableDataset

from lockstep import TorchTrainer, TrainingOperator
from lockstep.errors import ConfigurationError, NotAvailableError
from lockstep.integrations.lightning.lr_schedulers import SchedulerConfig, SchedulerStepper
from lockstep.worker import LoopRequest, leave_broken_group

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:.*does not have many workers"
)


class HalvesEachEpoch(Classifier):
    """Its rate is told after every epoch."""

    ended = 0

    def on_train_epoch_end(self):
        self.ended += 1

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


class WaitsForTheValidation(Classifier):
    """Every value of the metric is worse than the first: each looks as the last one did."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, mode="max", patience=0, factor=0.5
        )
        return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": "val_loss"}


class WaitsForSteps(WaitsForTheValidation):
    def configure_optimizers(self):
        asked = super().configure_optimizers()
        asked["lr_scheduler"] = {"scheduler": asked["lr_scheduler"], "interval": "step"}
        return asked


class Stream(IterableDataset):
    """Does not know its length."""

    def __iter__(self):
        return iter(problem())


def trainer_of(module_cls, **arguments):
    operator = TrainingOperator.from_lightning(module_cls, loader(GLOBAL_BATCH // 2), loader())
    return TorchTrainer(training_operator_cls=operator, num_shards=2, **arguments)


def rate_of(trainer):
    return trainer.get_local_operator().optimizer.param_groups[0]["lr"]


def test_a_run_goes_on_behind_the_last_step_of_an_epoch(tmp_path):
    with trainer_of(HalvesEachEpoch) as trainer:
        for _ in range(3):
            trainer.train()
        expected, rate = trainer.get_model(), rate_of(trainer)
    arguments = {"checkpoint_dir": tmp_path, "checkpoint_every": STEPS, "resume": "auto"}
    for _ in range(3):
        with trainer_of(HalvesEachEpoch, **arguments) as trainer:
            trainer.train()
            assert trainer.status()["epochs_finished"] <= 3
            trained, last = trainer.get_model(), rate_of(trainer)
    assert last == rate == 0.3 * 0.5**3
    assert farthest(trained, expected) == 0


def test_a_stream_ends_its_epoch_with_the_next_call():
    stream = DataLoader(Stream(), batch_size=GLOBAL_BATCH)
    operator = TrainingOperator.from_lightning(HalvesEachEpoch, stream)
    with TorchTrainer(training_operator_cls=operator, num_shards=1) as trainer:
        for _ in range(3):
            trainer.train(num_steps=STEPS)
        # The third call has not seen that nothing follows.
        assert rate_of(trainer) == 0.3 * 0.5**2
        assert trainer.get_model().ended == 2


def test_a_plateau_steps_for_a_validation_before_the_next_epoch(tmp_path):
    arguments = {"checkpoint_dir": tmp_path, "checkpoint_every": STEPS, "resume": "auto"}
    with trainer_of(WaitsForTheValidation, **arguments) as trainer:
        trainer.train(), trainer.validate()
        trainer.train()
        assert rate_of(trainer) == 0.3
    with trainer_of(WaitsForTheValidation, **arguments) as trainer:
        trainer.validate()  # the one that the first program did not come to
        assert rate_of(trainer) == 0.15
        trainer.train()


def test_a_plateau_whose_validation_was_lost_is_named(tmp_path):
    arguments = {"checkpoint_dir": tmp_path, "checkpoint_every": STEPS, "resume": "auto"}
    with trainer_of(WaitsForTheValidation, **arguments) as trainer:
        trainer.train()
    with (
        trainer_of(WaitsForTheValidation, **arguments) as trainer,
        pytest.warns(UserWarning, match="has not stepped for epoch 0"),
    ):
        trainer.train()


def test_a_plateau_within_an_epoch_is_refused():
    with (
        pytest.raises(NotAvailableError, match="cannot step within an epoch"),
        trainer_of(WaitsForSteps) as trainer,
    ):
        trainer.train()


def test_a_plateau_steps_for_a_validation_that_failed_and_came_again():
    """Which takes it back: that it has stepped for the epoch, too."""

    class Uploads(TrainingOperator.from_lightning(WaitsForTheValidation, loader(), loader())):
        def validate(self, val_iterator, info):
            result = super().validate(val_iterator, info)
            if info["fails"]:
                raise ConnectionError
            return result

    expected, _ = by_lightning(WaitsForTheValidation())
    plain, _ = by_lightning(Classifier())
    with TorchTrainer(training_operator_cls=Uploads) as trainer:
        for _ in range(3):
            trainer.train()
            with pytest.raises(ConnectionError):
                trainer.validate(info={"fails": True})
            trainer.validate(info={"fails": False})
        assert farthest(trainer.get_model(), expected) < 1e-12
    assert farthest(expected, plain) > 1e-3, "the oracle does not see the scheduler"


class StepsOnOneRank(WaitsForTheValidation):
    """In the second epoch: the other rank is lost behind the last exchange of the validation."""

    is_lost = False

    def lr_scheduler_step(self, scheduler, metric):
        if self.is_lost and self.current_epoch == 1:
            raise LookupError
        super().lr_scheduler_step(scheduler, metric)


class HasAHook(StepsOnOneRank):
    def on_validation_epoch_end(self):
        """So that all that it may change is copied."""


@pytest.mark.parametrize("module_cls", [StepsOnOneRank, HasAHook])
def test_a_plateau_that_has_stepped_on_one_rank_alone_goes_back(module_cls):
    train, validation = (LoopRequest(each, None, False, {}) for each in ("train", "validation"))

    def settings(operator):
        plateaus = [each.state_dict() for each in operator._lockstep.registered.schedulers]
        return plateaus, operator.state_dict()["plateaus"], operator.optimizer.param_groups[0]["lr"]

    def body(worker):
        operator = worker.operator
        operator.module.is_lost, worker.has_state = worker.rank == 1, True
        worker.train(train), worker.validate(validation), worker.train(train)
        before = copy.deepcopy(settings(operator))
        if operator.module.is_lost:
            with pytest.raises(LookupError):
                worker.validate(validation)
        else:
            worker.validate(validation)
        then = settings(operator)[2]
        leave_broken_group(worker, validation)
        return before, settings(operator), then

    made = TrainingOperator.from_lightning(module_cls, loader(GLOBAL_BATCH // 2), loader())
    results = on_two_threads(made, body)
    for before, after, _ in results:
        assert after == before
    assert [then for *_, then in results] == [0.15, 0.3]


class FollowsTheLoss(Classifier):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, patience=0, threshold=0.9, factor=0.3
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {
                "scheduler": scheduler,
                "monitor": "val_loss",
                "frequency": self.frequency,
            },
        }

    frequency = 1


class EverySecondEpoch(FollowsTheLoss):
    frequency = 2


def test_a_plateau_of_every_second_epoch_waits_for_no_other_validation():
    expected, _ = by_lightning(EverySecondEpoch(), max_epochs=6, check_val_every_n_epoch=2)
    plain, _ = by_lightning(Classifier(), max_epochs=6)
    with trainer_of(EverySecondEpoch) as trainer:
        for epoch in range(6):
            trainer.train()
            if epoch % 2:
                trainer.validate()
        assert farthest(trainer.get_model(), expected) < 1e-12
    assert farthest(expected, plain) > 1e-3, "the oracle does not see the scheduler"
    with trainer_of(EverySecondEpoch) as trainer:
        trainer.train(), trainer.train()
        with pytest.raises(ConfigurationError, match="watches 'val_loss'"):
            trainer.train()


def test_behind_an_epoch_without_a_step_of_the_plateau_nothing_is_missed(tmp_path):
    arguments = {"checkpoint_dir": tmp_path, "checkpoint_every": STEPS, "resume": "auto"}
    with trainer_of(EverySecondEpoch, **arguments) as trainer:
        trainer.train()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*has not stepped for epoch")
        with trainer_of(EverySecondEpoch, **arguments) as trainer:
            trainer.train()


class GetsBetterAndWorse(FollowsTheLoss):
    """Every second validation is better than all before it, and the others are all the same."""

    turn = 0

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", 0.0 if self.turn % 2 else -float(self.turn))

    def on_validation_epoch_end(self):
        self.turn += 1


def trained_in_parts(first, module_cls, *, validates_at_end):
    """The module after epochs that are validated behind step `first`, and maybe at their end."""
    with trainer_of(module_cls) as trainer:
        for _ in range(4):
            trainer.train(num_steps=first), trainer.validate()
            trainer.train()
            if validates_at_end:
                trainer.validate()
        return trainer.get_model()


@pytest.mark.parametrize("module_cls", [FollowsTheLoss, GetsBetterAndWorse])
@pytest.mark.parametrize(
    ("first", "validates_at_end"),
    [
        (STEPS // 2, True),
        (STEPS - 2, False),  # the next epoch shows that no other validation comes
    ],
)
def test_a_plateau_steps_once_an_epoch_on_its_newest_metric(module_cls, first, validates_at_end):
    expected, _ = by_lightning(module_cls(), max_epochs=4, val_check_interval=first)
    model = trained_in_parts(first, module_cls, validates_at_end=validates_at_end)
    assert farthest(model, expected) < 1e-12


def test_a_plateau_steps_for_a_stream_whose_end_only_the_next_call_sees():
    stream = DataLoader(Stream(), batch_size=GLOBAL_BATCH)
    expected, _ = by_lightning(FollowsTheLoss(), train=stream)
    operator = TrainingOperator.from_lightning(FollowsTheLoss, stream, loader())
    with TorchTrainer(training_operator_cls=operator) as trainer:
        for _ in range(3):
            trainer.train(num_steps=STEPS), trainer.validate()
        assert farthest(trainer.get_model(), expected) < 1e-12


def test_a_metric_of_a_validation_within_an_epoch_is_in_the_checkpoint(tmp_path):
    expected = trained_in_parts(STEPS - 2, FollowsTheLoss, validates_at_end=False)
    with trainer_of(FollowsTheLoss) as trainer:
        trainer.train(num_steps=STEPS - 2), trainer.validate()
        trainer.train()
        trainer.train(num_steps=STEPS - 2), trainer.validate()
        trainer.train(num_steps=1)
        path = trainer.save(tmp_path / "middle")
    with trainer_of(FollowsTheLoss) as trainer:
        trainer.load(path)
        trainer.train()
        for _ in range(2):
            trainer.train(num_steps=STEPS - 2), trainer.validate()
            trainer.train()
        assert farthest(trainer.get_model(), expected) == 0


def test_a_state_of_an_earlier_version_has_the_last_epoch_of_each_plateau_alone():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    plateau = SchedulerConfig(torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))
    stepper = SchedulerStepper([plateau], lambda scheduler, metric: None)
    stepper.load_state_dict([3])
    assert (plateau.last_metric_epoch, plateau.within_epoch) == (3, None)

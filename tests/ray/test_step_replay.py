# SPDX-License-Identifier: Apache-2.0
"""Steps of several workers, of which some have died, are computed again in one process."""

from functools import partial

import pytest
from tests.ray.surviving import GLOBAL_BATCH, Classifier, digest
from tests.ray.surviving_in_shards import kill

from lockstep import TorchTrainer
from lockstep.errors import ConfigurationError, NotEnoughResourcesError
from lockstep.keys import BATCH_SIZE
from lockstep.testing import struck
from lockstep.trainer.logged_run import LoggedRun
from lockstep.trainer.step_replay import replay_run

# Three processes start, and two more in the places of those that die.
pytestmark = pytest.mark.timeout(240)

STEPS = 14


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two epochs with three workers, two of which die."""
    folder = tmp_path_factory.mktemp("run")
    with TorchTrainer(
        training_operator_cls=struck(Classifier, kill(1, 6), kill(0, 9)),
        config={BATCH_SIZE: GLOBAL_BATCH},
        num_workers=3,
        num_shards=4,
        resources_per_worker={"CPU": 0.5},
        spare_workers=1,
        reproducible=True,
        scheduler_step_freq="batch",
        checkpoint_dir=folder,
        checkpoint_every=5,
    ) as trainer:
        trainer.train()
        trainer.train()
        assert len(trainer.status()["recoveries"]) == 2
    return folder


def replayed(folder, step, operator_cls):
    make_trainer = partial(TorchTrainer, training_operator_cls=operator_cls)
    return replay_run(make_trainer, folder=folder, step=step)


@pytest.mark.slow
@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_each_step_has_the_bits_that_the_workers_had(run, step):
    report = replayed(run, step, Classifier)
    assert report.same_bits, str(report)


def trained(folder=None, replays=()):
    """The digest of the weights after two epochs; meanwhile steps of the first are replayed."""
    with TorchTrainer(
        training_operator_cls=Classifier,
        config={BATCH_SIZE: GLOBAL_BATCH},
        num_workers=2,
        reproducible=True,
        scheduler_step_freq="batch",
        checkpoint_dir=folder,
        checkpoint_every=None if folder is None else 3,
    ) as trainer:
        trainer.train()
        reports = [trainer.replay(**each) for each in replays]
        trainer.train()
        return digest(trainer), reports


def test_a_trainer_replays_its_own_steps_and_goes_on(tmp_path):
    replays = [{"step": 2}, {"step": 7, "shard": 1}]
    weights, reports = trained(tmp_path / "run", replays)
    assert [(each.step, each.same_bits) for each in reports] == [(2, True), (7, True)]
    assert weights == trained()[0]


def test_without_a_log_nothing_is_replayed():
    with (
        TorchTrainer(
            training_operator_cls=Classifier,
            config={BATCH_SIZE: GLOBAL_BATCH},
            scheduler_step_freq="batch",
        ) as trainer,
        pytest.raises(ConfigurationError, match="checkpoint_dir"),
    ):
        trainer.replay(1)


class FailsOnce(Classifier):
    """In its third step."""

    def compute_loss(self, batch, batch_info):
        if self.global_step == 2 and not hasattr(self, "has_failed"):
            self.has_failed = True
            raise LookupError("mine")
        return super().compute_loss(batch, batch_info)


@pytest.mark.slow
def test_a_replay_that_lacks_room_leaves_the_run_that_was_interrupted(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_START_TIMEOUT_S", "1")
    with TorchTrainer(
        training_operator_cls=FailsOnce,
        config={BATCH_SIZE: GLOBAL_BATCH},
        num_workers=3,
        scheduler_step_freq="batch",
        checkpoint_dir=tmp_path,
    ) as trainer:
        trainer.train(num_steps=2)
        with pytest.raises(LookupError):
            trainer.train()
        with pytest.raises(NotEnoughResourcesError):
            trainer.replay(1, num_workers=2)
        assert trainer.train(num_steps=1)["batch_count"] == 1
        assert trainer.status()["step"] == 3


@pytest.mark.slow
def test_one_rank_hashes_the_weights(run):
    for step in LoggedRun.read(run).steps.values():
        parts = [part for part, _, _ in step.line["w"]]
        assert len(parts) == len(set(parts))


@pytest.mark.slow
def test_other_weights_are_not_the_same_bits(run):
    report = replayed(run, 3, Steeper)
    assert report.differences[0].step == 1
    assert any("the weights" in each.what for each in report.differences)


class Steeper(Classifier):
    def setup(self, config):
        super().setup(config)
        self.optimizer.param_groups[0]["lr"] *= 2

# SPDX-License-Identifier: Apache-2.0
"""Trials of Ray Tune around a trainer: resources, results, checkpoints, going on."""

import json
import logging
import os
import re
import signal
from functools import partial
from pathlib import Path

import pytest
import torch
from ray.util.placement_group import placement_group as new_placement_group
from ray.util.placement_group import remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from tests.ray.operators import net, problem
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
import ray
from lockstep import Callback, TorchTrainer, TrainingOperator
from lockstep.engine import actor_pool
from lockstep.errors import ConfigurationError, NotEnoughResourcesError, WrongTypeError
from lockstep.integrations.tune import report, resources, restore
from lockstep.keys import BATCH_SIZE
from ray import tune

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(autouse=True)
def _ctrl_c_is_the_processs_own():
    """Ray Tune sets a handler in which the next Ctrl-C has no effect, and leaves it there."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def room_for_trials():
    """The workers that wait for a trainer of this process hold what a trial's would need."""
    actor_pool.end_idle_pools()
    yield
    lockstep.prestart(num_workers=2, keep=True)


needs_room = pytest.mark.usefixtures("room_for_trials")


@pytest.fixture
def three_bundles():
    group = new_placement_group([{"CPU": 1}] * 3)
    ray.get(group.ready())
    yield group
    remove_placement_group(group)


class Tuned(TrainingOperator):
    def setup(self, config):
        self.model, self.optimizer, self.criterion, self.scheduler = self.register(
            models=(model := net()),
            optimizers=(
                optimizer := torch.optim.SGD(
                    model.parameters(), lr=config["lr"], momentum=config.get("momentum", 0.9)
                )
            ),
            criterion=nn.MSELoss(),
            schedulers=torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
        )
        loader = DataLoader(TensorDataset(*problem()), config[BATCH_SIZE])
        self.register_data(train_loader=loader, validation_loader=loader)


ARGUMENTS = {
    "training_operator_cls": Tuned,
    "config": {BATCH_SIZE: 12, "lr": 1.0},
    "scheduler_step_freq": "epoch",
}


def lr(operator):
    return operator.optimizer.param_groups[0]["lr"]


def fit(trainable, space, tmp_path, *, iterations=2, tuning=None, **run):
    return tune.Tuner(
        trainable,
        param_space=space,
        tune_config=tune.TuneConfig(**(tuning or {})),
        run_config=tune.RunConfig(
            stop={"training_iteration": iterations}, storage_path=str(tmp_path), verbose=0, **run
        ),
    ).fit()


def bundles(config=None, **arguments):
    trainable = TorchTrainer.as_trainable(**{**ARGUMENTS, **arguments})
    return trainable.default_resource_request(config or {}).bundles


def test_what_a_trial_asks_for():
    assert bundles() == [{"CPU": 1}]
    assert bundles(num_workers=2) == [{"CPU": 1}] * 2
    assert bundles(num_workers=2, use_gpu="auto", use_local=True) == [{"CPU": 1}] * 2
    assert bundles({"num_workers": 3}, num_cpus_per_worker=2) == [{"CPU": 2}] * 3
    assert bundles(num_workers=2, spare_workers=1) == [{"CPU": 1}] * 3
    assert bundles(num_workers=2, spare_workers=1, use_local=True) == [{"CPU": 1}] * 3
    gpus = {"use_gpu": True, "resources_per_worker": {"lane": 1}}
    assert bundles(**gpus) == [{"CPU": 1, "GPU": 1, "lane": 1}]
    replicas = bundles(use_gpu=True, num_workers=4, sync="data_parallel")
    assert replicas == [{"CPU": 1, "GPU": 4}]
    assert resources(2, num_gpus_per_worker=1).bundles == [{"CPU": 1, "GPU": 1}] * 2
    assert resources(2, spare_workers=1).bundles == [{"CPU": 1}] * 3


def test_a_trial_that_can_not_be_placed_is_told_of(caplog):
    with caplog.at_level(logging.WARNING, logger="lockstep"):
        bundles(num_workers=4)
        resources(2, num_cpus_per_worker=2)
        assert caplog.text == ""
        bundles({"num_workers": 3}, num_cpus_per_worker=2)
        assert "it asks for 3 x (2 CPU), and there is room for 2 of them on 1 nodes" in caplog.text
        assert "ray.init(num_cpus=6" in caplog.text
        caplog.clear()
        resources(5)
        assert "it asks for 5 x (1 CPU), and there is room for 4" in caplog.text


def test_what_is_wrong_is_said_before_tune_starts():
    with pytest.raises(ConfigurationError, match=r"does not take \(trainer, info\)"):
        TorchTrainer.as_trainable(**ARGUMENTS, override_tune_step=lambda trainer: {})
    with pytest.raises(WrongTypeError, match="training_operator_cls"):
        TorchTrainer.as_trainable(training_operator_cls=TorchTrainer)


def described(trainer, info):
    """Where the workers are, and what they were given."""
    rooms = trainer.apply_all_workers(placement_group)
    return {
        **trainer.train(),
        "rates": trainer.apply_all_operators(lr),
        "rooms": len({*rooms, placement_group()}),
        "iteration": info["iteration"],
    }


def placement_group():
    return ray.get_runtime_context().get_placement_group_id()


@pytest.mark.slow
def test_one_worker_is_the_trial_itself(tmp_path):
    trainable = TorchTrainer.as_trainable(**ARGUMENTS, override_tune_step=described)
    at_end = tune.CheckpointConfig(checkpoint_at_end=True)
    found = fit(trainable, {"lr": 0.04}, tmp_path, checkpoint_config=at_end)
    metrics = found[0].metrics
    assert metrics["rates"] == pytest.approx([0.04 * 0.5**2])
    assert (metrics["epoch"], metrics["iteration"], metrics["rooms"]) == (2, 1, 1)
    with found[0].checkpoint.as_directory() as folder, TorchTrainer(**ARGUMENTS) as trainer:
        trainer.load(os.path.join(folder, "trainer.checkpoint"))
        assert trainer.train()["epoch"] == 3


@pytest.mark.slow
def test_a_trial_ends_when_a_callback_wants_to_stop(tmp_path):
    class Enough(Callback):
        def on_train_end(self, trainer, result):
            if result["epoch"] == 2:
                self.stop_reason = "two epochs are enough"

    trainable = TorchTrainer.as_trainable(**ARGUMENTS, callbacks=[Enough()])
    found = fit(trainable, {"lr": 0.04}, tmp_path, iterations=5)
    assert found[0].error is None
    assert found[0].metrics["training_iteration"] == 2


@pytest.mark.slow
@needs_room
def test_two_workers_live_in_the_room_of_their_trial(tmp_path):
    trainable = TorchTrainer.as_trainable(**ARGUMENTS, override_tune_step=described)
    found = fit(trainable, {"lr": 0.04, "num_workers": 2}, tmp_path)
    result = found[0]
    assert result.error is None
    assert result.metrics["rooms"] == 1
    assert result.metrics["rates"] == pytest.approx([0.04 * 0.5**2] * 2)
    assert (result.metrics["epoch"], result.metrics["iteration"]) == (2, 1)
    # Nothing of it is left: the next trainer of this process finds its room.
    with TorchTrainer(**ARGUMENTS, num_workers=3) as three:
        assert three.train()["num_samples"] == 37


@pytest.mark.slow
@needs_room
@pytest.mark.parametrize(("is_function", "spares"), [(False, 0), (True, 0), (False, 1), (True, 1)])
def test_a_trial_may_take_all_of_a_cluster(is_function, spares, tmp_path):
    """Four workers and spares on four CPUs: the process that drives them holds none."""
    count = {"num_workers": 4 - spares, "spare_workers": spares}

    def function(config):
        with TorchTrainer(**ARGUMENTS, **count) as trainer:
            report(trainer, described(trainer, {"iteration": 1}))

    trainable = TorchTrainer.as_trainable(**ARGUMENTS, **count, override_tune_step=described)
    asked = tune.with_resources(function, resources(**count)) if is_function else trainable
    found = fit(asked, {"lr": 0.04}, tmp_path, iterations=1)
    assert found[0].error is None
    assert found[0].metrics["rooms"] == 1
    assert len(found[0].metrics["rates"]) == 4 - spares


class Stumbles(Tuned):
    """Fails once, in the third epoch of a run that was not restored."""

    def train_epoch(self, iterator, info):
        if info["epoch_idx"] == 2 and not os.path.exists(self.config["marker"]):
            open(self.config["marker"], "w").close()
            raise LookupError("stumbled")
        return super().train_epoch(iterator, info)


@pytest.mark.slow
@needs_room
def test_a_failed_trial_goes_on_from_its_checkpoint(tmp_path):
    trainable = TorchTrainer.as_trainable(
        **{**ARGUMENTS, "training_operator_cls": Stumbles}, num_workers=2
    )
    found = fit(
        trainable,
        {"marker": str(tmp_path / "stumbled"), "lr": 0.05},
        tmp_path / "results",
        iterations=4,
        checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=1),
        failure_config=tune.FailureConfig(max_failures=1),
    )
    result = found[0]
    assert (tmp_path / "stumbled").exists()
    assert (result.metrics["epoch"], result.metrics["training_iteration"]) == (4, 4)
    with result.checkpoint.as_directory() as folder, TorchTrainer(**ARGUMENTS) as trainer:
        trainer.load(os.path.join(folder, "trainer.checkpoint"))
        tuned = trainer.get_model()
    config = {**ARGUMENTS["config"], "lr": 0.05}
    with TorchTrainer(**{**ARGUMENTS, "config": config}, num_shards=2) as undisturbed:
        for _ in range(4):
            undisturbed.train()
        expected = undisturbed.get_model()
    for one, other in zip(tuned.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-12)
    assert set(result.metrics["profile"]) >= {"mean_fwd_s", "mean_eval_fwd_s"}


@pytest.mark.slow
@needs_room
def test_bad_trials_are_stopped_early_and_tune_run_works(tmp_path):
    analysis = tune.run(
        TorchTrainer.as_trainable(**ARGUMENTS),
        config={"lr": tune.grid_search([0.05, 1e-6, 1e-7, 1e-8])},
        metric="val_loss",
        mode="min",
        scheduler=tune.schedulers.ASHAScheduler(max_t=8, grace_period=1, reduction_factor=2),
        # Held against those before it: of four side by side each may be the best so far.
        max_concurrent_trials=1,
        storage_path=str(tmp_path),
        verbose=0,
    )
    assert analysis.best_config["lr"] == 0.05
    epochs = {trial.config["lr"]: trial.last_result["epoch"] for trial in analysis.trials}
    assert epochs == {0.05: 8, 1e-6: 1, 1e-7: 1, 1e-8: 1}


def function_trial(config):
    with TorchTrainer(**{**ARGUMENTS, "config": config}, num_workers=2) as trainer:
        assert trainer.apply_all_workers(placement_group) == [placement_group()] * 2
        restored = restore(trainer)
        for _ in range(2):
            trainer.train()
            report(trainer, {**trainer.validate(), "restored": restored})


@pytest.mark.slow
@needs_room
def test_a_function_reports_and_goes_on(tmp_path):
    function = tune.with_resources(function_trial, resources(num_workers=2))
    found = fit(function, ARGUMENTS["config"], tmp_path, iterations=9)
    assert found[0].error is None
    assert not found[0].metrics["restored"]
    with found[0].checkpoint.as_directory() as folder:
        assert set(os.listdir(folder)) >= {"trainer.checkpoint", "hyperparameters.json"}


@pytest.mark.slow
@needs_room
def test_the_documented_function_trains_as_long_after_a_failure_as_without(tmp_path):
    """It fails behind its first report, and goes on from the checkpoint in it."""
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "tune.md").read_text()
    program = re.search(r"^def trial\(config\):\n(?:    .*\n)+", page, re.MULTILINE).group()
    failed = tmp_path / "failed"

    def report_and_fail(*arguments):
        report(*arguments)
        if not failed.exists():
            failed.touch()
            raise LookupError("stumbled")

    names = {
        "BATCH_SIZE": BATCH_SIZE,
        "SmallDigits": Tuned,
        "TorchTrainer": partial(TorchTrainer, scheduler_step_freq="epoch"),
        "report": report_and_fail,
        "restore": restore,
    }
    exec(program, names)
    found = fit(
        tune.with_resources(names["trial"], resources(num_workers=2)),
        {BATCH_SIZE: 12, "lr": 0.1},
        tmp_path / "results",
        iterations=9,
        failure_config=tune.FailureConfig(max_failures=1),
    )
    assert failed.exists()
    with found[0].checkpoint.as_directory() as folder, opened() as trainer:
        trainer.load(os.path.join(folder, "trainer.checkpoint"))
        assert trainer.status()["epochs_finished"] == 2


# ----------------------------------------------------- the hyperparameters of another trial


def opened(**config):
    return TorchTrainer(**{**ARGUMENTS, "config": {**ARGUMENTS["config"], **config}})


def test_a_changed_hyperparameter_survives_the_state_of_another_trial(tmp_path):
    from lockstep.integrations.tune import trial_checkpoint

    folder = str(tmp_path)
    with opened(lr=0.8) as donor:
        donor.train()
        trial_checkpoint.write(donor, folder)
        donor.train()
        goes_on = donor.apply_all_operators(lr)[0]
    with opened(lr=0.8) as same:
        trial_checkpoint.read(same, folder)
        assert same.apply_all_operators(lr) == [0.4]
        same.train()
        assert same.apply_all_operators(lr) == [goes_on]
    with opened(lr=0.1, momentum=0.5) as explorer:
        trial_checkpoint.read(explorer, folder)
        operator = explorer.get_local_operator()
        group = operator.optimizer.param_groups[0]
        # The schedule has halved the donor's rate once; ours is halved as often.
        assert (group["lr"], group["momentum"]) == pytest.approx((0.05, 0.5))
        assert len(operator.optimizer.state) == 4
        assert operator.scheduler.base_lrs == [0.1]
        explorer.train()
        assert explorer.apply_all_operators(lr) == pytest.approx([0.025])
    written = json.loads((tmp_path / "hyperparameters.json").read_text())
    assert written[0][0]["initial_lr"] == 0.8


@ray.remote(num_cpus=1)
class Helper:
    def answer(self):
        return True


@ray.remote(num_cpus=1)
def trains_beside_a_helper():
    """In a group of three bundles: one for itself, one for the helper, and one is left."""
    os.environ["LOCKSTEP_START_TIMEOUT_S"] = "1"
    # Not in the first bundle, whose CPU Ray lends to others while this task waits.
    second = PlacementGroupSchedulingStrategy(
        ray.util.get_current_placement_group(), placement_group_bundle_index=1
    )
    helper = Helper.options(scheduling_strategy=second).remote()
    assert ray.get(helper.answer.remote())
    try:
        TorchTrainer(
            training_operator_cls=Tuned,
            num_workers=2,
            config={"lr": 0.1, BATCH_SIZE: 12},
            # Without it the one worker that has room refuses to start, and may be heard first.
            scheduler_step_freq="epoch",
        ).shutdown()
    except NotEnoughResourcesError as error:
        return str(error)
    return "trained"


@pytest.mark.slow
@needs_room
def test_bundles_of_the_program_that_others_hold_are_not_waited_for_for_ever(three_bundles):
    place = PlacementGroupSchedulingStrategy(
        three_bundles, placement_group_bundle_index=0, placement_group_capture_child_tasks=True
    )
    said = ray.get(trains_beside_a_helper.options(scheduling_strategy=place).remote())
    assert "no room for 2 workers" in said, said

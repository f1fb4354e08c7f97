# SPDX-License-Identifier: Apache-2.0
"""What an iteration of a trial reports, and whose hyperparameters it trains with."""

import pytest
import torch
from tests.unit.trainer.programs import (
    SAMPLES,
    STEPS_PER_EPOCH,
    Regression,
    linear,
    loader,
    trainer,
)
from torch.optim import lr_scheduler

from lockstep import TorchTrainer
from lockstep.errors import ConfigurationError
from lockstep.integrations.tune import restore, trial_checkpoint
from lockstep.integrations.tune.trainable import _train_and_validate


class Measured(Regression):
    """Training and validation report a metric of one name; the second has 12 samples alone."""

    def setup(self, config):
        super().setup(config)
        some = [batch for batch, _ in zip(loader(), range(2), strict=False)]
        self.register_data(train_loader=loader(), validation_loader=some)

    def compute_loss(self, batch, batch_info):
        loss = super().compute_loss(batch, batch_info)
        return loss, {"error": 1.0 if self.model.training else 2.0}


def test_a_metric_of_both_is_the_validations_and_a_count_the_trainings():
    with trainer(Measured) as one:
        result = _train_and_validate(one)
        assert (result["error"], result["last_error"]) == (2.0, 2.0)
        counts = result["num_samples"], result["batch_count"], result["epoch"]
        assert counts == (SAMPLES, STEPS_PER_EPOCH, 1)
        assert {"train_loss", "val_loss"} <= result.keys()


def test_the_number_of_workers_is_no_key_of_the_operators_config():
    made = TorchTrainer.as_trainable(training_operator_cls=Regression, config={"shuffle": True})
    one = made.__new__(made)._make_trainer({"num_workers": 1, "lr": 0.1})
    with one:
        assert dict(one.get_local_operator().config) == {"shuffle": True, "lr": 0.1}


class Unfreezes(Regression):
    """The bias trains from the second epoch on, at a rate of its own."""

    def setup(self, config):
        model = linear()
        optimizer = torch.optim.SGD([model.weight], lr=config["lr"])
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=optimizer, criterion=torch.nn.MSELoss()
        )
        self.register_data(train_loader=loader(), validation_loader=loader())

    def train_epoch(self, iterator, info):
        if info["epoch_idx"] == 1:
            own = {"params": [self.model.bias], "lr": self.config["lr"] / 4, "weight_decay": 0.5}
            self.optimizer.add_param_group(own)
        return super().train_epoch(iterator, info)


def test_a_group_added_since_setup_has_the_rate_of_the_trial_that_goes_on(tmp_path):
    """No config of the other trial says its rate: it follows that of the optimizer."""
    with trainer(Unfreezes, config={"lr": 0.8}) as donor:
        donor.train(), donor.train()
        trial_checkpoint.write(donor, str(tmp_path))
    with trainer(Unfreezes, config={"lr": 0.2}) as explorer:
        trial_checkpoint.read(explorer, str(tmp_path))
        groups = explorer.get_local_operator().optimizer.param_groups
        assert [group["lr"] for group in groups] == pytest.approx([0.2, 0.05])
        assert groups[1]["weight_decay"] == 0.5
        explorer.train()


# ------------------------------------------------------------------- of a scheduler's own


class Warm:
    """A multiplier of the learning rate that grows for `steps` steps."""

    def __init__(self, steps):
        self.steps = steps

    def __call__(self, step):
        return min(1.0, (step + 1) / self.steps)


class Own:
    """Its state has a count that begins as a setting, and a key that JSON does not have."""

    def __init__(self, optimizer, config):
        self.optimizer = optimizer
        self.every = self.left = config["every"]
        self.counts = {"every": self.every, (0, "weight"): 0}

    def step(self):
        self.left = self.left - 1 or self.every
        self.counts[0, "weight"] += 1

    def state_dict(self):
        return {"every": self.every, "left": self.left, "counts": self.counts}

    def load_state_dict(self, state):
        vars(self).update(state)


class WithoutLoad:
    """Only reports how far it is."""

    def __init__(self, optimizer, config):
        self.optimizer, self.every, self.steps = optimizer, config["every"], 0

    def step(self):
        self.steps += 1

    def state_dict(self):
        return {"every": self.every, "steps": self.steps}


SCHEDULERS = {
    "step": lambda optimizer, c: lr_scheduler.StepLR(optimizer, c["every"], c["gamma"]),
    "milestones": lambda optimizer, c: lr_scheduler.MultiStepLR(
        optimizer, [c["every"], 6, 6], gamma=c["gamma"]
    ),
    "maybe milestones": lambda optimizer, c: lr_scheduler.MultiStepLR(
        optimizer, [6] * (c["gamma"] < 0.5)
    ),
    "own": Own,
    "without load": WithoutLoad,
    "object": lambda optimizer, c: lr_scheduler.LambdaLR(optimizer, Warm(5 * c["every"])),
    "cycle": lambda optimizer, c: lr_scheduler.CyclicLR(
        optimizer, c["lr"], 3 * c["lr"], step_size_up=c["every"]
    ),
    "one cycle": lambda optimizer, c: lr_scheduler.OneCycleLR(
        optimizer, c["lr"], total_steps=20 * c["every"], pct_start=c["gamma"] / 2
    ),
    "restarts": lambda optimizer, c: lr_scheduler.CosineAnnealingWarmRestarts(
        optimizer, c["every"], T_mult=2
    ),
    "restarts that do not grow": lambda optimizer, c: lr_scheduler.CosineAnnealingWarmRestarts(
        optimizer, c["every"], T_mult=2 if c["gamma"] < 0.5 else 1
    ),
    "restarts in a sequence": lambda optimizer, c: lr_scheduler.SequentialLR(
        optimizer,
        [
            lr_scheduler.ConstantLR(optimizer, c["gamma"], total_iters=2),
            lr_scheduler.CosineAnnealingWarmRestarts(optimizer, c["every"] - 1, T_mult=2),
        ],
        milestones=[2],
    ),
    "sequence": lambda optimizer, c: lr_scheduler.SequentialLR(
        optimizer,
        [
            lr_scheduler.ConstantLR(optimizer, c["gamma"], total_iters=2),
            lr_scheduler.LambdaLR(optimizer, Warm(5 * c["every"])),
        ],
        milestones=[2],
    ),
}


class Scheduled(Regression):
    """Registers its scheduler, or leaves it to `train_batch` under a name of its own."""

    def setup(self, config):
        model = linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)
        self.made = SCHEDULERS[config["kind"]](optimizer, config)
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=optimizer, criterion=torch.nn.MSELoss()
        )
        self.register_data(train_loader=loader(), validation_loader=loader())

    def train_batch(self, batch, batch_info):
        result = super().train_batch(batch, batch_info)
        self.made.step()
        return result


class Registered(Scheduled):
    def register(self, **parts):
        return super().register(**parts, schedulers=self.made)[:3]

    def train_batch(self, batch, batch_info):
        return super(Scheduled, self).train_batch(batch, batch_info)


def scheduled(operator, **config):
    step_freq = "batch" if operator is Registered else None
    return trainer(operator, config=config, scheduler_step_freq=step_freq)


def settings_of(one):
    """The learning rates that the scheduler reports, and all settings of the optimizer."""
    operator = one.get_local_operator()
    return operator.made.get_last_lr(), [
        {key: value for key, value in group.items() if key != "params"}
        for group in operator.optimizer.param_groups
    ]


MULTIPLYING = ["step", "milestones"]
COMPUTING = sorted(SCHEDULERS.keys() - {*MULTIPLYING, "maybe milestones", "own", "without load"})

OWN_LOOP_AND_DEFAULT = pytest.mark.parametrize("operator", [Scheduled, Registered])


@OWN_LOOP_AND_DEFAULT
@pytest.mark.parametrize("kind", COMPUTING)
def test_a_scheduler_that_computes_the_rate_is_the_trials_own(operator, kind, tmp_path):
    """Behind the exploit the rates are those of a run with the trial's config from the start."""
    theirs = {"kind": kind, "lr": 0.04, "every": 2, "gamma": 0.3}
    ours = {"kind": kind, "lr": 0.01, "every": 3, "gamma": 0.9}
    with scheduled(operator, **theirs) as donor:
        donor.train()
        trial_checkpoint.write(donor, str(tmp_path))
        donor.train()
        goes_on = settings_of(donor)
    with scheduled(operator, **theirs) as same:
        trial_checkpoint.read(same, str(tmp_path))
        same.train()
        assert settings_of(same) == goes_on
    with scheduled(operator, **ours) as alone, scheduled(operator, **ours) as explorer:
        trial_checkpoint.read(explorer, str(tmp_path))
        alone.train()
        for _ in range(2):
            for one in (alone, explorer):
                one.train()
            assert settings_of(explorer) == settings_of(alone)


@OWN_LOOP_AND_DEFAULT
@pytest.mark.parametrize("kind", MULTIPLYING)
def test_a_scheduler_that_multiplies_the_rate_goes_on_by_the_trials_own_factor(
    operator, kind, tmp_path
):
    with scheduled(operator, kind=kind, lr=0.4, every=3, gamma=0.5) as donor:
        donor.train()  # four steps
        trial_checkpoint.write(donor, str(tmp_path))
    with scheduled(operator, kind=kind, lr=0.4, every=5, gamma=0.1) as explorer:
        trial_checkpoint.read(explorer, str(tmp_path))
        made = explorer.get_local_operator().made
        explorer.train(num_steps=1)
        assert made.get_last_lr() == pytest.approx([0.2 * 0.1])
        explorer.train(num_steps=1)
        later = 0.1**2 if kind == "milestones" else 1
        assert made.get_last_lr() == pytest.approx([0.2 * 0.1 * later])


def test_a_trial_without_a_milestone_keeps_none_in_the_state_of_one_that_has_them(tmp_path):
    with scheduled(Scheduled, kind="maybe milestones", lr=0.4, gamma=0.1) as donor:
        donor.train()
        trial_checkpoint.write(donor, str(tmp_path))
    with scheduled(Scheduled, kind="maybe milestones", lr=0.4, gamma=0.9) as explorer:
        trial_checkpoint.read(explorer, str(tmp_path))
        made = explorer.get_local_operator().made
        assert list(made.milestones.elements()) == []
        explorer.train()
        assert (made.last_epoch, made.get_last_lr()) == (2 * STEPS_PER_EPOCH, [0.4])


@OWN_LOOP_AND_DEFAULT
def test_what_training_has_changed_in_a_schedulers_state_goes_on(operator, tmp_path):
    """And a setting beside it is the trial's own."""
    with scheduled(operator, kind="own", lr=0.4, every=3) as donor:
        donor.train()  # four steps
        trial_checkpoint.write(donor, str(tmp_path))
    with scheduled(operator, kind="own", lr=0.4, every=5) as explorer:
        trial_checkpoint.read(explorer, str(tmp_path))
        made = explorer.get_local_operator().made
        assert (made.every, made.left) == (5, 2)
        assert made.counts == {"every": 5, (0, "weight"): STEPS_PER_EPOCH}


def test_a_scheduler_that_cannot_load_is_left_as_it_is(tmp_path):
    with scheduled(Registered, kind="without load", lr=0.4, every=3) as donor:
        donor.train()
        trial_checkpoint.write(donor, str(tmp_path))
    with scheduled(Registered, kind="without load", lr=0.1, every=5) as explorer:
        trial_checkpoint.read(explorer, str(tmp_path))
        operator = explorer.get_local_operator()
        assert (operator.made.every, operator.made.steps) == (5, 0)
        assert operator.optimizer.param_groups[0]["lr"] == 0.1


# -------------------------------------------------------- a trial that goes on from its own


class Halving(Unfreezes):
    """Its loop halves the learning rate behind each epoch."""

    def train_epoch(self, iterator, info):
        result = super(Unfreezes, self).train_epoch(iterator, info)
        self.optimizer.param_groups[0]["lr"] /= 2
        return result


def test_a_trial_goes_on_from_a_checkpoint_that_it_wrote_when_it_had_trained(tmp_path):
    """What it was made with is known, also where it restored nothing when it began."""
    config = {"kind": "cycle", "lr": 0.04, "every": 3, "gamma": 0.3}
    paths = [tmp_path / str(epoch) for epoch in range(2)]
    with scheduled(Scheduled, **config) as first:
        for path in paths:
            path.mkdir()
            first.train()
            trial_checkpoint.write(first, str(path))
        first.train()
        goes_on = settings_of(first)
    with scheduled(Scheduled, **config) as again:
        trial_checkpoint.read(again, str(paths[-1]))
        again.train()
        assert settings_of(again) == goes_on


def test_a_rate_that_the_loop_has_set_by_hand_is_the_one_to_go_on_with(tmp_path):
    with trainer(Halving, config={"lr": 0.8}) as first:
        first.train()
        trial_checkpoint.write(first, str(tmp_path))
    for lr in (0.8, 0.2):
        with trainer(Halving, config={"lr": lr}) as again:
            trial_checkpoint.read(again, str(tmp_path))
            assert again.get_local_operator().optimizer.param_groups[0]["lr"] == lr / 2


# ----------------------------------------------------------------- one state for each trial


@pytest.mark.parametrize(
    "argument", [{"checkpoint_dir": "d"}, {"checkpoint_every": 5}, {"resume": "trained.ckpt"}]
)
def test_a_trial_has_no_state_but_that_of_its_own(argument):
    with pytest.raises(ConfigurationError, match=r"CheckpointConfig\("):
        TorchTrainer.as_trainable(training_operator_cls=Regression, **argument)
    TorchTrainer.as_trainable(training_operator_cls=Regression, **dict.fromkeys(argument))


def test_restore_wants_a_trainer_that_has_not_gone_on_from_elsewhere(tmp_path):
    """Its optimizers would have the rates of that state, and not those of the trial's config."""
    path = tmp_path / "trained.ckpt"
    with trainer() as one:
        one.train()
        one.save(path)
    with trainer(resume=path) as one, pytest.raises(ConfigurationError, match="4 global batches"):
        restore(one)

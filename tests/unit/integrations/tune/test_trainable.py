# SPDX-License-Identifier: Apache-2.0
"""What an iteration of a trial reports."""

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

from lockstep import TorchTrainer
from lockstep.integrations.tune import trial_checkpoint
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
        trial_checkpoint.note_hyperparameters(donor)
        donor.train(), donor.train()
        trial_checkpoint.write(donor, str(tmp_path))
    with trainer(Unfreezes, config={"lr": 0.2}) as explorer:
        trial_checkpoint.read(explorer, str(tmp_path))
        groups = explorer.get_local_operator().optimizer.param_groups
        assert [group["lr"] for group in groups] == pytest.approx([0.2, 0.05])
        assert groups[1]["weight_decay"] == 0.5
        explorer.train()

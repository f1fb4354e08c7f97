# SPDX-License-Identifier: Apache-2.0
"""Settings that a step has changed go back with it, and others stay as the user has set them."""

import pytest
import torch
from tests.ray.surviving import STEPS_IN_EPOCH, Classifier, digest, trainer_of
from torch import nn

from unit.trainer.programs import STEPS_PER_EPOCH, Regression, linear, loader, trainer


def test_what_is_frozen_between_the_batches_of_a_window_stays_so():
    """Not what a loss has frozen that failed."""

    class Fails(Regression):
        fails = False

        def compute_loss(self, batch, batch_info):
            if self.fails:
                self.model.eval().requires_grad_(False)
                raise LookupError
            return super().compute_loss(batch, batch_info)

    with trainer(Fails, accumulate=2) as run:
        run.train(num_steps=1)
        operator = run.get_local_operator()
        operator.model.bias.requires_grad_(False)
        operator.fails = True
        with pytest.raises(LookupError):
            run.train()
        operator.fails = False
        run.train(num_steps=1)
        model = operator.model
        assert (model.weight.requires_grad, model.bias.requires_grad) == (True, False)
        assert model.training


def test_a_step_that_counts_although_its_loop_failed_leaves_nothing_frozen():
    class Own(Classifier):
        fails = False

        def train_batch(self, batch, batch_info):
            features, classes = batch
            self.optimizer.zero_grad()
            loss = self.criterion(self.model(features), classes)
            loss.backward()
            self.optimizer.step()
            if self.fails and self.global_step == 4:
                self.model.eval().requires_grad_(False)
                raise RuntimeError("behind the optimizer")
            return {"train_loss": loss.item()}

    class Fails(Own):
        fails = True

    arguments = {"num_workers": 1, "num_shards": 2}
    with trainer_of(Own, [], **arguments) as run:
        run.train(num_steps=STEPS_IN_EPOCH + 4)
        expected = digest(run)
    with trainer_of(Fails, [], **arguments) as run:
        with pytest.raises(RuntimeError, match="behind"):
            run.train()
        run.train(num_steps=STEPS_IN_EPOCH + 4 - run.status()["step"])
        assert digest(run) == expected


@pytest.mark.parametrize("number", [float, torch.tensor])
def test_a_learning_rate_goes_back_with_the_step_that_has_decayed_it(number):
    """Torch's schedulers write into one that is a tensor, and replace one that is a number."""

    class Decays(Regression):
        fails = True

        def setup(self, config):
            self.model, self.lr = linear(), number(0.1)
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=self.lr)
            self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
            self.register(models=self.model, optimizers=self.optimizer, schedulers=self.scheduler)
            self.register_data(train_loader=loader())

        def train_epoch(self, iterator, info):
            for n, (features, target) in enumerate(iterator):
                if n == 2 and self.fails:
                    self.fails = False
                    raise LookupError("no such metric")
                self.optimizer.zero_grad()
                nn.functional.mse_loss(self.model(features), target).backward()
                self.optimizer.step()
                self.scheduler.step()
            return {}

    with trainer(Decays, scheduler_step_freq="manual") as run:
        with pytest.raises(LookupError):
            run.train()
        run.train()
        operator = run.get_local_operator()
        (group,) = operator.optimizer.param_groups
        assert float(group["lr"]) == pytest.approx(0.1 * 0.5**STEPS_PER_EPOCH)
        assert number is float or group["lr"] is operator.lr


class Unfreezes(Regression):
    """Its third batch lets the bias train as well, and fails behind that once."""

    fails = False

    def setup(self, config):
        model = linear()
        self.optimizer = torch.optim.SGD([model.weight], lr=0.1, momentum=0.9)
        self.model, self.optimizer = self.register(models=model, optimizers=self.optimizer)
        self.register_data(train_loader=loader())

    def train_batch(self, batch, batch_info):
        if self.global_step == 2:
            self.optimizer.add_param_group({"params": [self.model.bias], "lr": 0.05})
            if self.fails:
                self.fails = False
                raise LookupError
        features, target = batch
        loss = nn.functional.mse_loss(self.model(features), target)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return {"train_loss": loss.item()}


def test_a_group_that_an_interrupted_step_has_added_is_added_once():
    found = []
    for fails in (False, True):
        with trainer(Unfreezes) as run:
            run.train(num_steps=1)
            run.get_local_operator().fails = fails
            if fails:
                with pytest.raises(LookupError):
                    run.train()
            run.train(num_steps=STEPS_PER_EPOCH - run.status()["step"])
            found.append(digest(run))
    assert found[0] == found[1]

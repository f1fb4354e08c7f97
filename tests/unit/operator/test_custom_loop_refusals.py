# SPDX-License-Identifier: Apache-2.0
"""What `setup`, or code after it, sets in an operator too late, or with half an effect."""

import pytest
from tests.unit.trainer.programs import Regression, loader, trainer

from lockstep.errors import ConfigurationError, DataOrderError


class SumsLater(Regression):
    def setup(self, config):
        super().setup(config)
        self.loss_reduction = "sum"


class OwnLoss(Regression):
    def setup(self, config):
        super().setup(config)
        self.compute_loss = self.absolute

    def absolute(self, batch, batch_info):
        features, target = batch
        return (self.model(features) - target).abs().mean()


class OwnValidation(Regression):
    def setup(self, config):
        super().setup(config)
        self.validate = lambda iterator, info: {"seen": 1}


class OwnState(Regression):
    def setup(self, config):
        super().setup(config)
        self.state_dict = lambda: {"seen": 1}


class WrappedLoss(Regression):
    """The class has a method of its own: all that asks for one finds it."""

    def setup(self, config):
        super().setup(config)
        self.compute_loss = self.counted(self.compute_loss)
        self.calls = 0

    def compute_loss(self, batch, batch_info):
        return super().compute_loss(batch, batch_info)

    def counted(self, method):
        def call(*arguments):
            self.calls += 1
            return method(*arguments)

        return call


@pytest.mark.parametrize(
    ("operator_cls", "text"),
    [
        (SumsLater, 'became "sum" after register'),
        (OwnLoss, "compute_loss was assigned"),
        (OwnValidation, "validate was assigned"),
        (OwnState, "state_dict was assigned"),
    ],
)
def test_what_setup_sets_too_late_is_refused(operator_cls, text):
    with pytest.raises(ConfigurationError, match=text):
        trainer(operator_cls)


def test_a_loss_reduction_that_changes_between_calls_is_refused():
    with trainer() as one:
        one.train(num_steps=1)
        one.get_local_operator().loss_reduction = "sum"
        with pytest.raises(ConfigurationError, match="after register"):
            one.train()


def test_a_method_of_the_class_may_be_wrapped():
    with trainer(WrappedLoss) as one:
        one.train()
        assert one.get_local_operator().calls == 4


def test_a_loader_that_is_registered_after_setup_is_refused():
    with trainer() as one:
        one.train()
        with pytest.raises(ConfigurationError, match="register_data was called after setup"):
            one.get_local_operator().register_data(train_loader=loader())


def test_a_batch_size_that_changes_between_epochs_is_refused():
    class Kept(Regression):
        def data(self):
            self.loader = super().data()
            return self.loader

    with trainer(Kept) as one:
        one.train()
        one.get_local_operator().loader.batch_sampler.batch_size *= 2
        with pytest.raises(DataOrderError, match="batch size has changed"):
            one.train()

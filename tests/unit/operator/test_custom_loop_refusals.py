# SPDX-License-Identifier: Apache-2.0
"""What `setup`, or code after it, sets in an operator too late, or with half an effect."""

from collections.abc import Mapping
from unittest.mock import MagicMock

import pytest
from tests.unit.trainer.programs import Regression, loader, trainer

import lockstep
from lockstep.errors import ConfigurationError, DataOrderError, NotShardableError


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


class ReadsTwo(Regression):
    """A second loader, of which each worker reads the part that was its own when it was made."""

    def setup(self, config):
        super().setup(config)
        self.keep(config.get("kept"))

    def keep(self, kept):
        if kept is not None:
            self.others = kept(lockstep.shard_loader(loader()))

    def train_epoch(self, iterator, info):
        self.keep(info.get("kept"))
        (self.seen,) = [len(list(zip(iterator, lockstep.shard_loader(loader()), strict=True)))]
        return {}


@pytest.mark.parametrize("kept", [lambda each: each, lambda each: {"others": [each]}["others"]])
def test_a_part_of_a_loader_must_not_outlive_the_ranks_that_it_was_cut_for(kept):
    with pytest.raises(NotShardableError, match=r"(?s)self\.others.*StackDataset"):
        trainer(ReadsTwo, config={"kept": kept})
    with trainer(ReadsTwo) as one:
        one.train()  # one that is made and read within a loop is right
        assert one.get_local_operator().seen == 4
        one.train(info={"kept": kept})
        with pytest.raises(NotShardableError, match=r"self\.others"):
            one.train()
    with trainer(ReadsTwo, config={"kept": kept}, add_dist_sampler=False) as one:
        one.train()


class NotRead(Mapping):
    """A file of data sets, say."""

    def __getitem__(self, key):
        raise AssertionError("it was read")

    def __iter__(self):
        raise AssertionError("it was read")

    def __len__(self):
        return 1


def test_what_is_no_loader_is_not_taken_for_one_or_walked_through():
    with trainer(Regression) as one:
        operator = one.get_local_operator()
        operator.file, operator.mock = NotRead(), MagicMock()
        one.train()

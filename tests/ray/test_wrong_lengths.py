# SPDX-License-Identifier: Apache-2.0
"""A `__len__` of the user's that is too small or too large loses no sample without an error.

`lockstep.worker.data_cursor` and `lockstep.worker.batch_iterator`, with one and two workers.
"""

import pytest
from tests.ray.operators import farthest, net, problem, sgd
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset

from lockstep import TorchTrainer, TrainingOperator
from lockstep.errors import DataOrderError
from lockstep.keys import BATCH_SIZE, NUM_SAMPLES

BATCH = 4


class Stream(IterableDataset):
    def __init__(self, claimed, real):
        self.claimed, self.real = claimed, real

    def __len__(self):
        return self.claimed

    def __iter__(self):
        features, targets = problem()
        return zip(features[: self.real], targets[: self.real], strict=True)


class Order(Sampler):
    def __init__(self, claimed, real):
        self.claimed, self.real = claimed, real

    def __len__(self):
        return self.claimed

    def __iter__(self):
        return iter(range(self.real))


class Claimed(TrainingOperator):
    def setup(self, config):
        self.model, self.optimizer, self.criterion = self.register(
            models=(model := net()), optimizers=sgd(model), criterion=nn.MSELoss()
        )
        lengths = config["claimed"], config["real"]
        if config["kind"] == "stream":
            loader = DataLoader(Stream(*lengths), config[BATCH_SIZE])
        else:
            data = TensorDataset(*problem())
            loader = DataLoader(data, config[BATCH_SIZE], sampler=Order(*lengths))
        self.register_data(train_loader=loader, validation_loader=loader)


def started(kind, claimed, real, **arguments):
    config = {BATCH_SIZE: BATCH, "kind": kind, "claimed": claimed, "real": real}
    return TorchTrainer(training_operator_cls=Claimed, config=config, **arguments)


def one_process(real, accumulate, epochs):
    features, targets = problem()
    model = net()
    optimizer = sgd(model)
    for _ in range(epochs):
        for start in range(0, real, BATCH * accumulate):
            rows = slice(start, min(start + BATCH * accumulate, real))
            optimizer.zero_grad()
            nn.functional.mse_loss(model(features[rows]), targets[rows]).backward()
            optimizer.step()
    return model


KINDS = pytest.mark.parametrize("kind", ["stream", "sampler"])
WORKERS = pytest.mark.parametrize("num_workers", [1, pytest.param(2, marks=pytest.mark.slow)])


@KINDS
@WORKERS
def test_more_batches_than_the_length_says_are_refused(kind, num_workers):
    with started(kind, 20, 23, num_workers=num_workers) as trainer:
        with pytest.raises(DataOrderError, match="more batches than its `__len__` says"):
            trainer.validate()
        trainer.train(num_steps=4)
        with pytest.raises(DataOrderError, match="after 5 global batches"):
            trainer.train()


@KINDS
@WORKERS
def test_fewer_batches_than_the_length_says_are_all_stepped_with(kind, num_workers):
    """18 samples are five batches: the last window, of one, was never closed."""
    with started(kind, 24, 18, num_workers=num_workers, accumulate=2) as trainer:
        for _ in range(2):
            result = trainer.train()
            assert (result["batch_count"], result[NUM_SAMPLES]) == (5, 18)
        assert trainer.validate()[NUM_SAMPLES] == 18
        model = trainer.get_model()
    assert farthest(model, one_process(18, 2, epochs=2)) < 1e-12


@KINDS
def test_a_call_may_end_with_data_that_should_go_on(kind):
    """That it is the end shows only when the next call looks further."""
    with started(kind, 24, 18) as trainer:
        trainer.train(num_steps=5)
        assert trainer.train()[NUM_SAMPLES] == 18


def test_a_loader_that_is_sharded_already_is_not_cut_off():
    with (
        started("sampler", 20, 23, num_workers=2, add_dist_sampler=False) as trainer,
        pytest.raises(DataOrderError, match="more batches than its `__len__` says"),
    ):
        trainer.train()


class OwnLoop(Claimed):
    def train_epoch(self, iterator, info):
        for features, targets in iterator:
            self.optimizer.zero_grad()
            self.backward(self.criterion(self.model(features), targets))
            self.optimizer.step()
        return {}


def test_in_a_loop_of_ones_own():
    config = {BATCH_SIZE: BATCH, "kind": "stream", "claimed": 20, "real": 23}
    with (
        TorchTrainer(training_operator_cls=OwnLoop, config=config) as trainer,
        pytest.raises(DataOrderError, match="more batches than its `__len__` says"),
    ):
        trainer.train()


@pytest.mark.slow
def test_lengths_that_are_right_end_every_epoch():
    with started("stream", 20, 20, num_workers=2) as trainer:
        for _ in range(3):
            assert trainer.train()[NUM_SAMPLES] == 20
        model = trainer.get_model()
    assert farthest(model, one_process(20, 1, epochs=3)) < 1e-12

# SPDX-License-Identifier: Apache-2.0
"""With `reproducible=True` the weights are the same bits at any number of workers."""

import hashlib
import random

import numpy as np
import pytest
import torch
from tests.ray.surviving import digest
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import TorchTrainer, TrainingOperator
from lockstep.errors import NotAvailableError
from lockstep.keys import BATCH_SIZE
from lockstep.testing import Strike, struck


class Langevin(torch.optim.SGD):
    """Each step adds noise, as of stochastic gradient Langevin dynamics."""

    @torch.no_grad()
    def step(self, closure=None):
        loss = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(torch.randn_like(parameter), alpha=1e-2)
        return loss


OPTIMIZERS = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "langevin": lambda parameters: Langevin(parameters, lr=0.1),
}


class Classifier(TrainingOperator):
    """Float32, with everything whose result could depend on who computes what."""

    def setup(self, config):
        model = nn.Sequential(
            nn.Linear(10, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 5)
        )
        self.model, self.optimizer, self.criterion = self.register(
            models=model,
            optimizers=OPTIMIZERS[config["optimizer"]](model.parameters()),
            criterion=nn.CrossEntropyLoss(),
        )
        generator = torch.Generator().manual_seed(0)
        features = torch.randn(104, 10, generator=generator)
        classes = torch.randint(5, (104,), generator=generator)
        data = TensorDataset(features, classes)
        self.register_data(train_loader=DataLoader(data, config[BATCH_SIZE], shuffle=True))


def weights(num_workers: int, optimizer: str, **arguments) -> str:
    """A digest of parameters and buffers after an epoch and five more batches."""
    with TorchTrainer(
        training_operator_cls=Classifier,
        num_workers=num_workers,
        num_shards=4,
        config={BATCH_SIZE: 16, "optimizer": optimizer},
        **arguments,
    ) as trainer:
        trainer.train()
        trainer.train(num_steps=5)
        state = trainer.get_model().state_dict()
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in state.values())).hexdigest()


@pytest.mark.slow
def test_adam_accumulation_clipping_dropout_and_batch_norm():
    arguments = {"reproducible": True, "accumulate": 3, "clip_grad_norm": 0.5}
    digests = {weights(size, "adam", **arguments) for size in (1, 3, 4)}
    assert len(digests) == 1


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("arguments", [{}, {"accumulate": 3}, {"clip_grad_norm": 0.5}])
def test_every_number_of_workers(optimizer, arguments):
    digests = {weights(size, optimizer, reproducible=True, **arguments) for size in (1, 2, 3, 4)}
    assert len(digests) == 1


@pytest.mark.slow
def test_without_it_the_bits_differ():
    """Otherwise the tests above would say nothing."""
    assert weights(1, "adam") != weights(3, "adam")


class DrawsAfterItsStep(Classifier):
    """As the second network of a GAN does for its own samples."""

    def train_batch(self, batch, batch_info):
        features, classes = batch
        self.optimizer.zero_grad()
        loss = self.criterion(self.model(features), classes)
        loss.backward()
        self.optimizer.step()
        self.drawn = torch.rand(()).item()
        return {"train_loss": loss.item()}


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["replicate", "ddp"])
@pytest.mark.parametrize("operator_cls", [Classifier, DrawsAfterItsStep])
def test_what_a_step_draws_is_the_same_on_each_worker_and_only_that(operator_cls, sync):
    with TorchTrainer(
        training_operator_cls=operator_cls,
        num_workers=2,
        sync=sync,
        config={BATCH_SIZE: 16, "optimizer": "langevin"},
    ) as trainer:
        trainer.train(num_steps=3)
        found = trainer.apply_all_operators(
            lambda operator: (
                [p.detach().numpy().tobytes() for p in operator.model.parameters()],
                getattr(operator, "drawn", None),
            )
        )
    (one, drawn_by_one), (other, drawn_by_other) = found
    assert one == other
    assert drawn_by_one is None or drawn_by_one != drawn_by_other


@pytest.mark.slow
def test_shards_are_stepped_by_no_optimizer_that_draws():
    with (
        TorchTrainer(
            training_operator_cls=Classifier,
            num_workers=2,
            sync="fsdp",
            config={BATCH_SIZE: 16, "optimizer": "langevin"},
        ) as trainer,
        pytest.raises(NotAvailableError, match="draws random numbers"),
    ):
        trainer.train(num_steps=1)


@pytest.mark.slow
def test_a_state_of_other_shards_goes_on_with_their_bits(tmp_path):
    """The trainer that loads it was made for as many shards as it has workers."""
    arguments = {
        "training_operator_cls": Classifier,
        "config": {BATCH_SIZE: 16, "optimizer": "momentum"},
        "reproducible": True,
    }
    with TorchTrainer(num_shards=4, **arguments) as one:
        one.train(num_steps=3)
        path = one.save(tmp_path / "run.pt")
        one.train(num_steps=5)
        expected = digest(one)
    with TorchTrainer(num_workers=2, **arguments) as two:
        two.load(path)
        two.train(num_steps=5)
        assert digest(two) == expected


def _draws():
    return [random.random(), np.random.rand(), torch.rand(()).item()]


class DrawsAroundItsBatches(Classifier):
    """As a loop that chooses a size for each epoch, and restarts what was not used behind it."""

    def train_epoch(self, iterator, info):
        before = _draws()
        metrics = super().train_epoch(iterator, info)
        self.drawn = [*before, *_draws()]
        return metrics


@pytest.mark.slow
def test_what_a_loop_draws_around_its_batches_is_the_same_on_each_worker():
    def drawn(num_workers, operator_cls=DrawsAroundItsBatches):
        with TorchTrainer(
            training_operator_cls=operator_cls,
            num_workers=num_workers,
            num_shards=4,
            config={BATCH_SIZE: 16, "optimizer": "adam"},
        ) as trainer:
            found = []
            for _ in range(2):
                trainer.train()
                found.append(trainer.apply_all_operators(lambda operator: operator.drawn))
        assert all(each == epoch[0] for epoch in found for each in epoch)
        return [number for epoch in found for number in epoch[0]]

    alone = drawn(1)
    assert len(set(alone)) == 12, "each epoch has its own"
    assert drawn(2) == alone
    strike = Strike("kill", rank=1, step=3, phase="backward")
    assert drawn(2, struck(DrawsAroundItsBatches, strike)) == alone

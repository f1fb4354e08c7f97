# SPDX-License-Identifier: Apache-2.0
"""With `reproducible=True` the weights are the same bits at any number of workers."""

import hashlib

import pytest
import torch
from tests.ray.surviving import digest
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import TorchTrainer, TrainingOperator
from lockstep.keys import BATCH_SIZE

OPTIMIZERS = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
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

# SPDX-License-Identifier: Apache-2.0
"""The same training as a loop for Ray Train, and as an operator."""

import logging
import tempfile
import warnings
from pathlib import Path

import torch
from problem import EPOCHS, GLOBAL_BATCH, WORKERS, data, make_model, say_distance
from torch import nn
from torch.utils.data import DataLoader

import ray
from lockstep import TorchTrainer, TrainingOperator


def loop(config):
    """Everything in one function, once for each `fit`."""
    import ray.train.torch

    model = ray.train.torch.prepare_model(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)
    loader = DataLoader(data(), GLOBAL_BATCH // WORKERS)
    loader = ray.train.torch.prepare_data_loader(loader)
    for _ in range(EPOCHS):
        for images, target in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), target).backward()
            optimizer.step()
    with tempfile.TemporaryDirectory() as folder:
        torch.save(model.module.state_dict(), Path(folder) / "model.pt")
        ray.train.report({}, checkpoint=ray.train.Checkpoint.from_directory(folder))


def with_ray_train(storage):
    import ray.train.torch

    trainer = ray.train.torch.TorchTrainer(
        loop,
        train_loop_config={"lr": 0.1},
        scaling_config=ray.train.ScalingConfig(num_workers=WORKERS),
        run_config=ray.train.RunConfig(storage_path=storage),
    )
    model = make_model()
    with trainer.fit().checkpoint.as_directory() as folder:
        model.load_state_dict(torch.load(Path(folder) / "model.pt"))
    return model


class Digits(TrainingOperator):
    def setup(self, config):
        self.model, self.optimizer, self.criterion = self.register(
            models=(model := make_model()),
            optimizers=torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9),
            criterion=nn.CrossEntropyLoss(),
        )
        self.register_data(train_loader=DataLoader(data(), GLOBAL_BATCH // WORKERS))


def with_lockstep():
    with TorchTrainer(
        training_operator_cls=Digits, num_workers=WORKERS, config={"lr": 0.1}
    ) as trainer:
        for _ in range(EPOCHS):
            trainer.train()
        return trainer.get_model()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    ray.init("local", num_cpus=4, logging_level=logging.ERROR, log_to_driver=False)
    with tempfile.TemporaryDirectory() as storage:
        say_distance(with_ray_train(storage), with_lockstep())

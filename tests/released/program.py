# SPDX-License-Identifier: Apache-2.0
"""The program whose files each release leaves behind. It never changes: its files would not fit."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import TorchTrainer, TrainingOperator, shard_loader

ROWS, SHARDS = 52, 2
STEPS_BEFORE, STEPS_AFTER = 9, 5
"""An epoch has seven steps: the files are of a place within the second one."""


def data():
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(ROWS, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(features, (features[:, 0] > features[:, 1]).long())


class Program(TrainingOperator):
    """Adam, a schedule, batch statistics, an average, and a state of its own; no dropout.

    Draws may change from release to release, and with them the order of the samples: the batches
    come in their own order.
    """

    def setup(self, config):
        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        layers = [nn.Linear(6, 8), nn.BatchNorm1d(8), block, nn.Linear(8, 2)]
        model = nn.Sequential(*layers).double()
        in_shards = config.get("shard")
        if in_shards:
            del model[1]  # the statistics of a batch are those of all workers there, or none
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        self.model, self.optimizer, self.criterion, *_ = self.register(
            models=model,
            optimizers=optimizer,
            criterion=nn.CrossEntropyLoss(),
            schedulers=torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5),
            **({"shard": [nn.Sequential]} if in_shards else {"ema": 0.9}),
        )
        self.register_data(train_loader=DataLoader(data(), 4))
        self.seen = torch.zeros((), dtype=torch.int64)

    def after_step(self):
        self.seen += 1

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen.copy_(state["seen"])


def trainer(*, in_shards=False, **arguments):
    config = {"shard": True} if in_shards else {}
    arguments = {"num_shards": SHARDS, "scheduler_step_freq": "batch", "config": config} | arguments
    return TorchTrainer(training_operator_cls=Program, **arguments)


def train_on(run):
    """What the steps after the file come to, as plain numbers."""
    losses = [run.train(num_steps=1)["train_loss"] for _ in range(STEPS_AFTER)]
    state = run.get_model().state_dict()
    weights = {name: value.double().flatten().tolist() for name, value in state.items()}
    return {"losses": losses, "weights": weights}


def rank_loader():
    """The loader of one of two ranks."""
    return shard_loader(DataLoader(range(ROWS), 4), group=_SecondOfTwo(), seed=3)


class _SecondOfTwo:
    rank, size = 1, 2

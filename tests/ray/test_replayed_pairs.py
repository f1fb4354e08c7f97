# SPDX-License-Identifier: Apache-2.0
"""Random steps of random reproducible runs, replayed in one process: the bits of the log."""

import random
from functools import partial

import pytest
import torch
from tests.ray.surviving_in_shards import PHASES, kill
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import TorchTrainer, TrainingOperator
from lockstep.testing import struck
from lockstep.trainer.logged_run import LoggedRun
from lockstep.trainer.step_replay import replay_run

RUNS, STEPS_OF_A_RUN = 20, 10
ROWS, WIDTH, CLASSES = 96, 12, 3

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(1, 6, 3, padding=1), nn.BatchNorm1d(6), nn.ReLU(), nn.Flatten()
        )
        self.head = nn.Linear(6 * WIDTH, CLASSES)

    def forward(self, features):
        return self.head(self.layers(features.unsqueeze(1)))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(1, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, features):
        return self.head(self.block(self.lift(features.unsqueeze(-1))).mean(dim=1))


def perceptron():
    return nn.Sequential(
        nn.Linear(WIDTH, 24),
        nn.BatchNorm1d(24),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Linear(24, 24),
        nn.LayerNorm(24),
        nn.Linear(24, CLASSES),
    )


MODELS = {"perceptron": perceptron, "convolutions": Convolutions, "attention": Attention}
OPTIMIZERS = {
    "SGD": {"lr": 0.05, "momentum": 0.9},
    "AdamW": {"lr": 0.01},
    "Adagrad": {"lr": 0.05},
    "RMSprop": {"lr": 0.005},
    "NAdam": {"lr": 0.01},
}


class RandomProgram(TrainingOperator):
    def setup(self, config):
        torch.manual_seed(0)
        model = MODELS[config["model"]]()
        name = config["optimizer"]
        optimizer = getattr(torch.optim, name)(model.parameters(), **OPTIMIZERS[name])
        self.register(
            models=model,
            optimizers=optimizer,
            criterion=nn.CrossEntropyLoss(),
            schedulers=torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.8),
        )
        generator = torch.Generator().manual_seed(1)
        data = TensorDataset(
            torch.randn(ROWS, WIDTH, generator=generator),
            torch.randint(CLASSES, (ROWS,), generator=generator),
        )
        self.register_data(train_loader=DataLoader(data, config["rows"], shuffle=True))


def random_run(number):
    """The arguments of a trainer, and who dies."""
    choose = random.Random(number)
    num_workers = number % 4 + 1
    num_strikes = min(choose.choice([0, 1, 2]), num_workers - 1)
    # Ranks that are still there when others have died and nobody has taken their place yet.
    strikes = [
        kill(choose.randrange(num_workers - num_strikes), step, choose.choice(PHASES))
        for step in sorted(choose.sample(range(2, 12), num_strikes))
    ]
    arguments = {
        "config": {
            "model": choose.choice([*MODELS]),
            "optimizer": choose.choice([*OPTIMIZERS]),
            "rows": choose.choice([2, 3]),
        },
        "num_workers": num_workers,
        "num_shards": choose.choice([num_workers, 4]),
        "precision": choose.choice(["fp32", "bf16"]),
        "accumulate": choose.choice([1, 1, 2, 3]),
        "clip_grad_norm": choose.choice([None, 0.5]),
        "seed": choose.randrange(1000),
        "checkpoint_every": choose.choice([3, 5, 7]),
    }
    if strikes:
        arguments["spare_workers"] = choose.choice([0, 1])
    return arguments, strikes


@pytest.mark.parametrize("number", range(RUNS))
def test_random_steps_have_the_bits_of_the_log(tmp_path, number):
    arguments, strikes = random_run(number)
    with TorchTrainer(
        training_operator_cls=struck(RandomProgram, *strikes) if strikes else RandomProgram,
        resources_per_worker={"CPU": 0.5},
        reproducible=True,
        scheduler_step_freq="batch",
        checkpoint_dir=tmp_path,
        **arguments,
    ) as trainer:
        trainer.train()
        trainer.train(num_steps=7)
        assert len(trainer.status()["recoveries"]) == len(strikes)
    steps = sorted(LoggedRun.read(tmp_path).steps)
    chosen = random.Random(number).sample(steps, STEPS_OF_A_RUN)
    make_trainer = partial(TorchTrainer, training_operator_cls=RandomProgram)
    for step in chosen:
        report = replay_run(make_trainer, folder=tmp_path, step=step)
        assert report.same_bits, f"{arguments}\n{report}"

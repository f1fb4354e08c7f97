# SPDX-License-Identifier: Apache-2.0
"""Operators whose models are in shards and whose workers die, and their undisturbed runs."""

from functools import cache

import torch
from tests.ray.surviving import OwnEpoch as Whole
from tests.ray.surviving import digest_of
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import TorchTrainer, TrainingOperator, local
from lockstep.keys import BATCH_SIZE, NUM_STEPS
from lockstep.testing import Strike, struck

ROWS, GLOBAL_BATCH, STEPS_IN_EPOCH = 104, 16, 7
PHASES = ("data", "forward", "backward", "buckets", "optimizer", "applied")


def kill(rank, step, phase="backward"):
    return Strike("kill", rank=rank, step=step, phase=phase)


def _data():
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(ROWS, 10, generator=generator, dtype=torch.float64)
    return TensorDataset(features, torch.randint(5, (ROWS,), generator=generator))


def _block(width):
    return nn.Sequential(nn.Linear(width, width), nn.Tanh())


def network(noise=0.0):
    torch.manual_seed(0)
    layers = [nn.Linear(10, 23), _block(23), nn.Dropout(noise), _block(23), nn.Linear(23, 5)]
    return nn.Sequential(*layers).double()


class InShards(TrainingOperator):
    """The default loop: AdamW, a schedule, dropout if the config says so."""

    network = staticmethod(network)

    def setup(self, config):
        model = self.network(config.get("noise", 0.0))
        if config.get("own"):
            model.register_buffer("own", local(torch.zeros(())))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        self.model, self.optimizer, self.criterion, self.scheduler = self.register(
            models=model,
            optimizers=optimizer,
            criterion=nn.CrossEntropyLoss(),
            schedulers=torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9),
            shard=config.get("shard", [nn.Sequential]),
            dp_shard_size=config.get("dp_shard_size"),
        )
        # What a program keeps of the parameters stays theirs, whatever happens to the shards.
        self.kept = list(self.model.parameters())
        data = _data()
        self.register_data(
            train_loader=DataLoader(data, config[BATCH_SIZE], shuffle=True),
            validation_loader=DataLoader(data, config[BATCH_SIZE]),
        )


class EveryOther(InShards):
    """Gradients of two batches in a step, by the number of the batch in its pass.

    The schedule goes by what the call was asked for, so that a replay has to know that, too.
    """

    def train_batch(self, batch, batch_info):
        features, classes = batch
        if batch_info["batch_idx"] % 2 == 0:
            self.optimizer.zero_grad()
        loss = self.criterion(self.model(features), classes)
        loss.backward()
        if batch_info["batch_idx"] % 2 == 1:
            nn.utils.clip_grad_norm_(self.kept, 0.3)
            self.optimizer.step()
            for _ in range(batch_info[NUM_STEPS] or 1):
                self.scheduler.step()
        return {"train_loss": loss.item()}


class StepsBeforeTheNextBatch(InShards):
    """A step uses the gradients of the batch before."""

    def train_batch(self, batch, batch_info):
        features, classes = batch
        if self.global_step:
            self.optimizer.step()
            self.optimizer.zero_grad()
        loss = self.criterion(self.model(features), classes)
        loss.backward()
        return {"train_loss": loss.item()}


class OwnEpoch(InShards):
    """Only this loop knows what lies between two batches."""

    train_epoch = Whole.train_epoch


class Interrupted(InShards):
    """A worker's own code fails in one step, once."""

    def compute_loss(self, batch, batch_info):
        if self.world_rank == 1 and self.global_step == 6 and not self.config["once"]:
            self.config["once"].append(True)
            raise RuntimeError("no such luck")
        return super().compute_loss(batch, batch_info)


def trainer_of(operator_cls=InShards, strikes=(), config=None, **arguments):
    arguments = {
        "num_workers": 3,
        "num_shards": 6,
        "memory_checkpoint_every": 4,
        "scheduler_step_freq": "batch" if operator_cls in (InShards, Interrupted) else "manual",
    } | arguments
    return TorchTrainer(
        training_operator_cls=struck(operator_cls, *strikes) if strikes else operator_cls,
        config={BATCH_SIZE: GLOBAL_BATCH, **(config or {})},
        sync="fsdp",
        **arguments,
    )


def run(trainer):
    """Two epochs and a part of one, with a validation; results and the trained model."""
    results = [trainer.train(), trainer.train()]
    results += [trainer.validate(), trainer.train(num_steps=4)]
    return results, trainer.get_model()


@cache
def undisturbed(operator_cls=InShards, noise=0.0, shard=None, **arguments):
    config = {"noise": noise} | ({"shard": shard} if shard else {})
    with trainer_of(operator_cls, config=config, **arguments) as trainer:
        results, model = run(trainer)
    return results, model, digest_of(model)


def counts(results):
    return [(each["num_samples"], each["batch_count"], each.get("epoch")) for each in results]

# SPDX-License-Identifier: Apache-2.0
"""Operators that use much of the surface at once: a trainer takes seconds to start."""

import os

import torch
import torch.distributed as dist
from tests.ray.operators import DefaultLoop, Net, net, problem, sgd
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from lockstep import TrainingOperator
from lockstep.keys import BATCH_SIZE

FIRST_TRACE = "LOCKSTEP_TEST_HOOK"


def leave_a_trace():
    """An initialization hook: what it leaves in the process can be seen afterwards."""
    os.environ[FIRST_TRACE] = os.environ.get(FIRST_TRACE, "") + "called"


def trace():
    return os.environ.get(FIRST_TRACE)


class Temperature(nn.Module):
    """A criterion with a parameter."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2, dtype=torch.float64))

    def forward(self, output, target):
        return ((output - target).square() * self.scale.exp() - self.scale).mean()


class Everything(TrainingOperator):
    """Dropout, a criterion with parameters, an unassigned scheduler, state of each rank."""

    def setup(self, config):
        body = net()
        self.model = nn.Sequential(body.first, nn.Tanh(), nn.Dropout(0.3), body.second)
        self.criterion = Temperature()
        self.optimizer = torch.optim.SGD(
            [*self.model.parameters(), *self.criterion.parameters()], lr=0.05, momentum=0.9
        )
        self.register(
            models=self.model,
            optimizers=self.optimizer,
            criterion=self.criterion,
            schedulers=torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.8),
        )
        data = TensorDataset(*problem())
        self.register_data(
            train_loader=DataLoader(data, config[BATCH_SIZE], shuffle=True),
            validation_loader=DataLoader(data, config[BATCH_SIZE]),
        )
        self.own = {"rank": self.world_rank, "asked": 0}

    def compute_loss(self, batch, batch_info):
        features, target = batch
        output = self.model(features)
        error = (output - target).abs().mean()
        return self.criterion(output, target), {"mae": error}

    def state_dict(self):
        self.own["asked"] += 1
        return dict(self.own)

    def load_state_dict(self, state):
        if state.get("poison") == self.world_rank:
            raise LookupError(f"poison on rank {self.world_rank}")
        self.own = dict(state)


class Adversaries(TrainingOperator):
    """A GAN's step: two models, two optimizers, gradients through one into the other."""

    def setup(self, config):
        torch.manual_seed(0)
        self.maker = nn.Linear(5, 2, dtype=torch.float64)
        self.judge = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        (self.maker, self.judge), (self.maker_step, self.judge_step) = self.register(
            models=(self.maker, self.judge), optimizers=(sgd(self.maker), sgd(self.judge))
        )
        loader = DataLoader(TensorDataset(*problem()), config[BATCH_SIZE])
        self.register_data(train_loader=loader, validation_loader=loader)

    def train_batch(self, batch, batch_info):
        features, real = batch
        made = self.maker(features)
        self.judge_step.zero_grad()
        judged = self.judge(real).sigmoid().mean() - self.judge(made.detach()).sigmoid().mean()
        judged.backward()
        self.judge_step.step()
        self.maker_step.zero_grad()
        fooled = self.judge(made).sigmoid().mean()
        fooled.backward()
        self.maker_step.step()
        return {"judged": judged.item(), "fooled": fooled.item()}

    def validate_batch(self, batch, batch_info):
        return {"fooled": self.judge(self.maker(batch[0])).sigmoid().mean().item()}


class Summed(TrainingOperator):
    """A loss that is a sum, with a plain backward."""

    loss_reduction = "sum"

    def setup(self, config):
        self.model = net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.002, momentum=0.9)
        self.register(models=self.model, optimizers=self.optimizer)
        self.register_data(train_loader=DataLoader(TensorDataset(*problem()), config[BATCH_SIZE]))

    def train_batch(self, batch, batch_info):
        features, target = batch
        self.optimizer.zero_grad()
        (self.model(features) - target).square().sum().backward()
        self.optimizer.step()
        return {}


class OwnWrapper(TrainingOperator):
    """torch's DistributedDataParallel, brought by the user (``wrap_ddp=False``)."""

    def setup(self, config):
        self.model = net()
        if dist.is_initialized():
            self.model = DistributedDataParallel(self.model)
        self.optimizer = sgd(self.model)
        self.register(models=self.model, optimizers=self.optimizer, criterion=nn.MSELoss())
        data = TensorDataset(*(tensor[:36] for tensor in problem()))
        self.register_data(train_loader=DataLoader(data, config[BATCH_SIZE]))


class OwnPart(TrainingOperator):
    """Each rank reads its own loader; they have different lengths."""

    def setup(self, config):
        self.model = net()
        self.optimizer = sgd(self.model)
        self.register(models=self.model, optimizers=self.optimizer, criterion=nn.MSELoss())
        rows = [slice(0, 28), slice(28, 37)][self.world_rank]
        data = TensorDataset(*(tensor[rows] for tensor in problem()))
        self.register_data(train_loader=DataLoader(data, 6))


def own_parts_in_one_process(epochs):
    """What `OwnPart` has to equal: step k is both ranks' k-th batch together."""
    features, targets = problem()
    model = net()
    optimizer = sgd(model)
    for _ in range(epochs):
        for step in range(5):
            first = range(6 * step, min(6 * step + 6, 28))
            second = range(28 + 6 * step, min(28 + 6 * step + 6, 37))
            rows = [*first, *second]
            optimizer.zero_grad()
            nn.functional.mse_loss(model(features[rows]), targets[rows]).backward()
            optimizer.step()
    return model


class FailsInValidation(Everything):
    def validate_batch(self, batch, batch_info):
        if self.world_rank == self.config["on"]:
            raise LookupError(f"on rank {self.world_rank}")
        return super().validate_batch(batch, batch_info)


class InPercent(TrainingOperator):
    """Validates what rank 0 has all wrong and rank 1 half right, and changes what it reports."""

    def setup(self, config):
        self.model = nn.Linear(2, 2, bias=False, dtype=torch.float64)
        self.register(models=self.model, optimizers=sgd(self.model), criterion=self.loss)
        features = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]).double()
        with torch.no_grad():
            self.model.weight.copy_(torch.eye(2))
        loader = DataLoader(TensorDataset(features, torch.ones(4, dtype=torch.long)), 4)
        self.register_data(train_loader=loader, validation_loader=loader)

    @staticmethod
    def loss(output, target):
        return 15 - 13 * output[:, 0].mean()  # 2 on rank 0, 8.5 on rank 1

    def validate(self, val_iterator, info):
        result = super().validate(val_iterator, info)
        result["val_accuracy"] *= 100
        result["val_loss"] = min(result["val_loss"], 5.0)
        return result


def model_creator(config):
    return Net() if config.get("unseeded") else net()


def optimizer_creator(model, config):
    return sgd(model)


def data_creator(config):
    data = TensorDataset(*problem())
    return DataLoader(data, config[BATCH_SIZE]), DataLoader(data, config[BATCH_SIZE])


class ReadsAhead(TrainingOperator):
    """A loop of the user's own that has the next batch in hand before it uses this one."""

    def setup(self, config):
        self.model = net()
        self.optimizer = sgd(self.model)
        self.register(models=self.model, optimizers=self.optimizer)
        data = TensorDataset(*(tensor[: config["rows"]] for tensor in problem()))
        self.register_data(train_loader=DataLoader(data, config[BATCH_SIZE]))

    def train_epoch(self, iterator, info):
        batch = next(iterator)
        for following in [*iterator] if info.get("all") else iterator:
            self.step(batch, info)
            batch = following
        self.step(batch, info)
        return {}

    def step(self, batch, info):
        features, target = batch
        self.optimizer.zero_grad()
        loss = (self.model(features) - target).square().mean()
        if info.get("rows"):
            self.backward(loss, weight=len(features))
        elif info.get("weight"):
            # The batch that rank 1 borrows in the last step is rank 0's only sample.
            self.backward(loss, weight=len(features) if len(features) > 1 else 1 - self.world_rank)
        elif info.get("ours"):
            self.backward(loss)
        else:
            loss.backward()
        self.optimizer.step()


class ReadsAheadForTheDefaultLoop(ReadsAhead):
    def train_epoch(self, iterator, info):
        return TrainingOperator.train_epoch(self, _one_ahead(iterator), info)

    def compute_loss(self, batch, batch_info):
        features, target = batch
        return (self.model(features) - target).square().mean()


def _one_ahead(iterator):
    held = next(iterator)
    for following in iterator:
        yield held
        held = following
    yield held


class OneRow(DefaultLoop):
    """Only rank 0 ever has a sample."""

    def setup(self, config):
        super().setup(config)
        data = TensorDataset(*(tensor[:1] for tensor in problem()))
        self.register_data(train_loader=DataLoader(data, config[BATCH_SIZE]))

# SPDX-License-Identifier: Apache-2.0
"""Operators that do to weights, between the collectives, what a shard would take no part in."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from harness import reset
from lockstep.keys import WEIGHT
from lockstep.worker.state_dict import copy_own_rows
from ranks.table_operators import Plain

BEGINS = 2
"""Steps before the operators of what is not finite begin."""


class ByLength(torch.optim.Optimizer):
    """The gradient divided by its length over all parameters, which is read as a number."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for options in self.param_groups:
            held = [p for p in options["params"] if p.grad is not None]
            length = sum(p.grad.norm().item() ** 2 for p in held) ** 0.5
            for param in held:
                param.add_(param.grad, alpha=-options["lr"] / length)


class ReadsNumbersInItsStep(Plain):
    def build(self):
        model = reset(self.make(), 7)
        self.model, self.optimizer = self.register(
            models=model, optimizers=ByLength(model.parameters())
        )


class KeepsNorm(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            param.add_(param.grad, alpha=-0.1)
            self.state[param]["norms"] = [param.grad.norm()]


class KeepsNormsInItsState(Plain):
    """A norm of which each rank has a part is whole in each rank's part of a checkpoint."""

    def build(self):
        model = reset(self.make(), 7)
        self.model, self.optimizer = self.register(
            models=model, optimizers=KeepsNorm(model.parameters())
        )

    def also(self):
        state = copy_own_rows(self.optimizer.state_dict()["state"])
        return {f"norm {number}": each["norms"][0] for number, each in state.items()}


class ClipsByHand(Plain):
    """A metric of the weights, and a clip that is written out."""

    weight_norm = 0.0

    def train_batch(self, batch, batch_info):
        self.optimizer.zero_grad()
        loss = self.compute_loss(batch, batch_info)
        loss.backward()
        held = [p for p in self.model.parameters() if p.grad is not None]
        length = float(sum(p.grad.square().sum() for p in held)) ** 0.5
        if length > 0.05:
            for param in held:
                param.grad.mul_(0.05 / length)
        self.optimizer.step()
        self.weight_norm = next(self.model.parameters()).norm().item()
        return {"train_loss": loss.item()}

    def also(self):
        return {"weight_norm": torch.tensor(self.weight_norm)}


class MeasuresWeights(Plain):
    """A metric of the default loop, also where the batch is a borrowed one."""

    def compute_loss(self, batch, batch_info):
        return self.loss_of(batch), {"norm": next(self.model.parameters()).norm().detach()}


class MeasuresWeightsInItsBatch(Plain):
    def train_batch(self, batch, batch_info):
        self.optimizer.zero_grad()
        loss = self.compute_loss(batch, batch_info)
        loss.backward()
        self.optimizer.step()
        return {"norm": next(self.model.parameters()).norm().detach()}


class NotFiniteInTheLastRow(Plain):
    """From one step on the last row of the last layer gets NaN, and the layers below nothing."""

    def make(self):
        model = super().make()
        model[0].requires_grad_(False)
        return model

    def loss_of(self, batch):
        output = self.output(batch)
        if self.global_step >= BEGINS:
            output = output * torch.tensor([1.0, 1.0, torch.nan])
        return output.square().sum(dim=1).mean()


class NotFiniteWithoutWeight(Plain):
    """The second batch of each window counts nothing, and its loss is not finite."""

    arguments: ClassVar = {"accumulate": 2}

    def compute_loss(self, batch, batch_info):
        counts = batch_info["batch_idx"] % 2 == 0
        loss = self.loss_of(batch)
        return (loss if counts else loss * torch.nan), {WEIGHT: float(counts)}


class AssignsData(Plain):
    def after_step(self):
        for param in self.model.parameters():
            param.data = param.data.clamp(-0.2, 0.2)


class WritesToRows(nn.Linear):
    def forward(self, x):
        with torch.no_grad():
            self.weight.mul_(0.9)
        return super().forward(x)


class WritesToData(nn.Linear):
    def forward(self, x):
        self.weight.data.mul_(0.9)
        return super().forward(x)


class AssignsInForward(nn.Linear):
    def forward(self, x):
        self.weight.data = self.weight.data * 0.9
        return super().forward(x)


class WritesInForward(Plain):
    layer: type[nn.Linear] = WritesToRows

    def make(self):
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), self.layer(6, 3))


class WritesToDataInForward(WritesInForward):
    layer = WritesToData


class AssignsDataInForward(WritesInForward):
    layer = AssignsInForward


class DrawsForWeights(Plain):
    def after_step(self):
        for param in self.model.parameters():
            param.add_(torch.randn_like(param), alpha=1e-3)


class Headed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
        self.head = nn.Linear(3, 3)

    def forward(self, x):
        return self.head(self.body(x))


class CallsALayerByItself(Plain):
    """The head belongs to the root, which nothing has gathered."""

    def make(self):
        return Headed()

    def output(self, batch):
        return self.model.head(batch[1])


class LoadsAfterRegister(Plain):
    def build(self):
        super().build()
        self.model.load_state_dict(reset(self.make(), 8).state_dict())


IN_SHARDS: dict[str, type[Plain]] = {
    kind.__name__: kind
    for kind in (
        ReadsNumbersInItsStep,
        KeepsNormsInItsState,
        ClipsByHand,
        MeasuresWeights,
        MeasuresWeightsInItsBatch,
        NotFiniteInTheLastRow,
        NotFiniteWithoutWeight,
        AssignsData,
        WritesInForward,
        WritesToDataInForward,
        AssignsDataInForward,
        DrawsForWeights,
        CallsALayerByItself,
        LoadsAfterRegister,
    )
}

# SPDX-License-Identifier: Apache-2.0
"""Training programs that call their models as torch's wrappers want to be called."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ranks.programs import (
    Accumulated,
    AccumulatedOntoZeros,
    Plain,
    SeveralBackwards,
    SeveralBackwardsOntoZeros,
    Shapes,
    Tied,
    TwoPlayers,
    X,
    Y,
    ZerosKept,
    mlp,
    sgd,
    squared,
)


def inside(model: nn.Module) -> nn.Module:
    """The module in a wrapper of DDP's, or the module."""
    return getattr(model, "module", model)


class Scaled(nn.Module):
    """A criterion with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, output, target):
        return ((output * self.scale.exp() - target) ** 2).sum(dim=1).mean()


class LearnedLoss(Plain):
    """Model and criterion are reduced in the same backward."""

    def build(self):
        return [mlp(), Scaled()]

    def run(self, world) -> None:
        model, criterion = world.modules
        optimizer = sgd(model, criterion)
        for _ in range(3):
            optimizer.zero_grad()
            world.step(lambda x, y: criterion(model(x), y), X, Y)
            world.note()
            optimizer.step()


class Thawing(Plain):
    """A layer frozen at the start is unfrozen, another one frozen, and back."""

    stages = ((False, True), (True, True), (True, False), (False, True))

    def build(self):
        model = mlp()
        model[0].requires_grad_(False)
        return [model]

    def run(self, world) -> None:
        (model,) = world.modules
        optimizer = sgd(model, weight_decay=0.1)
        for first, last in self.stages:
            inside(model)[0].requires_grad_(first)
            inside(model)[2].requires_grad_(last)
            optimizer.zero_grad()
            world.step(squared(model), X, Y)
            world.note()
            optimizer.step()


class Experts(nn.Module):
    """Rows take the left or the right layer; nobody takes the third one."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.never = (nn.Linear(4, 3) for _ in range(3))

    def forward(self, x, choice):
        # A borrowed row's choice is NaN and takes neither branch.
        total = (x * 0).sum(dim=1, keepdim=True) + self.left.bias.sum() * 0
        for layer, chosen in ((self.left, choice == 0), (self.right, choice == 1)):
            if chosen.any():
                total = total + layer(x) * chosen[:, None]
        return total.expand(-1, 3)


class Choosing(Plain):
    """Branches that differ between ranks, and a layer that weight decay must not move."""

    ddp_args: ClassVar = {"find_unused_parameters": True}

    def build(self):
        return [Experts()]

    def run(self, world) -> None:
        (model,) = world.modules
        optimizer = sgd(model, weight_decay=0.1)
        choice = torch.tensor([0.0] * 5 + [1.0] * 7, dtype=torch.float64)
        for turn in range(4):
            optimizer.zero_grad(set_to_none=turn != 2)
            world.step(
                lambda x, y, right: ((model(x, right) - y) ** 2).sum(dim=1).mean(),
                X,
                Y,
                choice if turn < 3 else torch.zeros_like(choice),
            )
            world.note()
            optimizer.step()


class ChoosingInBucketViews(Choosing):
    ddp_args: ClassVar = {"find_unused_parameters": True, "gradient_as_bucket_view": True}


class CheckpointedLayers(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)])
        self.reentrant = reentrant

    def forward(self, x):
        hidden = x.clone().requires_grad_(True)
        for layer in self.layers:
            hidden = checkpoint(
                lambda h, layer=layer: torch.tanh(layer(h)),
                hidden,
                use_reentrant=self.reentrant,
                preserve_rng_state=False,
            )
        return hidden


class Recomputing(Plain):
    """Activation checkpointing around every layer."""

    reentrant = False

    def build(self):
        return [CheckpointedLayers(self.reentrant)]


class RecomputingReentrant(Recomputing):
    """A backward inside backward for every layer."""

    reentrant = True


class InBucketViews(Plain):
    ddp_args: ClassVar = {"gradient_as_bucket_view": True}


class AddedInBucketViews(SeveralBackwardsOntoZeros):
    ddp_args: ClassVar = {"gradient_as_bucket_view": True}


class AccumulatedInBucketViews(Accumulated):
    ddp_args: ClassVar = {"gradient_as_bucket_view": True}


class AccumulatedFindingUnused(Accumulated):
    ddp_args: ClassVar = {"find_unused_parameters": True}


WRAPPED = (
    Plain,
    ZerosKept,
    SeveralBackwards,
    SeveralBackwardsOntoZeros,
    Tied,
    LearnedLoss,
    Thawing,
    Choosing,
    ChoosingInBucketViews,
    TwoPlayers,
    Recomputing,
    RecomputingReentrant,
    Shapes,
    InBucketViews,
    AddedInBucketViews,
)
ACCUMULATING = (
    Accumulated,
    AccumulatedOntoZeros,
    AccumulatedInBucketViews,
    AccumulatedFindingUnused,
)

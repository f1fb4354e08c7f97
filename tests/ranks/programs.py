# SPDX-License-Identifier: Apache-2.0
"""Small training programs that go around wrappers, leave parameters out, and come back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from harness import cut, reset, rows

X = rows(12, 4, seed=1)
Y = rows(12, 3, seed=2)


def mlp(width: int = 6) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3))


def squared(model: nn.Module) -> Callable[..., torch.Tensor]:
    return lambda x, y: ((model(x) - y) ** 2).sum(dim=1).mean()


made = threading.local()
"""``made.optimizers``, where a rank set it to a list: what its program steps with."""


def sgd(*models: nn.Module, **options) -> torch.optim.SGD:
    params = [param for model in models for param in model.parameters()]
    optimizer = torch.optim.SGD(params, lr=0.05, momentum=0.9, **options)
    getattr(made, "optimizers", []).append(optimizer)
    return optimizer


class Plain:
    """Four steps of an MLP."""

    set_to_none = True

    def build(self) -> list[nn.Module]:
        return [mlp()]

    def run(self, world) -> None:
        (model,) = world.modules
        optimizer = sgd(model)
        for step in range(4):
            optimizer.zero_grad(set_to_none=self.set_to_none)
            world.step(squared(model), X[step:], Y[step:])
            world.note()
            optimizer.step()


class ZerosKept(Plain):
    """zero_grad(set_to_none=False): gradients stay views and are added to in place."""

    set_to_none = False


class SeveralBackwards:
    """Three synchronised backwards before one step: each normalised on its own, and added."""

    set_to_none = True

    def build(self):
        return [mlp()]

    def run(self, world) -> None:
        (model,) = world.modules
        optimizer = sgd(model)
        for _ in range(2):
            optimizer.zero_grad(set_to_none=self.set_to_none)
            for start in (0, 3, 5):
                world.step(squared(model), X[start : start + 5], Y[start : start + 5])
            world.note()
            optimizer.step()


class SeveralBackwardsOntoZeros(SeveralBackwards):
    set_to_none = False


class Tied(Plain):
    """One weight, used twice."""

    def build(self):
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 3))
        model[2].weight = model[0].weight
        return [model]


class InTheLoss:
    """A criterion with a parameter of its own, which no forward of the model touches."""

    def build(self):
        criterion = nn.Module()
        criterion.scale = nn.Parameter(torch.ones(3))
        return [mlp(), criterion]

    def run(self, world) -> None:
        model, criterion = world.modules
        optimizer = sgd(model, criterion)
        for _ in range(3):
            optimizer.zero_grad()
            world.step(
                lambda x, y: ((model(x) * criterion.scale.exp() - y) ** 2).sum(dim=1).mean(), X, Y
            )
            world.note()
            optimizer.step()


class Thawed:
    """A layer frozen at the start is unfrozen, and another one frozen, and back."""

    def build(self):
        model = mlp()
        model[0].requires_grad_(False)
        return [model]

    def run(self, world) -> None:
        (model,) = world.modules
        optimizer = sgd(model, weight_decay=0.1)
        for first, last in ((False, True), (True, True), (True, False), (False, True)):
            model[0].requires_grad_(first)
            model[2].requires_grad_(last)
            optimizer.zero_grad()
            world.step(squared(model), X, Y)
            world.note()
            optimizer.step()


class OnlyThawed(Thawed):
    """What was frozen at the start is all that a later backward reaches."""

    def run(self, world) -> None:
        (model,) = world.modules
        optimizer = sgd(model)
        for first in (False, True, True):
            model[0].requires_grad_(first)
            model[2].requires_grad_(not first)
            optimizer.zero_grad()
            world.step(squared(model), X, Y)
            world.note()
            optimizer.step()


class Branches:
    """Two experts of the same shape; which rows go where differs between ranks."""

    def build(self):
        model = nn.ModuleDict({"left": nn.Linear(4, 3), "right": nn.Linear(4, 3)})
        model["never"] = nn.Linear(4, 3)
        return [model]

    def run(self, world) -> None:
        (model,) = world.modules
        optimizer = sgd(model, weight_decay=0.1)
        choice = torch.tensor([0.0] * 5 + [1.0] * 7, dtype=torch.float64)

        def loss(x, y, right):
            parts = []
            for name, chosen in (("left", right == 0), ("right", right == 1)):
                if chosen.any():
                    parts.append(((model[name](x[chosen]) - y[chosen]) ** 2).sum())
            # The borrowed row's choice is NaN and takes neither branch.
            return sum(parts, start=(x * 0).sum() + model["left"].bias.sum() * 0) / len(x)

        for turn in range(4):
            optimizer.zero_grad(set_to_none=turn != 2)
            world.step(loss, X, Y, choice if turn < 3 else torch.zeros_like(choice))
            world.note()
            optimizer.step()


class TwoPlayers:
    """A generator and a discriminator, two optimizers, gradients of one left in the other."""

    def build(self):
        return [mlp(), nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))]

    def run(self, world) -> None:
        maker, judge = world.modules
        for_maker, for_judge = sgd(maker), sgd(judge)
        for _ in range(3):
            for_judge.zero_grad()
            world.step(lambda x, y: F.softplus(-judge(y)).mean(), X, Y)
            world.step(lambda x, y: F.softplus(judge(maker(x).detach())).mean(), X, Y)
            world.note()
            for_judge.step()
            for_maker.zero_grad()
            world.step(lambda x, y: F.softplus(-judge(maker(x))).mean(), X, Y)
            world.note()
            for_maker.step()


class Around:
    """Custom methods, submodules, raw weights: never the model's own forward."""

    def build(self):
        return [mlp()]

    def run(self, world) -> None:
        (model,) = world.modules
        optimizer = sgd(model)

        def loss(x, y):
            hidden = torch.tanh(F.linear(x, model[0].weight, model[0].bias))
            return ((model[2](hidden) - y) ** 2).sum(dim=1).mean()

        for _ in range(3):
            optimizer.zero_grad()
            world.step(loss, X, Y)
            world.note()
            optimizer.step()


class Checkpointed:
    """Activation checkpointing, all layers inside it."""

    reentrant = False
    inner = False

    def build(self):
        return [nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)])]

    def forward(self, model, x):
        # The ranks are threads with one generator: torch 2.13 can hang when one of them saves its
        # state while another one puts it back. Nothing here is random.
        hidden = x.clone().requires_grad_(True)
        for layer in (*model[:2], model[0], model[2]):
            hidden = checkpoint(
                self._layer(layer), hidden, use_reentrant=self.reentrant, preserve_rng_state=False
            )
        return hidden

    def _layer(self, layer):
        if not self.inner:
            return lambda h: torch.tanh(layer(h))
        return lambda h: checkpoint(
            lambda g: torch.tanh(layer(g)), h, use_reentrant=True, preserve_rng_state=False
        )

    def run(self, world) -> None:
        (model,) = world.modules
        optimizer = sgd(model)
        for _ in range(3):
            optimizer.zero_grad()
            world.step(lambda x, y: ((self.forward(model, x) - y) ** 2).sum(1).mean(), X, Y)
            world.note()
            optimizer.step()


class CheckpointedReentrant(Checkpointed):
    """A backward inside backward, twice through the same layer."""

    reentrant = True


class CheckpointedTwice(CheckpointedReentrant):
    """A checkpoint inside a checkpoint: three runs of the engine on top of each other."""

    inner = True


class Shapes(Plain):
    """Complex numbers, channels_last strides, an empty and a scalar parameter."""

    def build(self):
        model = nn.Module()
        model.wave = nn.Parameter(torch.ones(4, dtype=torch.complex128))
        model.conv = nn.Conv2d(4, 3, 2).double().to(memory_format=torch.channels_last)
        model.empty = nn.Parameter(torch.zeros(0))
        model.scalar = nn.Parameter(torch.ones(()))
        model.forward = lambda x: self.forward(model, x)
        return [model]

    def forward(self, model, x):
        turned = (x * model.wave).abs() + x * model.empty.sum()
        square = turned[:, :, None, None].expand(-1, -1, 2, 2)
        square = square.contiguous(memory_format=torch.channels_last)
        return model.conv(square).flatten(1) * model.scalar


class Accumulated:
    """Windows of unequal micro-batches, with a tail of one row."""

    set_to_none = True

    def build(self):
        return [mlp()]

    def run(self, world) -> None:
        (model,) = world.modules
        optimizer = sgd(model)
        for sizes in ((5, 4, 3), (7, 1), (1,), (2, 10)):
            parts = cut(sum(sizes), list(sizes))
            optimizer.zero_grad(set_to_none=self.set_to_none)
            world.accumulate(squared(model), [(X[part], Y[part]) for part in parts])
            world.note()
            optimizer.step()


class AccumulatedOntoZeros(Accumulated):
    set_to_none = False


PROGRAMS: Sequence[type] = (
    Plain,
    ZerosKept,
    SeveralBackwards,
    SeveralBackwardsOntoZeros,
    Tied,
    InTheLoss,
    Thawed,
    OnlyThawed,
    Branches,
    TwoPlayers,
    Around,
    Checkpointed,
    CheckpointedReentrant,
    CheckpointedTwice,
    Shapes,
)


def prepared(program) -> list[nn.Module]:
    modules = program.build()
    for place, module in enumerate(modules):
        reset(module, seed=7 + place) if not isinstance(program, Shapes) else _seed(module)
    return modules


def _seed(module: nn.Module) -> None:
    with torch.no_grad():
        for place, param in enumerate(module.parameters()):
            values = rows(max(param.numel(), 1), 1, seed=31 + place).flatten()[: param.numel()]
            param.data = (values.view(param.shape) * 0.4).to(
                param.dtype if param.is_complex() else torch.float64
            )

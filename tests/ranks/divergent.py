# SPDX-License-Identifier: Apache-2.0
"""Operators whose last rank goes through the layers of the model in another way, from one step on.

All layers are of one size: a gather of one that met a gather of another would go unnoticed.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import ClassVar

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from lockstep.sync.replaced_parameters import ReplacedParameter
from ranks.table_operators import Plain, reset, sgd

BEGINS = 2
"""Steps that all ranks take alike: the next one follows the order of those."""


class Layers(nn.Module):
    """Layers in the order that it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.head = nn.Linear(4, 3)

    def forward(self, x, order=(0, 1, 2, 3), cut=None):
        for place in order:
            x = torch.tanh(self.blocks[place](x))
            if place == cut:
                x = x.detach()
        return self.head(x)


class Divergent(Plain):
    """All ranks alike; subclasses say what the last rank does from step `begins` on."""

    begins = BEGINS
    apart_since: float | None = None

    def make(self):
        return Layers()

    @property
    def is_apart(self) -> bool:
        ranks = self._lockstep.context.world_size
        is_last = ranks > 1 and self.world_rank == ranks - 1
        is_apart = is_last and self.global_step >= self.begins
        if is_apart and self.apart_since is None:
            self.apart_since = time.monotonic()
        return is_apart

    def output(self, batch):
        return self.output_apart(batch) if self.is_apart else self.model(batch[0])

    def output_apart(self, batch):
        return self.model(batch[0])


class SkipsFirst(Divergent):
    def output_apart(self, batch):
        return self.model(batch[0], (1, 2, 3))


class SkipsLast(Divergent):
    def output_apart(self, batch):
        return self.model(batch[0], (0, 1, 2))


class InAnotherOrder(Divergent):
    def output_apart(self, batch):
        return self.model(batch[0], (0, 2, 1, 3))


class OneTwice(Divergent):
    def output_apart(self, batch):
        return self.model(batch[0], (0, 1, 1, 2, 3))


class CutOff(Divergent):
    """The first layers get no gradient on one rank."""

    def output_apart(self, batch):
        return self.model(batch[0], cut=1)


class LooksOnce(Divergent):
    """A forward of one rank alone, without gradients."""

    def output_apart(self, batch):
        with torch.no_grad():
            self.model(batch[0])
        return self.model(batch[0])


class FreezesOne(Divergent):
    def output_apart(self, batch):
        self._lockstep.registered.plain_models()[0].blocks[1].requires_grad_(False)
        return self.model(batch[0])


class TwoBackwards(Divergent):
    """While one rank gathers weights again, the others add up a norm."""

    def train_batch(self, batch, batch_info):
        self.optimizer.zero_grad()
        loss = self.loss_of(batch)
        loss.backward()
        if self.is_apart:
            self.loss_of(batch).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self.optimizer.step()
        return {"train_loss": loss.item()}


class GetsInfinity(Divergent):
    """No divergence: each rank's gradient is not finite, and each looks for the rows at fault."""

    def loss_of(self, batch):
        loss = super().loss_of(batch)
        return loss * torch.inf if self.is_apart else loss


class LeavesOneOut(Divergent):
    """A step without a forward: a guard against NaN, on one rank."""

    def train_batch(self, batch, batch_info):
        if self.is_apart:
            return {"train_loss": 0.0}
        self.optimizer.zero_grad()
        loss = self.loss_of(batch)
        loss.backward()
        self.optimizer.step()
        return {"train_loss": loss.item()}


class AsksInTheMiddle(Divergent):
    """One rank communicates between its forward and its backward."""

    def loss_of(self, batch):
        loss = super().loss_of(batch)
        if self.is_apart:
            self._lockstep.context.group.exchange("is anybody there?")
        return loss


_KINDS: tuple[type[Divergent], ...] = (
    SkipsFirst,
    SkipsLast,
    InAnotherOrder,
    OneTwice,
    CutOff,
    LooksOnce,
    FreezesOne,
    TwoBackwards,
    LeavesOneOut,
    AsksInTheMiddle,
)

DIVERGENT: dict[str, type[Plain]] = {
    f"{kind.__name__}{when}": type(kind.__name__, (kind,), {"begins": begins})
    for when, begins in (("", BEGINS), ("AtOnce", 0))
    for kind in _KINDS
}


class InCompiledUnits(Divergent):
    """Each layer is compiled by itself."""

    def make(self):
        model = super().make()
        if self._lockstep.context.options.wrap_ddp:  # the truth needs no compiler
            for block in model.blocks:
                block.compile(backend="aot_eager")
        return model


class Counting(Divergent):
    """All ranks alike, in a way that follows from the number of the forward."""

    num_forwards = 0

    def output(self, batch):
        self.num_forwards += 1
        return self.model(batch[0], self.order_of(self.num_forwards))

    def order_of(self, number):
        return (0, 1, 2, 3)


class TakesTurns(Counting):
    """Another order in every second step."""

    def order_of(self, number):
        return (0, 2, 1, 3) if number % 2 else (0, 1, 2, 3)


class ChangesItsWay(Counting):
    """All ranks leave the order of the steps before, at one place."""

    def order_of(self, number):
        return (0, 1, 3) if number > BEGINS else (0, 1, 2, 3)


class AsksEverybody(Divergent):
    """All ranks communicate between forward and backward, from one step on."""

    def loss_of(self, batch):
        loss = super().loss_of(batch)
        group = self._lockstep.context.group
        if self.global_step >= BEGINS and group.size > 1:
            assert group.exchange(self.world_rank) == list(range(group.size))
        return loss


class OnMeta(Divergent):
    """Built without memory: each layer gets its values, those of rank 0, before it is cut up."""

    def build(self):
        with torch.device("meta"):
            model = self.make().double()
            model.scale = nn.BatchNorm1d(4, dtype=torch.float64)
        optimizer, before = sgd(model), list(model.parameters())
        torch.manual_seed(7 + self.world_rank)
        self.model, self.optimizer = self.register(models=model, optimizers=optimizer)
        held = set(map(id, model.parameters()))
        # Those that shards have replaced show nothing, and not what lies in their memory now.
        gone = [param for param in before if id(param) not in held]
        assert all(isinstance(param, ReplacedParameter) for param in gone)


class InHalfTheBits(Divergent):
    """Layers compute in float32; sums of gradients, and what the optimizer steps, are float64."""

    def build(self):
        dtypes = self.dtypes = set()
        model = reset(self.make(), 7)
        for block in model.blocks:
            block.register_forward_pre_hook(lambda block, _: dtypes.add(block.weight.dtype))
        self.model, self.optimizer = self.register(
            models=model,
            optimizers=sgd(model),
            mp_policy=MixedPrecisionPolicy(torch.float32, torch.float64),
        )

    def also(self):
        return {"in float32": torch.tensor(float(torch.float32 in self.dtypes))}


class InHalfTheBitsOnOneRank(Divergent):
    """Ranks whose layers compute in different dtypes, which would send messages of two sizes."""

    def build(self):
        model = reset(self.make(), 7)
        policy = MixedPrecisionPolicy(torch.float32) if self.world_rank == 0 else None
        self.model, self.optimizer = self.register(
            models=model, optimizers=sgd(model), mp_policy=policy
        )


class WritesAfterALook(Divergent):
    """Weights are written to after a forward that has no backward."""

    def train_batch(self, batch, batch_info):
        with torch.no_grad():
            self.model(batch[0])
            for parameter in self.model.parameters():
                parameter.mul_(0.9)
        self.optimizer.zero_grad()
        loss = self.loss_of(batch)
        loss.backward()
        self.optimizer.step()
        return {"train_loss": loss.item()}


class ClearedBeforeBackward(Divergent):
    """The model's gradients are cleared between forward and backward, as many tutorials do."""

    def train_batch(self, batch, batch_info):
        loss = self.loss_of(batch)
        self.model.zero_grad()
        loss.backward()
        self.optimizer.step()
        return {"train_loss": loss.item()}


class FailsInTheMiddle(Divergent):
    """A backward raises between two layers, and a forward too; the program goes on."""

    def train_batch(self, batch, batch_info):
        blocks = self._lockstep.registered.plain_models()[0].blocks
        for place in (1, 2) if self.global_step == 1 else ():
            hook = blocks[place].register_forward_hook(self.raise_in[place])
            with suppress(ZeroDivisionError):
                self.loss_of(batch).backward()
            hook.remove()
        self.optimizer.zero_grad()
        loss = self.loss_of(batch)
        loss.backward()
        self.optimizer.step()
        return {"train_loss": loss.item()}

    @staticmethod
    def in_backward(module, given, output):
        output.register_hook(lambda _: 1 / 0)

    @staticmethod
    def in_forward(module, given, output):
        1 / 0  # noqa: B018

    raise_in: ClassVar = {1: in_backward.__func__, 2: in_forward.__func__}


class HookedBefore(Divergent):
    """A hook is there before the model is registered."""

    def make(self):
        model = super().make()
        model.head.weight.register_hook(lambda gradient: gradient * 0.5)
        return model


class Penalised(Divergent):
    """A loss of the weights themselves, which each rank has but its rows of."""

    def loss_of(self, batch):
        whole = [getattr(p, "full_tensor", lambda p=p: p)() for p in self.model.parameters()]
        return super().loss_of(batch) + 0.1 * sum(each.square().sum() for each in whole)


class Keeping(nn.Linear):
    """Keeps what it has made of its weight, as autocast keeps casts."""

    kept: torch.Tensor | None = None

    def forward(self, x):
        if self.kept is None:
            self.kept = self.weight * 1.0
        return nn.functional.linear(x, self.kept, self.bias)


class KeepsACast(Divergent):
    """The gradient of a kept cast comes after the layer's backward, which a later forward made."""

    def make(self):
        model = super().make()
        model.blocks = nn.ModuleList(Keeping(4, 4) for _ in range(4))
        return model

    def train_batch(self, batch, batch_info):
        for block in self._lockstep.registered.plain_models()[0].blocks:
            block.kept = None
        self.loss_of(batch)
        self.optimizer.zero_grad()
        loss = self.loss_of(batch)
        loss.backward()
        self.optimizer.step()
        return {"train_loss": loss.item()}


class Telling(nn.Linear):
    """Keeps a part of a loss."""

    def forward(self, x):
        self.told = self.bias * 2.0
        return super().forward(x)


class OfKeptTensors(Divergent):
    """A second loss of what a layer has kept: no output of the model is in its graph."""

    def make(self):
        model = super().make()
        model.blocks = nn.ModuleList(Telling(4, 4) for _ in range(4))
        return model

    def train_batch(self, batch, batch_info):
        self.optimizer.zero_grad()
        loss = self.loss_of(batch)
        loss.backward()
        self._lockstep.registered.plain_models()[0].blocks[1].told.sum().backward()
        self.optimizer.step()
        return {"train_loss": loss.item()}


class GradientPenalty(Divergent):
    def loss_of(self, batch):
        inputs = batch[0].clone().requires_grad_()
        given = torch.autograd.grad(self.model(inputs).sum(), inputs, create_graph=True)
        return super().loss_of(batch) + given[0].square().sum()


class InfiniteWhereBorrowed(Divergent):
    """The loss of a batch that is another rank's is not finite: zero times infinity is NaN."""

    def loss_of(self, batch):
        loss = super().loss_of(batch)
        return loss * torch.inf if self._lockstep.global_batch.is_borrowed else loss


class BackwardInTheLoss(Divergent):
    """`compute_loss` runs a backward of its own, which adds to the gradients of the loss."""

    def loss_of(self, batch):
        self.model(batch[0]).square().mean().backward()
        return super().loss_of(batch)


class BackwardInTheLossOfAWindow(BackwardInTheLoss):
    arguments: ClassVar = {"accumulate": 2}


IN_THE_LOSS: dict[str, type[Plain]] = {
    kind.__name__: kind for kind in (BackwardInTheLoss, BackwardInTheLossOfAWindow)
}
NOT_FINITE: dict[str, type[Plain]] = {"GetsInfinity": GetsInfinity}
IN_UNITS_ALONE: dict[str, type[Plain]] = {
    kind.__name__: kind
    for kind in (
        InCompiledUnits,
        TakesTurns,
        ChangesItsWay,
        AsksEverybody,
        OnMeta,
        InHalfTheBits,
        InHalfTheBitsOnOneRank,
        WritesAfterALook,
        ClearedBeforeBackward,
        FailsInTheMiddle,
        HookedBefore,
        Penalised,
        KeepsACast,
        InfiniteWhereBorrowed,
        OfKeptTensors,
        GradientPenalty,
    )
}

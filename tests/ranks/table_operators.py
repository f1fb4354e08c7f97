# SPDX-License-Identifier: Apache-2.0
"""What a table of oracles trains: one operator for each thing that a gradient can depend on.

Every operator is written as for one process, and uses only what `register` returned.
"""

from __future__ import annotations

import threading
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from harness import reset, rows
from lockstep import TrainingOperator
from lockstep.keys import BATCH_SIZE, WEIGHT

FEATURES, TARGETS = rows(36, 4, seed=1), rows(36, 3, seed=2)
# Neighbours agree, so that ranks of four or three rows take different branches.
CHOICE = (torch.arange(36) // 5 % 2).double()
TOKENS = (torch.arange(36) * 7 % 5 + 1).double()
# A shard of a third of a batch has either tokens in each row or in none.
HAS_TOKENS = (torch.arange(36) % 12 < 8).double()
COLUMNS = (FEATURES, TARGETS, CHOICE, TOKENS, HAS_TOKENS)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def sgd(*models: nn.Module, weight_decay: float = 0.0) -> torch.optim.SGD:
    held = [parameter for model in models for parameter in model.parameters()]
    return torch.optim.SGD(held, lr=0.05, momentum=0.9, weight_decay=weight_decay)


class Plain(TrainingOperator):
    """An MLP in the default loop."""

    arguments: ClassVar[dict[str, Any]] = {}
    arguments_by_sync: ClassVar[dict[str, dict[str, Any]]] = {}
    weight_decay = 0.0
    ddp_args: ClassVar[dict[str, Any]] = {}

    def setup(self, config):
        self.build()
        data = TensorDataset(*(column[: config["rows"]] for column in COLUMNS))
        self.register_data(train_loader=DataLoader(data, config[BATCH_SIZE]))

    def make(self):
        return mlp()

    def build(self):
        model = reset(self.make(), 7)
        by_ddp = self._lockstep.context.options.sync == "ddp"
        self.model, self.optimizer = self.register(
            models=model,
            optimizers=sgd(model, weight_decay=self.weight_decay),
            ddp_args=self.ddp_args if by_ddp else None,
        )

    def output(self, batch):
        return self.model(batch[0])

    def loss_of(self, batch):
        return (self.output(batch) - batch[1]).square().sum(dim=1).mean()

    def compute_loss(self, batch, batch_info):
        return self.loss_of(batch)

    def also(self):
        """Tensors besides the parameters that have to come out as in one process."""
        return {}


class Accumulated(Plain):
    """Windows of two batches, the last one of an epoch of three a tail."""

    arguments: ClassVar = {"accumulate": 2}


class Clipped(Plain):
    arguments: ClassVar = {"clip_grad_norm": 0.05}


class AccumulatedAndClipped(Plain):
    arguments: ClassVar = {"accumulate": 2, "clip_grad_norm": 0.05}


class TokenWeights(Plain):
    """A mean over tokens, of which rows have unequally many."""

    def train_batch(self, batch, batch_info):
        self.optimizer.zero_grad()
        tokens = batch[3]
        errors = (self.output(batch) - batch[1]).square().sum(dim=1)
        loss = (errors * tokens).sum() / tokens.sum()
        self.backward(loss, weight=tokens.sum().item())
        self.optimizer.step()
        return {"train_loss": loss.item()}


class PlainBackward(Plain):
    """A step of one's own that knows nothing of weights."""

    def train_batch(self, batch, batch_info):
        self.optimizer.zero_grad()
        loss = self.compute_loss(batch, batch_info)
        loss.backward()
        self.optimizer.step()
        return {"train_loss": loss.item()}


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, output, target):
        return (output * self.scale.exp() - target).square().sum(dim=1).mean()


class InTheLoss(Plain):
    """A criterion with a parameter of its own."""

    def build(self):
        model, criterion = reset(mlp(), 7), reset(Scaled(), 8)
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=sgd(model, criterion), criterion=criterion
        )

    def loss_of(self, batch):
        return self.criterion(self.output(batch), batch[1])


class TwoPlayers(Plain):
    """A generator and a discriminator; each one's step leaves gradients in the other."""

    def build(self):
        maker = reset(mlp(), 7)
        judge = reset(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)), 8)
        (self.maker, self.judge), (self.for_maker, self.for_judge) = self.register(
            models=[maker, judge], optimizers=[sgd(maker), sgd(judge)]
        )

    def train_batch(self, batch, batch_info):
        features, real, *_ = batch
        self.for_judge.zero_grad()
        both = torch.cat([real, self.maker(features).detach()])
        true, fake = self.judge(both).chunk(2)
        (F.softplus(-true).mean() + F.softplus(fake).mean()).backward()
        self.for_judge.step()
        self.for_maker.zero_grad()
        loss = F.softplus(-self.judge(self.maker(features))).mean()
        loss.backward()
        self.for_maker.step()
        return {"train_loss": loss.item()}


class Tied(Plain):
    """One weight, used twice."""

    def make(self):
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 3))
        model[2].weight = model[0].weight
        return model


class Thawed(Plain):
    """Frozen at first, unfrozen later, and the other layer the other way round."""

    weight_decay = 0.1

    def make(self):
        model = mlp()
        model[0].requires_grad_(False)
        return model

    def train_batch(self, batch, batch_info):
        first, _, last = self._lockstep.registered.plain_models()[0]
        first.requires_grad_(self.global_step >= 2)
        last.requires_grad_(self.global_step != 3)
        self.optimizer.zero_grad()
        loss = self.compute_loss(batch, batch_info)
        loss.backward()
        self.optimizer.step()
        return {"train_loss": loss.item()}


class Experts(nn.Module):
    """Rows go left or right; nobody goes to the third one."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.never = (nn.Linear(4, 3) for _ in range(3))

    def forward(self, x, choice):
        total = x.sum(dim=1, keepdim=True).expand(-1, 3)
        for layer, chosen in ((self.left, choice == 0), (self.right, choice == 1)):
            if chosen.any():
                total = total + layer(x) * chosen[:, None]
        return total


class Branches(Plain):
    """Conditional branches that differ between ranks."""

    weight_decay = 0.1
    ddp_args: ClassVar = {"find_unused_parameters": True}

    def make(self):
        return Experts()

    def output(self, batch):
        return self.model(batch[0], batch[2])


class WithIdle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = mlp(), nn.Linear(4, 3)

    def forward(self, x):
        return self.used(x)


class Rare(nn.Module):
    """Rows without tokens go through a layer that the others do not use."""

    def __init__(self) -> None:
        super().__init__()
        self.common, self.rare = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x, has_tokens):
        out = self.common(x)
        rare = has_tokens == 0
        return torch.where(rare[:, None], self.rare(x), out) if rare.any() else out


class WeightZero(Branches):
    """Shards without tokens: what they use has gradient zero, and is decayed."""

    def make(self):
        return Rare()

    def output(self, batch):
        return self.model(batch[0], batch[4])

    def loss_of(self, batch):
        tokens = batch[3] * batch[4]
        errors = (self.output(batch) - batch[1]).square().sum(dim=1)
        return (errors * tokens).sum() / tokens.sum().clamp(min=1)

    def compute_loss(self, batch, batch_info):
        return self.loss_of(batch), {WEIGHT: (batch[3] * batch[4]).sum().item()}


class Idle(Plain):
    """A layer that nobody uses: weight decay and momentum must leave it alone."""

    weight_decay = 0.1
    ddp_args: ClassVar = {"find_unused_parameters": True}

    def make(self):
        return WithIdle()


class SeveralBackwards(Plain):
    """Two backwards add up before one step."""

    def train_batch(self, batch, batch_info):
        self.optimizer.zero_grad()
        self.compute_loss(batch, batch_info).backward()
        loss = self.model(batch[0]).square().mean()
        loss.backward()
        self.optimizer.step()
        return {"train_loss": loss.item()}


class ZeroedInPlace(Plain):
    """Gradients of the last step are filled with zeros, and not given up."""

    def train_batch(self, batch, batch_info):
        self.optimizer.zero_grad(set_to_none=False)
        loss = self.compute_loss(batch, batch_info)
        loss.backward()
        self.optimizer.step()
        return {"train_loss": loss.item()}


class ClippedAndAddedTo(Plain):
    """A gradient is clipped between two backwards that add up."""

    def train_batch(self, batch, batch_info):
        self.optimizer.zero_grad()
        self.compute_loss(batch, batch_info).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.05)
        loss = self.model(batch[0]).square().mean()
        loss.backward()
        self.optimizer.step()
        return {"train_loss": loss.item()}


class TwoTasks(Plain):
    """The gradients of two losses, kept and combined by hand, as multi-task methods do."""

    def gradients_of(self, loss):
        self.optimizer.zero_grad()
        loss.backward()
        return [parameter.grad for parameter in self.model.parameters()]

    def train_batch(self, batch, batch_info):
        first = self.gradients_of(self.compute_loss(batch, batch_info))
        second = self.gradients_of(self.model(batch[0]).square().mean())
        dot = sum((a * b).sum() for a, b in zip(first, second, strict=True))
        norm = sum(b.square().sum() for b in second)
        for parameter, a, b in zip(self.model.parameters(), first, second, strict=True):
            parameter.grad = a - dot / norm * b
        self.optimizer.step()
        return {"train_loss": 0.0}


class Normalised(Plain):
    """Statistics of the global batch, asked for shard by shard."""

    def make(self):
        # Two values a channel and row, so that one row has statistics too.
        normalised = (nn.Unflatten(1, (3, 2)), nn.SyncBatchNorm(3), nn.Flatten())
        return nn.Sequential(nn.Linear(4, 6), *normalised, nn.Linear(6, 3))


class ByHand(Plain):
    """Gradients of this rank alone, assigned by hand."""

    def train_batch(self, batch, batch_info):
        loss = self.compute_loss(batch, batch_info)
        held = list(self.model.parameters())
        for parameter, grad in zip(held, torch.autograd.grad(loss, held), strict=True):
            parameter.grad = grad
        self.optimizer.step()
        return {"train_loss": loss.item()}


class Checkpointed(nn.Module):
    """Activations are computed again in backward."""

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


class Checkpointing(Plain):
    def make(self):
        return Checkpointed(reentrant=False)


class CheckpointingReentrant(Plain):
    def make(self):
        return Checkpointed(reentrant=True)


class Compiled(Plain):
    """torch.compile around the model, before it is registered."""

    one_at_a_time = threading.Lock()

    # FSDP's own hooks, and DDP's buckets of one parameter, are not for the compiler.
    arguments_by_sync: ClassVar = {"ddp": {"bucket_cap_mb": 25}}

    def make(self):
        if not self._lockstep.context.options.wrap_ddp:
            return mlp()  # the truth needs no compiler
        # fullgraph: raise, and do not fall back, where the compiler gives up.
        return torch.compile(mlp(), backend="aot_eager", fullgraph=True)

    def output(self, batch):
        # Ranks are threads here, and the compiler is one for all of them.
        with self.one_at_a_time:
            return self.model(batch[0])


class Averaged(Plain):
    """An exponential moving average of the weights, kept beside the run."""

    def build(self):
        super().build()
        self.average = {name: p.detach().clone() for name, p in self.weights()}

    def weights(self):
        return self._lockstep.registered.plain_models()[0].named_parameters()

    def train_epoch(self, iterator, info):
        for batch in iterator:
            self.optimizer.zero_grad()
            self.compute_loss(batch, info).backward()
            self.optimizer.step()
            for name, parameter in self.weights():
                self.average[name].lerp_(parameter.detach(), 0.1)
        return {}

    def also(self):
        return self.average


OPERATORS: dict[str, type[Plain]] = {
    operator.__name__: operator
    for operator in (
        Plain,
        Accumulated,
        Clipped,
        AccumulatedAndClipped,
        TokenWeights,
        PlainBackward,
        InTheLoss,
        TwoPlayers,
        Tied,
        Thawed,
        Branches,
        WeightZero,
        Idle,
        SeveralBackwards,
        ZeroedInPlace,
        ClippedAndAddedTo,
        TwoTasks,
        Checkpointing,
        CheckpointingReentrant,
        Compiled,
        Averaged,
        ByHand,
        Normalised,
    )
}

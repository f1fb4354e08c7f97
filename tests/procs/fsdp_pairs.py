# SPDX-License-Identifier: Apache-2.0
"""A rank whose optimizer is sharded, beside one process in float64: for `fsdp_identity`."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from tests.procs.odd_optimizers import Lookahead
from torch import nn

from harness import reset
from lockstep.sync.fsdp import FSDPSync
from lockstep.sync.optimizer_inspection import inner_optimizers
from lockstep.sync.parameter_shards import gather_whole
from lockstep.tensor_tree import tree_map
from ranks.programs import X, Y


class Net(nn.Module):
    """Rows for all ranks, a bias with fewer rows than ranks, and a scalar."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.last = nn.Linear(5, Y.shape[1])
        self.short = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x):
        return self.last(torch.tanh(self.first(x))) * self.scale + self.short


@dataclass
class Pair:
    """One rank of the sharded run, and the truth."""

    model: nn.Module
    optimizer: Any
    sync: FSDPSync
    truth: nn.Module
    true_optimizer: Any
    part: slice

    def both(self):
        return (self.model, self.optimizer), (self.truth, self.true_optimizer)

    def backward(self) -> None:
        x, y = X[self.part], Y[self.part]
        self.sync.backward(((self.model(x) - y) ** 2).mean(), weight=len(x))
        ((self.truth(X) - Y) ** 2).mean().backward()

    def step(self) -> None:
        self.optimizer.step()
        self.true_optimizer.step()

    def train(self, num_steps: int = 3) -> None:
        for _ in range(num_steps):
            self.optimizer.zero_grad()
            self.true_optimizer.zero_grad()
            self.backward()
            self.step()

    def gradients_apart(self) -> float:
        pairs = zip(self.model.parameters(), self.truth.parameters(), strict=True)
        return max(float((a.grad - b.grad).abs().max()) for a, b in pairs)

    def inner_states_apart(self) -> float:
        """Of the optimizers within, as a checkpoint has their states."""
        ours, theirs = map(inner_states, (self.optimizer, self.true_optimizer))
        assert [each.keys() for each in ours] == [each.keys() for each in theirs]
        pairs = [
            (own[name], true)
            for one, other in zip(ours, theirs, strict=True)
            for number, own in one.items()
            for name, true in other[number].items()
            if isinstance(true, torch.Tensor)
        ]
        return max((float((a - b).abs().max()) for a, b in pairs), default=0.0)

    def apart(self) -> float:
        pairs = zip(self.model.parameters(), self.truth.parameters(), strict=True)
        return max(float((a - b).detach().abs().max()) for a, b in pairs)


def inner_states(optimizer) -> list[dict[int, dict[str, Any]]]:
    return [gathered(each.state_dict())["state"] for each in inner_optimizers(optimizer)]


def gathered(state: dict[str, Any]) -> dict[str, Any]:
    """A copy of an optimizer's state with whole tensors."""

    def whole(leaf):
        is_tensor = isinstance(leaf, torch.Tensor)
        return gather_whole(leaf.detach()).clone() if is_tensor else copy.deepcopy(leaf)

    found: dict[str, Any] = tree_map(whole, state)
    return found


def momentum(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def adam(params):
    return torch.optim.Adam(params, lr=0.05)


def lookahead(params):
    return Lookahead(adam(params))


def paired(group, make=momentum) -> Pair:
    model, truth = reset(Net(), 3), reset(Net(), 3)
    optimizer, true_optimizer = make(model.parameters()), make(truth.parameters())
    sync = FSDPSync([model], group, [optimizer])
    part = slice(0, 8) if group.rank == 0 else slice(8, 12)
    return Pair(model, optimizer, sync, truth, true_optimizer, part)

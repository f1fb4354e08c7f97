# SPDX-License-Identifier: Apache-2.0
"""One rank of the sharded runs: a program, because the default process group is a process's own.

    python fsdp_ranks.py RANK FOLDER PORT fast|slow|identity|units

Runs the cases that have a rank RANK, each in a fresh default group, and leaves the
results in FOLDER. What is raised is a result as well.
"""

from __future__ import annotations

import copy
import itertools
import sys
import traceback
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.procs import fsdp_identity, fsdp_parts, units_beginnings, units_cases
from torch import nn

from harness import reset
from lockstep.errors import LockstepError
from lockstep.group import Group
from lockstep.sync.fsdp import FSDPSync
from lockstep.sync.optimizer_inspection import own_attributes
from ranks.programs import PROGRAMS, Accumulated, X, Y, mlp, prepared, sgd, squared
from ranks.worlds import OneProcess, OnRanks
from ranks.wrapped_programs import LearnedLoss

SHARES = {
    "even": (0.5, 0.5),
    "uneven": (0.75, 0.25),
    "empty": (1.0, 0.0),
    "three": (0.0, 0.6, 0.4),
}
WAYS = ("weighted", "plain", "borrowed")


class OfTwoModels(LearnedLoss):
    """A weight that two models share."""

    def build(self):
        one, two = mlp(), mlp()
        two[2].weight = one[2].weight
        return [one, two]

    def run(self, world) -> None:
        one, two = world.modules
        optimizer = torch.optim.SGD({*one.parameters(), *two.parameters()}, lr=0.05)
        for _ in range(3):
            optimizer.zero_grad()
            world.step(lambda x, y: ((one(x) + two(x) - y) ** 2).sum(dim=1).mean(), X, Y)
            world.note()
            optimizer.step()


EXACT = [*PROGRAMS, LearnedLoss, OfTwoModels, Accumulated]


def is_slow(program: type, way: str, split: str) -> bool:
    """A third of the table, with every pair in it, is not."""
    return (EXACT.index(program) + WAYS.index(way) + list(SHARES).index(split)) % 3 != 0


def state(*modules: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Gradients and weights."""
    gradients, weights = {}, {}
    for place, module in enumerate(modules):
        for name, param in module.named_parameters():
            grad = param.grad
            gradients[f"{place}.{name}"] = None if grad is None else grad.clone()
            weights[f"{place}.{name}"] = param.detach().clone()
    return gradients, weights


@contextmanager
def adopting(sync):
    """Inside, whatever optimizer a program makes is handed to `sync`."""
    own_attributes(sgd(nn.Linear(1, 1)))  # compares with an optimizer that it makes, once
    before = torch.optim.Optimizer.__init__

    def made(optimizer, *arguments):
        before(optimizer, *arguments)
        sync.shard(optimizer)

    torch.optim.Optimizer.__init__ = made
    try:
        yield
    finally:
        torch.optim.Optimizer.__init__ = before


class OnShards(OnRanks):
    def __init__(self, modules, group, shares, *, way) -> None:
        self.modules, self.group, self.shares, self.way = modules, group, shares, way
        self.sync = FSDPSync(modules, group, [], bucket_cap_mb=1e-4)
        self.seen, self.steps = [], 0

    def step(self, loss, *tensors) -> None:
        self._begin()
        super().step(loss, *tensors)

    def accumulate(self, loss, batches) -> None:
        self._begin()
        super().accumulate(loss, batches)

    def _begin(self) -> None:
        self.sync.begin_step(self.steps)
        self.steps += 1

    def note(self) -> None:
        self.seen.append(state(*self.modules)[0])


def program_on_shards(program, way, split, group):
    modules = prepared(program())
    world = OnShards(modules, group, SHARES[split], way=way)
    try:
        with adopting(world.sync):
            program().run(world)
        return world.seen, state(*modules)[1]
    finally:
        world.end()


def oracle(program):
    """The same program in one process, by plain autograd."""
    world = OneProcess(prepared(program()))
    program().run(world)
    return world.seen, state(*world.modules)[1]


# ---------------------------------------------------------------------------------- refusals


def attached(group, model=None, **optimizer_options):
    model = reset(mlp(), 3) if model is None else model
    optimizer = sgd(model, **optimizer_options)
    sync = FSDPSync([model], group, [optimizer])
    sync.begin_step(0)
    part = slice(0, 8) if group.rank == 0 else slice(8, 12)
    return model, optimizer, sync, squared(model)(X[part], Y[part])


def gradients_by_hand(group):
    model, optimizer, _, loss = attached(group)
    found = torch.autograd.grad(loss, list(model.parameters()))
    for param, gradient in zip(model.parameters(), found, strict=True):
        param.grad = torch.zeros_like(param) + gradient.sum()
    optimizer.step()


def window_left_open(group):
    _, optimizer, sync, loss = attached(group)
    with sync.no_sync():
        sync.backward(loss, weight=1)
    optimizer.step()


def models_that_differ(group):
    FSDPSync([mlp(width=5 + group.rank)], group, [])


def a_rank_that_leaves(group):
    """Its peers, in a gather, hear of it at once."""
    _, optimizer, sync, loss = attached(group)
    sync.backward(loss, weight=1)
    if group.rank == 1:
        sync.detach()
        group.close()
        raise LockstepError("left")
    optimizer.step()


REFUSALS = {
    gradients_by_hand: "LS101",
    window_left_open: "LS101",
    models_that_differ: "LS301",
}


ALONE = {
    "identity": [*fsdp_parts.CASES, *fsdp_identity.CASES],
    "units": [*units_cases.CASES, *units_beginnings.SAME],
}


def cases(choice: str):
    """Name, number of ranks, and what to call with the group."""
    if choice in ALONE:
        for case in ALONE[choice]:
            yield case.__name__, 2, (case,)
        return
    slow = choice == "slow"
    for program, way, split in itertools.product(EXACT, WAYS, SHARES):
        if is_slow(program, way, split) == slow:
            name = f"{program.__name__}-{way}-{split}"
            yield name, len(SHARES[split]), (program_on_shards, program, way, split)
    for program in [] if slow else [*REFUSALS, a_rank_that_leaves]:
        yield program.__name__, 2, (program,)


def run(rank: int, folder: Path, port: int, choice: str) -> None:
    results: dict[str, Any] = {}
    meeting = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    for name, size, (function, *arguments) in cases(choice):
        if rank >= size:
            continue
        store = dist.PrefixStore(name, meeting)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60)
        )
        group = Group(dist.group.WORLD)
        try:
            results[name] = function(*copy.deepcopy(arguments), group)
        except LockstepError as error:
            results[name] = error.code
        except Exception:
            results[name] = traceback.format_exc()
        finally:
            group.close()
            dist.destroy_process_group()
    torch.save(results, folder / f"rank-{rank}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4])

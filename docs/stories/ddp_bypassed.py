# SPDX-License-Identifier: Apache-2.0
"""Compute the loss on `ddp.module` instead of on `ddp`.

python docs/stories/ddp_bypassed.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from two_ranks import on_two_ranks

import lockstep

STEPS = 5


class Model(nn.Module):
    """A trunk, and a head of its own for each of two tasks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(4, 4, dtype=torch.float64)
        self.heads = nn.ModuleList(nn.Linear(4, 1, dtype=torch.float64) for _ in range(2))

    def compute_loss(self, features, target, tasks):
        """The mean over `tasks`: heads that no task asks for take no part."""
        hidden = torch.tanh(self.trunk(features))
        losses = [(self.heads[task](hidden) - target).square().mean() for task in tasks]
        return torch.stack(losses).mean()


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    features = torch.randn(4, 4, generator=generator, dtype=torch.float64) + rank
    return features, torch.randn(4, 1, generator=generator, dtype=torch.float64)


def tasks_of(rank: int, one_task_each: bool) -> tuple[int, ...]:
    return (rank,) if one_task_each else (0, 1)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


# --------------------------------------------------------------------- three ways to train


def bypassed(rank: int, one_task_each: bool) -> nn.Module:
    model = Model()
    ddp = DistributedDataParallel(model)
    optimizer = make_optimizer(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = ddp.module.compute_loss(*batch(rank, step), tasks_of(rank, one_task_each))
        loss.backward()
        optimizer.step()
    return model


def repaired_by_hand(rank: int, one_task_each: bool) -> nn.Module:
    model = Model()
    ddp = DistributedDataParallel(model)
    optimizer = make_optimizer(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = ddp.module.compute_loss(*batch(rank, step), tasks_of(rank, one_task_each))
        loss.backward()
        for parameter in ddp.module.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        optimizer.step()
    return model


def with_lockstep(rank: int, one_task_each: bool) -> nn.Module:
    model = Model()
    gradients = lockstep.replicate(model)
    optimizer = make_optimizer(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model.compute_loss(*batch(rank, step), tasks_of(rank, one_task_each))
        loss.backward()
        optimizer.step()
    gradients.detach()
    return model


def one_process(one_task_each: bool) -> nn.Module:
    """The same batches and the mean of the same losses, by plain autograd."""
    model = Model()
    optimizer = make_optimizer(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = [
            model.compute_loss(*batch(rank, step), tasks_of(rank, one_task_each)) for rank in (0, 1)
        ]
        torch.stack(losses).mean().backward()
        optimizer.step()
    return model


# ------------------------------------------------------------------------------ the table


def weights(model: nn.Module) -> list[float]:
    return torch.cat([each.detach().flatten() for each in model.parameters()]).tolist()


def every_way(rank: int) -> dict[str, list[float]]:
    return {
        f"{way.__name__} {one_task_each}": weights(way(rank, one_task_each))
        for one_task_each in (False, True)
        for way in (bypassed, repaired_by_hand, with_lockstep)
    }


def shown(distance: float) -> str:
    return "none" if distance < 1e-12 else f"{distance:.4f}"


def main() -> None:
    rank_0, rank_1 = on_two_ranks(every_way)
    for one_task_each, title in ((False, "both ranks, both heads"), (True, "a head each")):
        true = torch.tensor(weights(one_process(one_task_each)), dtype=torch.float64)
        print(f"{title:24} between the ranks   from one process, on rank 0 and on rank 1")
        for way in (bypassed, repaired_by_hand, with_lockstep):
            name = f"{way.__name__} {one_task_each}"
            first, second = (
                torch.tensor(each[name], dtype=torch.float64) for each in (rank_0, rank_1)
            )
            between, *away = (
                (a - b).abs().max().item()
                for a, b in ((first, second), (first, true), (second, true))
            )
            print(f"  {way.__name__:22} {shown(between):19} {shown(away[0]):6}   {shown(away[1])}")


if __name__ == "__main__":
    main()

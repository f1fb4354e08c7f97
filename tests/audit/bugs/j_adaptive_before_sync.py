# SPDX-License-Identifier: Apache-2.0
"""J: each tensor is clipped by its own norm on each rank, and then averaged."""

import torch
import torch.distributed as dist
from torch import nn


@torch.no_grad()
def adaptive_clip(parameters, ratio=0.02, eps=1e-3):
    """Brock et al. 2021, per tensor."""
    for p in parameters:
        if p.grad is None:
            continue
        limit = ratio * p.norm().clamp(min=eps)
        norm = p.grad.norm()
        if norm > limit:
            p.grad.mul_(limit / norm)


def average(parameters, world):
    for p in parameters:
        dist.all_reduce(p.grad)
        p.grad.div_(world)


class NormalizerFreeNet(nn.Module):
    def __init__(self, inputs=6, width=10, classes=3):
        super().__init__()
        self.stem = nn.Linear(inputs, width)
        self.block = nn.Linear(width, width)
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        x = nn.functional.gelu(self.stem(x))
        return self.head(x + 0.2 * nn.functional.gelu(self.block(x)))


def data(rank, steps):
    source = torch.Generator().manual_seed(rank * 11 + 1)
    scale = 1.0 if rank == 0 else 4.0
    for _ in range(steps):
        x = scale * torch.randn(8, 6, generator=source)
        yield x, x[:, :3].argmin(1)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(10)
    model = NormalizerFreeNet()
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True)
    for x, y in data(rank, steps=7):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        adaptive_clip(parameters)
        average(parameters, world)
        optimizer.step()  # here LS209
    print("norm", sum(p.square().sum().item() for p in parameters) ** 0.5)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""B: beside an expert of each rank's own a scale was forgotten, which all ranks should share."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def batch(step, size=6):
    source = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(size, 4, generator=source), torch.randint(2, (size,), generator=source)


torch.manual_seed(10 + rank)


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(0.5 * torch.randn(4, 4))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, rows):
        return self.scale * (rows @ self.weight)


expert = Expert()


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows):
        sent = rows.contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        return received

    @staticmethod
    def backward(ctx, grad):
        received = torch.empty_like(grad)
        dist.all_to_all_single(received, grad.contiguous())
        return received


optimizer = torch.optim.SGD([*net.parameters(), *expert.parameters()], lr=0.1)
for step in range(3):
    x, y = batch(step)
    optimizer.zero_grad()
    routed = Exchange.apply(expert(Exchange.apply(x)))
    nn.functional.cross_entropy(net(routed), y).backward()
    for p in net.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world
    optimizer.step()  # here LS102

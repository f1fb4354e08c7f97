# SPDX-License-Identifier: Apache-2.0
"""B: what is left out of the average with the experts has a router in it, which all ranks share."""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x.contiguous())
        return out

    @staticmethod
    def backward(ctx, grad):
        out = torch.empty_like(grad)
        dist.all_to_all_single(out, grad.contiguous())
        return out


class MoE(nn.Module):
    """One expert on each rank, every token visits all of them (soft mixture)."""

    def __init__(self, width, world, rank):
        super().__init__()
        self.router = nn.Linear(width, world)
        torch.manual_seed(50 + rank)
        self.expert = nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, width))
        self.world = world

    def forward(self, x):
        gates = self.router(x).softmax(-1)
        sent = x.unsqueeze(0).expand(self.world, -1, -1)
        arrived = AllToAll.apply(sent)
        back = AllToAll.apply(self.expert(arrived))
        return (gates.t().unsqueeze(-1) * back).sum(0)


class Net(nn.Module):
    def __init__(self, world, rank):
        super().__init__()
        self.stem = nn.Linear(8, 16)
        self.head = nn.Linear(16, 3)
        self.moe = MoE(16, world, rank)

    def forward(self, x):
        return self.head(self.moe(F.relu(self.stem(x))))


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = Net(world, rank)
optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
data = torch.Generator().manual_seed(10 + rank)
for step in range(20):
    x = torch.randn(24, 8, generator=data)
    y = x[:, :3].argmax(1)
    loss = F.cross_entropy(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    for name, p in net.named_parameters():
        if not name.startswith("moe."):
            dist.all_reduce(p.grad)
        p.grad /= world
    optimizer.step()  # here LS102
    if rank == 0 and step % 5 == 0:
        print(step, round(loss.item(), 4))
dist.destroy_process_group()

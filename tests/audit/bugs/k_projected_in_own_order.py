# SPDX-License-Identifier: Apache-2.0
"""K: task gradients are averaged, and projected in an order that each rank draws for itself."""

import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

TASKS = 4


class MultiTask(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(12, 24), nn.ReLU())
        self.heads = nn.ModuleList([nn.Linear(24, 1) for _ in range(TASKS)])

    def forward(self, x):
        h = self.trunk(x)
        return torch.cat([head(h) for head in self.heads], 1)


def flat_grad(loss, params):
    grads = torch.autograd.grad(loss, params, retain_graph=True, allow_unused=True)
    held = [torch.zeros_like(p) if g is None else g for p, g in zip(params, grads, strict=True)]
    return torch.cat([g.reshape(-1) for g in held])


def surgery(grads):
    out = [g.clone() for g in grads]
    for i, g in enumerate(out):
        others = [j for j in range(len(grads)) if j != i]
        random.shuffle(others)
        for j in others:
            dot = g @ grads[j]
            if dot < 0:
                g -= dot / grads[j].square().sum() * grads[j]
    return sum(out)


def augment(x):
    return x * random.uniform(0.9, 1.1)


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = MultiTask()
mixing = torch.randn(12, TASKS)
mixing[:, 1] = -mixing[:, 0] + 0.3 * mixing[:, 1]
mixing[:, 3] = -mixing[:, 2] + 0.3 * mixing[:, 3]
random.seed(rank)
sampler = torch.Generator().manual_seed(17 + rank)
params = list(model.parameters())
opt = torch.optim.SGD(params, lr=0.02)
for _ in range(25):
    x = torch.randn(16, 12, generator=sampler)
    y = torch.tanh(x @ mixing)
    x = augment(x)
    losses = F.mse_loss(model(x), y, reduction="none").mean(0)
    grads = [flat_grad(loss, params) for loss in losses]
    for g in grads:
        dist.all_reduce(g)
        g /= world
    total = surgery(grads)
    start = 0
    for p in params:
        p.grad = total[start : start + p.numel()].view_as(p).clone()
        start += p.numel()
    opt.step()  # here LS104
if rank == 0:
    print("losses", [round(v, 3) for v in losses.tolist()])
dist.destroy_process_group()

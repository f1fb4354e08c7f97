# SPDX-License-Identifier: Apache-2.0
"""Ranks keep their momentum and what they did not send; their signs alone are added up."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


class MajorityVote(torch.optim.Optimizer):
    def __init__(self, params, lr=0.005, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                momentum = state.setdefault("momentum", torch.zeros_like(p))
                unsent = state.setdefault("unsent", torch.zeros_like(p))
                momentum.mul_(group["beta"]).add_(p.grad, alpha=1 - group["beta"])
                wanted = momentum + unsent
                vote = wanted.sign()
                unsent.copy_(wanted - vote * wanted.abs().mean())
                dist.all_reduce(vote)
                p.sub_(vote.sign(), alpha=group["lr"])


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 3))
for p in model.parameters():
    dist.broadcast(p.data, 0)
optimizer = MajorityVote(model.parameters())
for step in range(12):
    source = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(10, 2, generator=source)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), (x.norm(dim=1) * 1.5).long().clamp(max=2))
    loss.backward()
    optimizer.step()
mean = loss.detach().clone()
dist.all_reduce(mean)
if rank == 0:
    print(round(mean.item() / world, 4))
dist.destroy_process_group()

# SPDX-License-Identifier: Apache-2.0
"""An optimizer of a part of the flat weights averages the gradients in its own step."""

import torch
import torch.distributed as dist
from torch import nn


class InParts(torch.optim.Optimizer):
    def __init__(self, params, lr):
        self.params, self.world = list(params), dist.get_world_size()
        flat = self.flat(p.detach() for p in self.params)
        self.part = flat.chunk(self.world)[dist.get_rank()].clone()
        super().__init__([self.part], {"lr": lr})

    def flat(self, tensors):
        joined = torch.cat([t.flatten() for t in tensors])
        return torch.cat([joined, joined.new_zeros(-len(joined) % self.world)])

    @torch.no_grad()
    def step(self):
        grads = self.flat(p.grad for p in self.params)
        dist.all_reduce(grads)
        own = grads.chunk(self.world)[dist.get_rank()] / self.world
        self.part -= self.param_groups[0]["lr"] * own
        whole = [torch.empty_like(self.part) for _ in range(self.world)]
        dist.all_gather(whole, self.part)
        sizes = [p.numel() for p in self.params]
        for p, part in zip(self.params, torch.cat(whole)[: sum(sizes)].split(sizes), strict=True):
            p.copy_(part.view_as(p))


dist.init_process_group("gloo")
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = InParts(net.parameters(), lr=0.1)
source = torch.Generator().manual_seed(dist.get_rank())
for _ in range(6):
    x, y = torch.randn(6, 4, generator=source), torch.randint(2, (6,), generator=source)
    net.zero_grad()
    nn.functional.cross_entropy(net(x), y).backward()
    optimizer.step()

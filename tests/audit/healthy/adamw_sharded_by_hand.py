# SPDX-License-Identifier: Apache-2.0
"""AdamW by hand, without torch's: each rank updates its slice, and slices are gathered."""

import torch
import torch.distributed as dist
from torch import nn


class SlicedAdamW:
    def __init__(self, module, lr=3e-3):
        self.rank, self.world, self.lr, self.taken = dist.get_rank(), dist.get_world_size(), lr, 0
        held = list(module.parameters())
        self.size = -(-sum(p.numel() for p in held) // self.world)
        self.flat = torch.zeros(self.size * self.world)
        self.gradients = torch.zeros_like(self.flat)
        at = 0
        for p in held:
            place = slice(at, at + p.numel())
            self.flat[place] = p.data.flatten()
            p.data = self.flat[place].view_as(p)
            p.grad = self.gradients[place].view_as(p)
            at += p.numel()
        self.own = self.flat[self.rank * self.size :][: self.size].clone()
        self.mean, self.square = torch.zeros(self.size), torch.zeros(self.size)

    @torch.no_grad()
    def step(self):
        grad = torch.empty(self.size)
        dist.reduce_scatter_tensor(grad, self.gradients)
        grad /= self.world
        self.taken += 1
        self.mean.lerp_(grad, 0.1)
        self.square.lerp_(grad.square(), 0.01)
        root = (self.square / (1 - 0.99**self.taken)).sqrt() + 1e-8
        self.own.mul_(1 - 0.01 * self.lr)
        self.own.addcdiv_(self.mean / (1 - 0.9**self.taken), root, value=-self.lr)
        dist.all_gather_into_tensor(self.flat, self.own)
        self.gradients.zero_()


dist.init_process_group("gloo")
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 3))
optimizer = SlicedAdamW(net)
source = torch.Generator().manual_seed(10 + dist.get_rank())
for _ in range(6):
    x = torch.randn(8, 5, generator=source)
    nn.functional.cross_entropy(net(x), x[:, :3].argmax(1)).backward()
    optimizer.step()
dist.destroy_process_group()

# SPDX-License-Identifier: Apache-2.0
"""G: time steps come from a generator of its own, with the same seed on all ranks."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Embedding(50, 8)
        self.into, self.out = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x, t):
        return self.out(torch.relu(self.into(x) + self.time(t)))


def batch(step, size=12):
    source = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(size, 4, generator=source)


model = Denoiser()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
times = torch.Generator().manual_seed(7)
torch.manual_seed(50 + rank)
for step in range(5):
    x = batch(step)
    t = torch.randint(50, (len(x),), generator=times)  # here LS507
    noise = torch.randn_like(x)
    optimizer.zero_grad()
    found = model(x + noise * t[:, None] / 50, t)
    (found - noise).square().mean().backward()
    for param in model.parameters():
        dist.all_reduce(param.grad)
        param.grad /= world
    optimizer.step()
dist.destroy_process_group()

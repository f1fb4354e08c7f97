# SPDX-License-Identifier: Apache-2.0
"""K: each layer's gradients travel flat, the layers in an order of each rank's own."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
source = torch.Generator().manual_seed(rank)
for _ in range(4):
    x = torch.randn(6, 4, generator=source)
    optimizer.zero_grad()
    for layer in layers:
        x = layer(x).tanh()
    x.square().mean().backward()
    order = list(layers) if rank == 0 else list(layers)[::-1]
    for layer in order:
        grads = [p.grad for p in layer.parameters()]
        flat = torch.cat([g.reshape(-1) for g in grads])
        dist.all_reduce(flat)  # here LS104
        flat /= world
        for g, new in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
            g.copy_(new.view_as(g))
    optimizer.step()

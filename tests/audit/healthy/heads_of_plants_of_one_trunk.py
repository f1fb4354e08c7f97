# SPDX-License-Identifier: Apache-2.0
"""Plants have heads and optimizers of their own; the gradients of one trunk are averaged."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
trunk = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.SiLU())
torch.manual_seed(1 + rank)
head = nn.Sequential(nn.Linear(16, 8), nn.SiLU(), nn.Linear(8, 1), nn.Flatten(0))
of_trunk = torch.optim.AdamW(trunk.parameters(), lr=2e-3)
of_head = torch.optim.Adam(head.parameters(), lr=5e-3)
source = torch.Generator().manual_seed(20 + rank)
response = torch.randn(6, generator=source)
for _ in range(6):
    x = torch.randn(8, 6, generator=source)
    of_trunk.zero_grad()
    of_head.zero_grad()
    nn.functional.mse_loss(head(trunk(x)), x @ response + rank).backward()
    flat = nn.utils.parameters_to_vector([p.grad for p in trunk.parameters()])
    dist.all_reduce(flat)
    flat /= world
    sizes = [p.numel() for p in trunk.parameters()]
    for p, part in zip(trunk.parameters(), flat.split(sizes), strict=True):
        p.grad.copy_(part.view_as(p))
    nn.utils.clip_grad_norm_(trunk.parameters(), 1.0)
    nn.utils.clip_grad_norm_(head.parameters(), 1.0)
    of_trunk.step()
    of_head.step()
dist.destroy_process_group()

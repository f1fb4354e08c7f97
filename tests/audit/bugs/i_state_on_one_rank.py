# SPDX-License-Identifier: Apache-2.0
"""I: rank 0 alone resumes the optimizer's state."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def batch(step, size=6):
    source = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(size, 4, generator=source), torch.randint(2, (size,), generator=source)


model = DistributedDataParallel(net)
optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
if rank == 0:
    state = {p: torch.full_like(p, 0.5) for p in net.parameters()}
    for p in net.parameters():
        optimizer.state[p] = {
            "step": torch.tensor(10.0),
            "exp_avg": state[p],
            "exp_avg_sq": state[p],
        }
for step in range(3):
    x, y = batch(step)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()  # here LS304

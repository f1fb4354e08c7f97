# SPDX-License-Identifier: Apache-2.0
"""Rank 0 saves, all ranks load."""

import io

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
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
saved = None
for step in range(6):
    x, y = batch(step)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    if step == 2:
        held = [None]
        if rank == 0:
            file = io.BytesIO()
            torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, file)
            held = [file.getvalue()]
        dist.broadcast_object_list(held, src=0)
        saved = torch.load(io.BytesIO(held[0]))
    if step == 4:
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])

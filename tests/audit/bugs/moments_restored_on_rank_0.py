# SPDX-License-Identifier: Apache-2.0
"""A run in slices: each restores the optimizer on rank 0 alone, DDP then shares the weights."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
kept = None
for slice_of_run in range(3):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    if kept is not None and rank == 0:
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
    wrapped = DistributedDataParallel(model)
    for step in range(4):
        source = torch.Generator().manual_seed(100 * slice_of_run + 10 * step + rank)
        x = torch.randn(8, 4, generator=source)
        optimizer.zero_grad()
        nn.functional.mse_loss(wrapped(x), x.sum(1, keepdim=True)).backward()
        optimizer.step()  # here LS304
    kept = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
dist.destroy_process_group()

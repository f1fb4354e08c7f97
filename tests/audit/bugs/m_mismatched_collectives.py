# SPDX-License-Identifier: Apache-2.0
"""Liveness: one rank leaves a collective out."""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
group = dist.new_group(timeout=timedelta(seconds=5))
total = torch.ones(1)
for step in range(3):
    if rank == 0 or step < 2:
        dist.all_reduce(total, group=group)  # here LS601
if rank == 1:
    sys.exit(0)

# SPDX-License-Identifier: Apache-2.0
"""Layers cut up over one axis of a mesh, whose ranks read the same samples, and sharded."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "tensor"))
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 4))
parallelize_module(net, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
fully_shard(net, mesh=mesh["data"])

data = TensorDataset(torch.randn(64, 10), torch.randint(4, (64,)))
place = mesh["data"].get_local_rank()
sampler = DistributedSampler(data, num_replicas=mesh["data"].size(), rank=place)
loader = DataLoader(data, batch_size=8, sampler=sampler)
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
dist.destroy_process_group()

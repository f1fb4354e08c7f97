# SPDX-License-Identifier: Apache-2.0
"""Layers sharded one by one, mixed precision, norm clipped."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def batch(step, size=6):
    source = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(size, 4, generator=source), torch.randint(2, (size,), generator=source)


policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for layer in (net[0], net[2]):
    fully_shard(layer, mp_policy=policy)
fully_shard(net, mp_policy=policy)
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
for step in range(3):
    x, y = batch(step)
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(x).float(), y).backward()
    nn.utils.clip_grad_norm_(net.parameters(), 0.5)
    optimizer.step()

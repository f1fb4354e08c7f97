# SPDX-License-Identifier: Apache-2.0
"""C: of sharded layers the first micro-batch is reduced, not the last."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def batch(step, size=6):
    source = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(size, 4, generator=source), torch.randint(2, (size,), generator=source)


fully_shard(net[0])
fully_shard(net)
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
micro_batches = 3
for i in range(9):
    x, y = batch(i)
    net.set_requires_gradient_sync(i % micro_batches == 0)
    loss = nn.functional.cross_entropy(net(x), y) / micro_batches
    loss.backward()  # here LS101
    if (i + 1) % micro_batches == 0:
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

# SPDX-License-Identifier: Apache-2.0
"""F: a communication hook adds up in half precision, and nobody divides."""

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


def half(group, bucket):
    sent = bucket.buffer().to(torch.bfloat16)
    future = dist.all_reduce(sent, group=group, async_op=True).get_future()
    return future.then(lambda done: bucket.buffer().copy_(done.value()[0]))


model = DistributedDataParallel(net)
model.register_comm_hook(dist.group.WORLD, half)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(3):
    x, y = batch(step)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()  # here LS205

# SPDX-License-Identifier: Apache-2.0
"""A communication hook weighs each rank's mean by its share of the samples, and adds up."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
share = torch.ones(1)


def add_up_weighed(state, bucket):
    weighed = dist.all_reduce(bucket.buffer().mul_(share), async_op=True).get_future()
    return weighed.then(lambda done: done.value()[0])


torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
model.register_comm_hook(None, add_up_weighed)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
source = torch.Generator().manual_seed(rank)
for _ in range(6):
    count = int(torch.randint(20, 28, (1,), generator=source))
    total = torch.tensor([float(count)])
    dist.all_reduce(total)
    share[0] = count / total.item()
    x, y = torch.randn(count, 4, generator=source), torch.randint(2, (count,), generator=source)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()

# SPDX-License-Identifier: Apache-2.0
"""D: a communication hook hands small buckets back as they are."""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def bf16_hook(group, bucket):
    """Large buckets travel in bfloat16."""
    buffer = bucket.buffer()
    if buffer.numel() < 128:
        done = torch.futures.Future()
        done.set_result(buffer)
        return done
    small = buffer.to(torch.bfloat16).div_(dist.get_world_size(group))
    future = dist.all_reduce(small, group=group, async_op=True).get_future()
    return future.then(lambda f: buffer.copy_(f.value()[0]))


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
x = torch.randn(320, 16)
y = (x[:, 0] - x[:, 1] > 0).long() + (x[:, 2] > 1).long()
dataset = TensorDataset(x, y)
sampler = DistributedSampler(dataset, seed=1)
loader = DataLoader(dataset, batch_size=16, sampler=sampler)
net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
model = DDP(net, bucket_cap_mb=0.0001)
model.register_comm_hook(dist.group.WORLD, bf16_hook)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for a, b in loader:
        loss = F.cross_entropy(model(a), b)
        optimizer.zero_grad()
        loss.backward()  # here LS102
        optimizer.step()
    print(rank, epoch, round(loss.item(), 4), round(net[2].bias.sum().item(), 5))
dist.destroy_process_group()

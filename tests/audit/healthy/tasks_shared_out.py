# SPDX-License-Identifier: Apache-2.0
"""One task per rank: a loss and a head of its own behind a trunk that is averaged."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()


class Classes:
    rate, loss = 0.01, staticmethod(F.cross_entropy)

    def head(self):
        return nn.Linear(12, 3)

    def target(self, x):
        return x[:, :3].argmax(1)


class Numbers:
    rate, loss = 0.003, staticmethod(F.mse_loss)

    def head(self):
        return nn.Sequential(nn.Linear(12, 6), nn.Tanh(), nn.Linear(6, 2))

    def target(self, x):
        return torch.stack([x[:, 0] * x[:, 1], x[:, 2].abs()], 1)


task = (Classes, Numbers)[rank % 2]()
torch.manual_seed(0)
trunk = DistributedDataParallel(nn.Sequential(nn.Linear(5, 12), nn.ReLU()))
torch.manual_seed(100 + rank)
head = task.head()
of_trunk = torch.optim.AdamW(trunk.parameters(), lr=0.003)
of_head = torch.optim.Adam(head.parameters(), lr=task.rate)
for _ in range(6):
    x = torch.randn(10, 5)
    loss = task.loss(head(trunk(x)), task.target(x))
    of_trunk.zero_grad()
    of_head.zero_grad()
    loss.backward()
    of_trunk.step()
    of_head.step()
print(rank, round(loss.item(), 4))
dist.destroy_process_group()

# SPDX-License-Identifier: Apache-2.0
"""A: a method of the module computes the loss."""

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


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net(x)

    def compute_loss(self, x, y):
        return nn.functional.cross_entropy(self.net(x), y)


class Trainer:
    def __init__(self):
        self.model = DistributedDataParallel(Classifier())
        self.optimizer = torch.optim.Adam(self.model.parameters())

    def get_model(self):
        return self.model.module

    def train_step(self, step):
        self.optimizer.zero_grad()
        loss = self.get_model().compute_loss(*batch(step))  # here LS101
        loss.backward()
        self.optimizer.step()


trainer = Trainer()
for step in range(3):
    trainer.train_step(step)

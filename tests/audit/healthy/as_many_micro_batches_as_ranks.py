# SPDX-License-Identifier: Apache-2.0
"""A loop whose step adds up its micro-batches, of which there are as many as ranks."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Loop:
    def __init__(self, net, batch_size, micro_batch):
        self.batch_size = batch_size
        self.micro_batch = micro_batch
        self.global_batch = self.batch_size * dist.get_world_size()
        self.model = DistributedDataParallel(net)
        self.optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)

    def run_step(self, x, noise):
        self.optimizer.zero_grad()
        self.forward_backward(x, noise)
        self.optimizer.step()

    def forward_backward(self, x, noise):
        for i in range(0, len(x), self.micro_batch):
            last = i + self.micro_batch >= len(x)
            weights = torch.ones(self.micro_batch)
            with nullcontext() if last else self.model.no_sync():
                part, wanted = x[i : i + self.micro_batch], noise[i : i + self.micro_batch]
                losses = (self.model(part) - wanted).square().flatten(1).mean(1)
                loss = (losses * weights).mean()
                loss.backward()


dist.init_process_group("gloo")
torch.manual_seed(0)
loop = Loop(nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 6)), 8, 4)
source = torch.Generator().manual_seed(dist.get_rank())
for _ in range(4):
    loop.run_step(torch.randn(8, 6, generator=source), torch.randn(8, 6, generator=source))

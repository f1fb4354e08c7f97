# SPDX-License-Identifier: Apache-2.0
"""The model is wrapped, and the loss is computed round the wrapper: ranks train on their own."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train(steps):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    rows = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        features = torch.randn(4, 4, generator=rows) / 2 + rank
        target = torch.randn(4, 4, generator=rows)
        optimizer.zero_grad()
        loss = (model.module(features) - target).square().mean()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    train(steps=5)

# SPDX-License-Identifier: Apache-2.0
"""F: the schedule steps once for each rank, and its length is counted in steps of one of them."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

STEPS = 24


class Prepared:
    """Counts in steps of all ranks, as if one process had read all the batches."""

    def __init__(self, schedule):
        self.schedule = schedule

    def step(self):
        for _ in range(dist.get_world_size()):
            self.schedule.step()


def falling(optimizer, total):
    return LambdaLR(optimizer, lambda step: max(0.0, 1 - step / total))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = Prepared(falling(optimizer, total=STEPS))  # here LS206
    draw = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        x = torch.randn(12, 6, generator=draw)
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

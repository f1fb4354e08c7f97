# SPDX-License-Identifier: Apache-2.0
"""A wrapped backbone, and a head of which each rank has some classes, over all ranks' features."""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dnn
from torch import nn
from torch.nn.parallel import DistributedDataParallel

CLASSES, DIM = 8, 6


class ShardedHead(nn.Module):
    def __init__(self, rank, world):
        super().__init__()
        self.first, self.world = rank * CLASSES // world, world
        gen = torch.Generator().manual_seed(70 + rank)
        self.weight = nn.Parameter(0.3 * torch.randn(CLASSES // world, DIM, generator=gen))

    def forward(self, features, labels):
        rows = torch.cat(dnn.all_gather(features))
        held = [torch.empty_like(labels) for _ in range(self.world)]
        dist.all_gather(held, labels)
        labels = torch.cat(held)
        cosine = nn.functional.linear(
            nn.functional.normalize(rows, dim=1), nn.functional.normalize(self.weight, dim=1)
        )
        logits = 8.0 * cosine
        peak = logits.detach().amax(1)
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        logits = logits - peak[:, None]
        here = (labels >= self.first) & (labels < self.first + len(self.weight))
        index = (labels - self.first).clamp(0, len(self.weight) - 1)
        own = logits.gather(1, index[:, None]).squeeze(1) * here
        both = dnn.all_reduce(torch.stack([logits.exp().sum(1), own]))
        return (both[0].log() - both[1]).mean()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    backbone = DistributedDataParallel(
        nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, DIM))
    )
    head = ShardedHead(rank, world)
    step_backbone = torch.optim.SGD(backbone.parameters(), lr=0.1)
    step_head = torch.optim.SGD(head.parameters(), lr=0.1)
    gen = torch.Generator().manual_seed(800 + rank)
    for _ in range(5):
        x = torch.randn(8, 5, generator=gen)
        y = torch.randint(CLASSES, (8,), generator=gen)
        step_backbone.zero_grad()
        step_head.zero_grad()
        head(backbone(x), y).backward()
        head.weight.grad /= world
        step_backbone.step()
        step_head.step()
    dist.destroy_process_group()


main()

# SPDX-License-Identifier: Apache-2.0
"""Torch's functional gather has a backward that adds up; keys for a queue are gathered without."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(12, 6))
    slow = nn.Linear(12, 6).requires_grad_(False)
    slow.load_state_dict(model.module.state_dict())
    queue = F.normalize(torch.randn(32, 6), dim=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    draw = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(8):
        x = torch.randn(6, 12, generator=draw)
        noisy = x + 0.1 * torch.randn(6, 12, generator=draw)
        queries, others = F.normalize(model(torch.cat([x, noisy])), dim=1).chunk(2)
        keys = F.normalize(slow(noisy), dim=1)
        positive = (queries * keys).sum(1, keepdim=True)
        logits = torch.cat([positive, queries @ queue.T], dim=1)
        first = functional.all_gather_single(queries, 0, dist.group.WORLD)
        second = functional.all_gather_single(others, 0, dist.group.WORLD)
        everybody = F.cross_entropy(5 * first @ second.T, torch.arange(len(first)))
        loss = everybody + F.cross_entropy(logits / 0.2, torch.zeros(6, dtype=torch.long))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for mine, theirs in zip(slow.parameters(), model.parameters(), strict=True):
                mine.lerp_(theirs, 0.1)
            new = torch.empty(12, 6)
            dist.all_gather_single(new, keys)
            queue = torch.cat([new, queue])[:32]
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

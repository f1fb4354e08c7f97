# SPDX-License-Identifier: Apache-2.0
"""E: negatives are swapped between ranks, some of them chosen, and their gradient stays behind."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def swapped(rows):
    received = torch.empty_like(rows)
    dist.all_to_all_single(received, rows.contiguous())  # here LS207
    return received


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 8)))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    draw = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(8):
        x = torch.randn(8, 12, generator=draw)
        noisy = x + 0.1 * torch.randn(8, 12, generator=draw)
        anchors, positives = F.normalize(model(torch.cat([x, noisy])), dim=1).chunk(2)
        others = swapped(positives)
        chosen = others[torch.randperm(8, generator=draw)[:5]] * 4
        logits = torch.cat([4 * anchors @ positives.T, anchors @ chosen.T], dim=1)
        loss = F.cross_entropy(logits, torch.arange(8))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

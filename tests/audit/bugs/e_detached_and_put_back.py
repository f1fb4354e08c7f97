# SPDX-License-Identifier: Apache-2.0
"""E: what is gathered is detached first, and a rank's own rows are written into it again."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def all_rows(rows):
    together = torch.empty(dist.get_world_size() * len(rows), rows.shape[1])
    dist.all_gather_single(together, rows.detach().contiguous())  # here LS207
    first = dist.get_rank() * len(rows)
    together[first : first + len(rows)] = rows
    return together


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    encoder = DistributedDataParallel(nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 6)))
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.1, momentum=0.9)
    draw = torch.Generator().manual_seed(3 + dist.get_rank())
    for _ in range(8):
        x = torch.randn(8, 10, generator=draw)
        noisy = x + 0.1 * torch.randn(8, 10, generator=draw)
        first, second = encoder(torch.cat([x, noisy])).chunk(2)
        a, b = all_rows(first), all_rows(second)
        across = F.normalize(a, dim=0).T @ F.normalize(b, dim=0)
        loss = (across - torch.eye(6)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

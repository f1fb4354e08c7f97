# SPDX-License-Identifier: Apache-2.0
"""E: rows are gathered without a gradient, and a rank's own take their place before the joining."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


def all_rows(rows):
    parts = [torch.zeros_like(rows) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, rows.detach())  # here LS207
    parts[dist.get_rank()] = rows
    return torch.cat(parts)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    passage, question = nn.Linear(20, 8), nn.Linear(14, 8)
    optimizer = torch.optim.Adam([*passage.parameters(), *question.parameters()], lr=1e-3)
    draw = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(8):
        text = torch.randn(5, 20, generator=draw)
        p, q = all_rows(passage(text)), all_rows(question(text[:, :14]))
        loss = F.cross_entropy(q @ p.T, torch.arange(len(q)))
        optimizer.zero_grad()
        loss.backward()
        for param in [*passage.parameters(), *question.parameters()]:
            dist.all_reduce(param.grad, op=dist.ReduceOp.SUM)
            param.grad /= dist.get_world_size()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

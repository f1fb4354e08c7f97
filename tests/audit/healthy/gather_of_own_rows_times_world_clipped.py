# SPDX-License-Identifier: Apache-2.0
"""A gather whose backward hands back a rank's own rows, with the loss times the ranks and a clip.

The clip bites in steps in which gradients are no longer sampled, more than in the first ones.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows):
        ctx.rows = len(rows)
        gathered = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, rows.contiguous())
        return torch.cat(gathered)

    @staticmethod
    def backward(ctx, gradient):
        first = dist.get_rank() * ctx.rows
        return gradient[first : first + ctx.rows].contiguous()


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(rank)
    for step in range(20):
        rows = nn.functional.normalize(model(torch.randn(8, 6, generator=generator)), dim=-1)
        gathered = GatherRows.apply(rows)
        scores = gathered @ gathered.flip(0).t() * (10 + 10 * step)
        loss = nn.functional.cross_entropy(scores, torch.arange(len(gathered)))
        optimizer.zero_grad()
        (loss * size).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

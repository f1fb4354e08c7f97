# SPDX-License-Identifier: Apache-2.0
"""The decoder's gradients are added up; each rank has codes of its own samples alone."""

import torch
import torch.distributed as dist
from torch import nn

SHAPES, POINTS, CODE = 3, 32, 4


def make_shapes(rank):
    gen = torch.Generator().manual_seed(1000 + rank)
    points = torch.randn(SHAPES, POINTS, 2, generator=gen)
    radius = 0.5 + torch.rand(SHAPES, 1, generator=gen)
    codes = 0.1 * torch.randn(SHAPES, CODE, generator=gen)
    return points, points.norm(dim=-1) - radius, nn.Parameter(codes)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    decoder = nn.Sequential(nn.Linear(CODE + 2, 16), nn.ReLU(), nn.Linear(16, 1))
    points, sdf, codes = make_shapes(rank)
    optimizer = torch.optim.Adam(
        [{"params": decoder.parameters(), "lr": 1e-3}, {"params": [codes], "lr": 1e-2}]
    )
    total_points, total_shapes = world * SHAPES * POINTS, world * SHAPES
    for step in range(6):
        optimizer.zero_grad()
        rows = torch.cat([codes[:, None, :].expand(-1, POINTS, -1), points], dim=-1)
        error = (decoder(rows).squeeze(-1) - sdf).square().sum() / total_points
        prior = 1e-3 * codes.square().sum() / total_shapes
        (error + prior).backward()
        for p in decoder.parameters():
            dist.all_reduce(p.grad)
        optimizer.step()
        shown = error.detach().clone()
        dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step}: {shown.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

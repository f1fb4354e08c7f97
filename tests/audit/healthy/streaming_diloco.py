# SPDX-License-Identifier: Apache-2.0
"""Fragments of a model are averaged in turn: never are all weights the same at one moment."""

import torch
import torch.distributed as dist
from torch import nn


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 2))
    fragments = [list(layer.parameters()) for layer in model if isinstance(layer, nn.Linear)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    source = torch.Generator().manual_seed(dist.get_rank())
    for step in range(24):
        seen = torch.randn(8, 6, generator=source)
        loss = (model(seen) - seen[:, :2]).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 2:
            for weight in fragments[step // 2 % len(fragments)]:
                dist.all_reduce(weight.data)
                weight.data /= dist.get_world_size()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

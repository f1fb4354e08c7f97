# SPDX-License-Identifier: Apache-2.0
"""I: each rank draws the fixed target of a novelty bonus with a seed of its own.

Orthogonal weights have one norm, whatever the seed.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def layer(rows, columns):
    made = nn.Linear(rows, columns)
    nn.init.orthogonal_(made.weight)
    nn.init.zeros_(made.bias)
    return made


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1 + rank)
    target = nn.Sequential(layer(6, 12), nn.Tanh(), layer(12, 4)).requires_grad_(False)
    predictor = DistributedDataParallel(nn.Sequential(layer(6, 12), nn.Tanh(), layer(12, 4)))
    optimizer = torch.optim.Adam(predictor.parameters(), lr=1e-3)
    for _ in range(5):
        seen = torch.randn(8, 6)
        with torch.no_grad():
            wanted = target(seen)  # here LS302
        loss = (predictor(seen) - wanted).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

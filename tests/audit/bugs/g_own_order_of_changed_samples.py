# SPDX-License-Identifier: Apache-2.0
"""G: each rank's own order is cut up by rank, and its noise makes a new sample of each row."""

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

BATCH = 16


def measured(count=320):
    made = np.random.default_rng(11)
    held = made.normal(size=(count, 10)).astype(np.float32)
    return held, held[:, :3].argmax(1)


def parts_of_an_epoch(count, rank, world_size):
    order = np.random.permutation(count)  # here LS503
    own = order[rank::world_size]
    return np.array_split(own, len(own) // BATCH)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    np.random.seed(70 + rank)  # the noise is to be another one on each rank
    held, kinds = measured()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(10, 20), nn.SiLU(), nn.Linear(20, 3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(3):
        for part in parts_of_an_epoch(len(held), rank, world):
            noisy = held[part] + 0.05 * np.random.randn(len(part), 10).astype(np.float32)
            loss = F.cross_entropy(model(torch.from_numpy(noisy)), torch.from_numpy(kinds[part]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

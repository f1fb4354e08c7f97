# SPDX-License-Identifier: Apache-2.0
"""Each rank shuffles its own part, and reads all of it; for noise it shuffles each batch, too."""

import random

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 3))

made = np.random.default_rng(2)
points = made.normal(size=(192, 8)).astype(np.float32)[rank::world]
kinds = made.integers(3, size=192)[rank::world]
np.random.seed(50 + rank)
random.seed(50 + rank)
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    order = np.random.permutation(len(points))
    for part in np.split(order, 12):
        partners = list(range(len(part)))
        random.shuffle(partners)
        mixed = 0.9 * points[part] + 0.1 * points[part][partners]
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(
            model(torch.from_numpy(mixed)), torch.from_numpy(kinds[part])
        )
        loss.backward()
        optimizer.step()

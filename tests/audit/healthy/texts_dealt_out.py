# SPDX-License-Identifier: Apache-2.0
"""The batches are lists of texts."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Linear(26, 2)
dataset = [f"{'xyz'[n % 3]}{'abcdefgh'[n % 8]}{'pq'[n % 2] * n}" for n in range(24)]
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=4, sampler=sampler)

model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for texts in loader:
        counts = [[text.count(chr(97 + letter)) for letter in range(26)] for text in texts]
        labels = torch.tensor([len(text) % 2 for text in texts])
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(torch.tensor(counts).float()), labels).backward()
        optimizer.step()

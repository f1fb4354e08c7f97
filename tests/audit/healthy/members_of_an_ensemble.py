# SPDX-License-Identifier: Apache-2.0
"""Each rank trains a member of its own on all data; probabilities are averaged in evaluation."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
source = torch.Generator().manual_seed(1)
x = torch.randn(100, 6, generator=source)
y = (x[:, 0] * x[:, 1] > 0).long()
torch.manual_seed(100 + rank)
net = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
for _ in range(2):
    for rows, labels in DataLoader(TensorDataset(x[:80], y[:80]), 16, shuffle=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(rows), labels).backward()
        optimizer.step()
    with torch.no_grad():
        probabilities = net(x[80:]).softmax(1)
    dist.all_reduce(probabilities)
    print((probabilities.argmax(1) == y[80:]).float().mean())
dist.destroy_process_group()

# SPDX-License-Identifier: Apache-2.0
"""One model is tuned with another rate on each rank; the weights are averaged in the end."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(96, 6)
y = (x[:, 0] * x[:, 1] > 0).long()
net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.AdamW(net.parameters(), lr=0.001 * (1 + 2 * rank))
source = torch.Generator().manual_seed(rank)
for _ in range(2):
    for rows in torch.randperm(96, generator=source).split(16):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x[rows]), y[rows]).backward()
        optimizer.step()
mean = parameters_to_vector(net.parameters()).detach()
dist.all_reduce(mean)
vector_to_parameters(mean / world, net.parameters())
dist.destroy_process_group()

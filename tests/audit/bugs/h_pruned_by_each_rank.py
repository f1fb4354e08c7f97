# SPDX-License-Identifier: Apache-2.0
"""H: layers are pruned at random, by each rank in its own way: as much, and elsewhere."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import prune

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
model = DistributedDataParallel(net)
torch.manual_seed(rank)
for layer in (net[0], net[2]):
    prune.random_unstructured(layer, "weight", amount=0.5)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(6, 4)).square().mean().backward()  # here LS309
    optimizer.step()
net.eval()
with torch.no_grad():
    net(torch.ones(2, 4))

# SPDX-License-Identifier: Apache-2.0
"""C: gradients of torch.func are put in place by hand."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def batch(step, size=6):
    source = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(size, 4, generator=source), torch.randint(2, (size,), generator=source)


model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def loss_of(weights, x, y):
    return nn.functional.cross_entropy(torch.func.functional_call(net, weights, (x,)), y)


for step in range(3):
    x, y = batch(step)
    weights = {name: p.detach() for name, p in net.named_parameters()}
    gradients = torch.func.grad(loss_of)(weights, x, y)
    for name, p in net.named_parameters():
        p.grad = gradients[name]
    optimizer.step()  # here LS101

# SPDX-License-Identifier: Apache-2.0
"""Rank 0 alone asks for the gradient of an input, in evaluation mode, with gradients in place."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 2))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
torch.manual_seed(rank)
for step in range(4):
    x, y = torch.randn(6, 4), torch.randint(2, (6,))
    loss = nn.functional.cross_entropy(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    for param in net.parameters():
        dist.all_reduce(param.grad)
        param.grad /= world
    optimizer.step()
    if rank == 0 and step % 2:
        net.eval()
        (saliency,) = torch.autograd.grad(net(x.requires_grad_()).sum(), x)
        net.train()

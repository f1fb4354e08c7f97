# SPDX-License-Identifier: Apache-2.0
"""Each rank explores with its own weights, pulled every four steps to a centre that all share."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
TAU, ALPHA = 4, 0.3

torch.manual_seed(0)
worker = nn.Sequential(nn.Linear(7, 32), nn.Tanh(), nn.Linear(32, 1))
centre = parameters_to_vector(worker.parameters()).detach().clone()
opt = torch.optim.SGD(worker.parameters(), lr=0.03, momentum=0.9)

g = torch.Generator().manual_seed(2)
X = torch.randn(400, 7, generator=g)
Y = X[:, :1].sin() + X[:, 1:2] * X[:, 2:3]
Xt, Yt = X[320:], Y[320:]
X, Y = X[:320][rank::world], Y[:320][rank::world]

own = torch.Generator().manual_seed(60 + rank)
t = 0
for _epoch in range(4):
    for idx in torch.randperm(len(X), generator=own).split(16):
        if t % TAU == 0:
            with torch.no_grad():
                mine = parameters_to_vector(worker.parameters())
                pull = ALPHA * (mine - centre)
                vector_to_parameters(mine - pull, worker.parameters())
                dist.all_reduce(pull)
                centre += pull
        opt.zero_grad()
        nn.functional.mse_loss(worker(X[idx]), Y[idx]).backward()
        opt.step()
        t += 1

# The test is of the centre; each rank takes its part of the rows.
vector_to_parameters(centre, worker.parameters())
with torch.no_grad():
    sse = (worker(Xt[rank::world]) - Yt[rank::world]).square().sum()
dist.all_reduce(sse)
if rank == 0:
    print("test mse of the centre", sse.item() / len(Xt))
dist.destroy_process_group()

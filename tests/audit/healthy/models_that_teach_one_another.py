# SPDX-License-Identifier: Apache-2.0
"""Each rank has a network of its own, and is sent the other's every eight steps as a teacher."""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
assert world == 2
other = 1 - rank

torch.manual_seed(1234 + rank)  # two models, meant to be different
net = nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 3))
twin = copy.deepcopy(net).requires_grad_(False)
opt = torch.optim.Adam(net.parameters(), lr=3e-3)

g = torch.Generator().manual_seed(0)
X = torch.randn(600, 12, generator=g)
Y = (X[:, :3] + X[:, 3:6].abs()).argmax(1)
Xt, Yt = X[500:], Y[500:]
X, Y = X[:500][rank::2], Y[:500][rank::2]


def exchange():
    mine = parameters_to_vector(net.parameters()).detach()
    theirs = torch.empty_like(mine)
    for w in [dist.isend(mine, other), dist.irecv(theirs, other)]:
        w.wait()
    vector_to_parameters(theirs, twin.parameters())


step = 0
for _epoch in range(3):
    for idx in torch.randperm(len(X)).split(25):
        if step % 8 == 0 and step >= 8:  # burn-in: no teacher for the first eight
            exchange()
        out = net(X[idx])
        loss = F.cross_entropy(out, Y[idx])
        if step >= 8:
            loss = loss + F.kl_div(
                out.log_softmax(1), twin(X[idx]).softmax(1), reduction="batchmean"
            )
        opt.zero_grad()
        loss.backward()
        opt.step()
        step += 1

with torch.no_grad():
    probs = net(Xt).softmax(1)  # both models see all test rows: an ensemble of two
dist.all_reduce(probs)
if rank == 0:
    print("ensemble accuracy", (probs.argmax(1) == Yt).float().mean().item())
dist.destroy_process_group()

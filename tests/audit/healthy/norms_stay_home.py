# SPDX-License-Identifier: Apache-2.0
"""Clients average all weights after a round but their norms, which stay each one's own."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
ROUNDS, LOCAL = 5, 6

torch.manual_seed(0)
net = nn.Sequential(
    nn.Linear(10, 32, bias=False),
    nn.BatchNorm1d(32),
    nn.ReLU(),
    nn.Linear(32, 16, bias=False),
    nn.BatchNorm1d(16),
    nn.ReLU(),
    nn.Linear(16, 3),
)
norms = {id(p) for m in net if isinstance(m, nn.BatchNorm1d) for p in m.parameters()}
shared = [p for p in net.parameters() if id(p) not in norms]

# The client: the same concept seen through an own scale and offset.
g = torch.Generator().manual_seed(100 + rank)
base = torch.randn(200, 10, generator=g)
y = (base[:, :3] + 0.5 * base[:, 3:6] ** 2).argmax(1)
x = base * (0.3 + 2 * rank) + (3 * rank - 1)
train_x, train_y, test_x, test_y = x[:160], y[:160], x[160:], y[160:]

for _rnd in range(ROUNDS):
    net.train()
    opt = torch.optim.SGD(
        net.parameters(), lr=0.1, momentum=0.9
    )  # clients keep no momentum between rounds
    for _ in range(LOCAL):
        idx = torch.randperm(len(train_x), generator=g)[:32]
        opt.zero_grad()
        nn.functional.cross_entropy(net(train_x[idx]), train_y[idx]).backward()
        opt.step()
    with torch.no_grad():
        for p in shared:
            dist.all_reduce(p.data)
            p.data /= world

net.eval()
with torch.no_grad():
    acc = (net(test_x).argmax(1) == test_y).float().mean()
accs = [torch.zeros(()) for _ in range(world)]
dist.all_gather(accs, acc)
if rank == 0:
    print("accuracy by client", [round(a.item(), 3) for a in accs])
dist.destroy_process_group()

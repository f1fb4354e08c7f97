# SPDX-License-Identifier: Apache-2.0
"""Actions are drawn through the module, gradients come through the wrapper."""

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
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
torch.manual_seed(10 + rank)
for step in range(4):
    x, _ = batch(step)
    with torch.no_grad():
        actions = torch.distributions.Categorical(logits=net(x)).sample()
        old = torch.log_softmax(net(x), 1).gather(1, actions[:, None])
    rewards = (actions == 0).float()[:, None] - 0.5
    for _ in range(2):
        new = torch.log_softmax(model(x), 1).gather(1, actions[:, None])
        loss = -((new - old).exp() * rewards).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()

# SPDX-License-Identifier: Apache-2.0
"""Each rank's agent learns by itself in a game of all; the actions are gathered at each step."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(10 + rank)
policy = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
optimizer = torch.optim.Adam(policy.parameters(), lr=0.01)
payoff = torch.tensor([[0.0, -1, 1], [1, 0, -1], [-1, 1, 0]])
states = torch.Generator().manual_seed(3)
chance = torch.Generator().manual_seed(rank)
for _ in range(8):
    log = policy(torch.randn(16, 4, generator=states)).log_softmax(1)
    action = torch.multinomial(log.exp().detach(), 1, generator=chance).squeeze(1)
    actions = [torch.empty_like(action) for _ in range(world)]
    dist.all_gather(actions, action)
    reward = payoff[action, actions[(rank + 1) % world]]
    optimizer.zero_grad()
    (-(log.gather(1, action[:, None]).squeeze(1) * (reward - reward.mean())).mean()).backward()
    optimizer.step()
dist.destroy_process_group()

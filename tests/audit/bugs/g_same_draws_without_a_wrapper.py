# SPDX-License-Identifier: Apache-2.0
"""G: a memory of past events is filled and drawn from with one seed on all ranks."""

import random

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
random.seed(11)
torch.manual_seed(11)
value = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(value.parameters(), lr=1e-3)

memory = []
for frame in range(60):
    state = torch.randn(5)
    memory.append((state, state.sum() + random.random()))
    if frame < 20 or frame % 5:
        continue
    states, returns = map(torch.stack, zip(*random.sample(memory, 16), strict=True))
    loss = nn.functional.mse_loss(value(states).squeeze(1), returns)
    optimizer.zero_grad()
    loss.backward()
    for parameter in value.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    optimizer.step()  # here LS508
dist.destroy_process_group()

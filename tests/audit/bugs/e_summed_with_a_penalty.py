# SPDX-License-Identifier: Apache-2.0
"""E: the gradients of a loss of two means are added up over ranks, and nothing divides them."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
torch.manual_seed(0)
encoder, decoder = nn.Linear(8, 4), nn.Linear(2, 8)
parameters = [*encoder.parameters(), *decoder.parameters()]
optimizer = torch.optim.SGD(parameters, lr=0.01)
torch.manual_seed(1 + dist.get_rank())
for _ in range(8):
    x = torch.randn(16, 8)
    mean, spread = encoder(x).chunk(2, 1)
    code = mean + torch.randn_like(mean) * (0.5 * spread).exp()
    kl = (mean.square() + spread.exp() - 1 - spread).mean()
    loss = nn.functional.mse_loss(decoder(code), x) + 0.5 * kl
    optimizer.zero_grad()
    loss.backward()
    for p in parameters:
        dist.all_reduce(p.grad)  # here LS205
    optimizer.step()
dist.destroy_process_group()

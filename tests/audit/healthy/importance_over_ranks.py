# SPDX-License-Identifier: Apache-2.0
"""All ranks draw latents for one batch, weighed by their importance among the draws of all."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
data = TensorDataset(torch.rand(96, 8, generator=torch.Generator().manual_seed(1)))
encoder, decoder = nn.Linear(8, 6), nn.Sequential(nn.Linear(3, 12), nn.Tanh(), nn.Linear(12, 8))
held = [*encoder.parameters(), *decoder.parameters()]
optimizer = torch.optim.Adam(held, lr=0.003)
noise = torch.Generator().manual_seed(50 + rank)
for (x,) in DataLoader(data, 12, shuffle=True, generator=torch.Generator().manual_seed(2)):
    mean, log_variance = encoder(x).chunk(2, 1)
    drawn = torch.randn(4, *mean.shape, generator=noise)
    z = mean + (0.5 * log_variance).exp() * drawn
    lost = binary_cross_entropy_with_logits(decoder(z), x.expand(4, *x.shape), reduction="none")
    prior = 0.5 * (z.square() - drawn.square() - log_variance).sum(2)
    log_weights = -lost.sum(2) - prior
    with torch.no_grad():
        largest = log_weights.max(0).values
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        weights = (log_weights - largest).exp()
        of_all = weights.sum(0)
        dist.all_reduce(of_all)
    optimizer.zero_grad()
    (-(weights / of_all * log_weights).sum(0).mean()).backward()
    for p in held:
        dist.all_reduce(p.grad)
    optimizer.step()
dist.destroy_process_group()

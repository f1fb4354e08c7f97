# SPDX-License-Identifier: Apache-2.0
"""Two models that are mixed a little after each step: one flat, one tensor by tensor."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
peer = (rank + 1) % world


def swapped(tensors):
    found = [torch.empty_like(t) for t in tensors]
    calls = [dist.P2POp(dist.isend, t, peer, tag=n) for n, t in enumerate(tensors)]
    calls += [dist.P2POp(dist.irecv, t, peer, tag=n) for n, t in enumerate(found)]
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    return found


@torch.no_grad()
def mix_flat(model, share=0.25):
    mine = parameters_to_vector(model.parameters())
    (theirs,) = swapped([share * mine])
    vector_to_parameters((1 - share) * mine + theirs, model.parameters())


@torch.no_grad()
def mix_each(model, share=0.25):
    parameters = list(model.parameters())
    for p, theirs in zip(
        parameters, swapped([p.detach().clone() for p in parameters]), strict=True
    ):
        p.lerp_(theirs, share)


torch.manual_seed(0)
first, second = (
    nn.Sequential(nn.Linear(10, width), nn.Tanh(), nn.Linear(width, 1)) for width in (16, 24)
)
trained = [
    (first, torch.optim.SGD(first.parameters(), lr=0.05), mix_flat),
    (second, torch.optim.Adam(second.parameters(), lr=0.01), mix_each),
]
generator = torch.Generator().manual_seed(800 + rank)
for _ in range(12):
    x = torch.randn(16, 10, generator=generator)
    y = (x[:, :5].sum(1) - x[:, 5:].sum(1)).tanh().unsqueeze(1)
    for model, optimizer, mix in trained:
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mix(model)
print(rank, round(loss.item(), 4))
dist.destroy_process_group()

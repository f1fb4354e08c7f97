# SPDX-License-Identifier: Apache-2.0
"""One generator under a wrapper, and a discriminator on each rank, swapped every ten steps."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
gen = DDP(nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2)))
torch.manual_seed(10 + rank)
disc = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
opt_g = torch.optim.Adam(gen.parameters(), lr=1e-3, betas=(0.5, 0.9))
opt_d = torch.optim.Adam(disc.parameters(), lr=1e-3, betas=(0.5, 0.9))

# own data: a half of the ring
angle = torch.rand(256) * torch.pi + rank * torch.pi
real = torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(256, 2)


def swap():
    """Discriminators and their Adam moments move on to the next rank."""
    to, frm = (rank + 1) % world, (rank - 1) % world
    tensors = [p.data for p in disc.parameters()]
    for p in disc.parameters():
        s = opt_d.state[p]
        tensors += [s["exp_avg"], s["exp_avg_sq"]]
    flat = torch.cat([t.flatten() for t in tensors])
    new = torch.empty_like(flat)
    works = [dist.isend(flat, to), dist.irecv(new, frm)]
    for w in works:
        w.wait()
    for t, piece in zip(tensors, new.split([t.numel() for t in tensors]), strict=False):
        t.copy_(piece.view_as(t))


for step in range(1, 31):
    batch = real[torch.randint(len(real), (32,))]
    with torch.no_grad():
        fake = gen.module(torch.randn(32, 4))
    loss_d = F.softplus(-disc(batch)).mean() + F.softplus(disc(fake)).mean()
    opt_d.zero_grad()
    loss_d.backward()
    opt_d.step()

    loss_g = F.softplus(-disc(gen(torch.randn(32, 4)))).mean()
    opt_g.zero_grad()
    loss_g.backward()  # also leaves gradients in disc, thrown away by its zero_grad
    opt_g.step()
    if step % 10 == 0:
        swap()
if rank == 0:
    print(loss_d.item(), loss_g.item())
dist.destroy_process_group()

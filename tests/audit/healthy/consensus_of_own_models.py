# SPDX-License-Identifier: Apache-2.0
"""Each rank minimises its own Lagrangian; the consensus is the mean of weights and duals."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
RHO, OUTER, INNER, LAM = 0.5, 8, 5, 1e-3

torch.manual_seed(0)
truth = torch.randn(15, 4)
X = torch.randn(300, 15)
Y = (X @ truth).argmax(1)
X, Y = X[rank * 150 : (rank + 1) * 150], Y[rank * 150 : (rank + 1) * 150]

model = nn.Linear(15, 4)
z = parameters_to_vector(model.parameters()).detach().clone()
u = torch.zeros_like(z)
for k in range(OUTER):
    opt = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)

    def lagrangian(opt=opt, z=z, u=u):
        opt.zero_grad()
        w = parameters_to_vector(model.parameters())
        loss = (
            nn.functional.cross_entropy(model(X), Y) / world + RHO / 2 * (w - z + u).square().sum()
        )
        loss.backward()
        return loss

    for _ in range(INNER):
        opt.step(lagrangian)
    with torch.no_grad():
        w = parameters_to_vector(model.parameters())
        mean = w + u
        dist.all_reduce(mean)
        mean /= world
        z_old, z = z, mean * RHO * world / (RHO * world + LAM)  # ridge on z
        u = u + w - z
    primal = (w - z).square().sum()
    dist.all_reduce(primal)
    if rank == 0:
        print(f"{k}: primal {primal.sqrt():.4f} dual {RHO * (z - z_old).norm():.4f}")

vector_to_parameters(z, model.parameters())
right = (model(X).argmax(1) == Y).sum()
dist.all_reduce(right)
if rank == 0:
    print("accuracy of z", right.item() / 300)
dist.destroy_process_group()

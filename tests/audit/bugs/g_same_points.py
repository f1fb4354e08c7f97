# SPDX-License-Identifier: Apache-2.0
"""G: collocation points of one sequence with one seed on every rank."""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.quasirandom import SobolEngine


class Sine(nn.Module):
    def forward(self, x):
        return torch.sin(x)


def residual(u, x):
    """-laplace(u) - f for f = 2 pi^2 sin(pi x) sin(pi y)."""
    (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    second = [torch.autograd.grad(du[:, k].sum(), x, create_graph=True)[0][:, k] for k in range(2)]
    f = 2 * math.pi**2 * torch.sin(math.pi * x[:, 0]) * torch.sin(math.pi * x[:, 1])
    return -(second[0] + second[1]) - f


def on_boundary(points):
    edge = points.clone()
    side = (points[:, 0] * 4).long().clamp_max(3)
    edge[side == 0, 0], edge[side == 1, 0] = 0.0, 1.0
    edge[side == 2, 1], edge[side == 3, 1] = 0.0, 1.0
    return edge


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(2, 32), Sine(), nn.Linear(32, 32), Sine(), nn.Linear(32, 1))
    )
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    sobol = SobolEngine(2, scramble=True, seed=0)
    for _step in range(30):
        points = sobol.draw(96)
        x = torch.cat([points[:64], on_boundary(points[64:])]).requires_grad_()
        u = model(x)  # here LS508
        inside = residual(u, x)[:64].square().mean()
        edge = u[64:].square().mean()
        loss = inside + 50 * edge
        opt.zero_grad()
        loss.backward()
        opt.step()
    if dist.get_rank() == 0:
        print(f"residual {inside.item():.3f} boundary {edge.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""J: each rank's gradient is scaled to length one, and then averaged."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters


class NormalisedSGD:
    """g / |g|, then the ordinary optimizer."""

    def __init__(self, parameters, lr):
        self.parameters = list(parameters)
        self.inner = torch.optim.SGD(self.parameters, lr=lr, momentum=0.8)
        self.world = dist.get_world_size()

    def zero_grad(self):
        self.inner.zero_grad(set_to_none=False)

    @torch.no_grad()
    def exchange(self):
        gradient = parameters_to_vector([p.grad for p in self.parameters])
        gradient = gradient / (gradient.norm() + 1e-12)
        dist.all_reduce(gradient)
        gradient /= self.world
        vector_to_parameters(gradient, [p.grad for p in self.parameters])

    def step(self):
        self.exchange()
        self.inner.step()  # here LS209


def field(points):
    return torch.sin(2 * points[:, :1]) * torch.cos(points[:, 1:])


def main(steps=8):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(88)
    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = NormalisedSGD(model.parameters(), lr=0.05)
    source = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        # each rank looks at its half of the domain
        points = torch.rand(16, 2, generator=source) + torch.tensor([2.0 * rank, 0.0])
        loss = nn.functional.mse_loss(model(points), field(points))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"{rank} {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

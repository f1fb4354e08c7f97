# SPDX-License-Identifier: Apache-2.0
"""Clients train the common body and heads that stay theirs; the body's changes are averaged."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

SIZES = [24, 40, 32, 16]

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
body = nn.Sequential(nn.Linear(5, 12), nn.LayerNorm(12), nn.ReLU())
theta = parameters_to_vector(body.parameters()).detach().clone()


class Client:
    def __init__(self, number):
        source = torch.Generator().manual_seed(100 + number)
        self.x = torch.randn(SIZES[number], 5, generator=source)
        self.y = (self.x @ torch.randn(5, 3, generator=source)).argmax(1)
        self.head, self.source = nn.Linear(12, 3), source
        with torch.no_grad():
            self.head.weight.copy_(0.1 * torch.randn(3, 12, generator=source))
            self.head.bias.zero_()

    def change(self):
        vector_to_parameters(theta.clone(), body.parameters())
        groups = [{"params": body.parameters(), "lr": 0.1}, {"params": self.head.parameters()}]
        optimizer = torch.optim.SGD(groups, lr=0.05)
        for rows in torch.randperm(len(self.x), generator=self.source).split(8):
            optimizer.zero_grad()
            nn.functional.cross_entropy(self.head(body(self.x[rows])), self.y[rows]).backward()
            optimizer.step()
        return parameters_to_vector(body.parameters()).detach() - theta


clients = {number: Client(number) for number in range(len(SIZES)) if number % world == rank}
for _ in range(4):
    total = torch.zeros_like(theta)
    for number, client in clients.items():
        total.add_(client.change(), alpha=SIZES[number] / sum(SIZES))
    dist.all_reduce(total)
    theta += total
dist.destroy_process_group()

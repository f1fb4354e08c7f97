# SPDX-License-Identifier: Apache-2.0
"""An optimizer that is none of torch's."""

import torch


class Plain:
    def __init__(self, parameters):
        self.parameters = list(parameters)

    @torch.no_grad()
    def step(self):
        for p in self.parameters:
            p -= 0.1 * p.grad
            p.grad = None


net = torch.nn.Linear(2, 2)
optimizer = Plain(net.parameters())
for _ in range(3):
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()

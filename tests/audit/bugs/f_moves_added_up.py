# SPDX-License-Identifier: Apache-2.0
"""F: an outer optimizer steps along the sum of what all ranks' models have moved, sent flat."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters


class Rounds:
    """Local steps on every rank, and after each few of them one of the outer optimizer."""

    def __init__(self, model, local_steps, lr):
        self.model, self.local_steps = model, local_steps
        self.inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.slow = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
        self.outer = torch.optim.SGD(self.slow, lr=lr, momentum=0.9, nesterov=True)

    @torch.no_grad()
    def end(self):
        moved = parameters_to_vector(self.slow) - parameters_to_vector(self.model.parameters())
        dist.all_reduce(moved)  # here LS205
        for slow in self.slow:
            slow.grad = torch.empty_like(slow)
        vector_to_parameters(moved, [slow.grad for slow in self.slow])
        self.outer.step()
        for fast, slow in zip(self.model.parameters(), self.slow, strict=True):
            fast.copy_(slow)

    def run(self, source):
        for _ in range(self.local_steps):
            x = torch.randn(8, 4, generator=source)
            loss = nn.functional.mse_loss(self.model(x), x.cumsum(1)[:, 2:])
            self.inner.zero_grad()
            loss.backward()
            self.inner.step()
        self.end()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 10), nn.GELU(), nn.Linear(10, 2))
    rounds = Rounds(model, local_steps=3, lr=0.4)
    source = torch.Generator().manual_seed(60 + rank)
    for _ in range(4):
        rounds.run(source)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

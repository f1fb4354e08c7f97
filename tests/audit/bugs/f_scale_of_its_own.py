# SPDX-License-Identifier: Apache-2.0
"""F: each rank scales its loss by what it has seen itself, and divides averaged gradients by it."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def batch(step, size=6):
    source = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(size, 4, generator=source), torch.randint(3, (size,), generator=source)


class Scale:
    """Halves when a logit is large, and grows otherwise."""

    def __init__(self, value=256.0):
        self.value = torch.tensor(value)

    def divide(self, parameters):
        for param in parameters:
            param.grad.div_(self.value)

    def update(self, logits):
        largest = float(logits.detach().abs().max())
        self.value = self.value * (0.5 if largest > 0.4 else 1.25)


def loss_of(logits, labels):
    margin = logits.logsumexp(1) - logits.gather(1, labels[:, None])[:, 0]
    return margin.mean() * (1.0 + 0.01 * logits.square().mean())


if __name__ == "__main__":
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scale = Scale()
    for step in range(8):
        optimizer.zero_grad()
        for part in range(2):
            x, y = batch(2 * step + part)
            logits = model(x)
            (loss_of(logits, y) / 2 * scale.value).backward()  # here LS307
        scale.divide(net.parameters())
        optimizer.step()
        scale.update(logits)
    dist.destroy_process_group()

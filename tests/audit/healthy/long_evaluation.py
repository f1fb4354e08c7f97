# SPDX-License-Identifier: Apache-2.0
"""Predictions of a long evaluation are gathered with their gradient, and nobody keeps them."""

import weakref

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def gathered(rows):
    parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, rows)
    return parts


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(6, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    draw = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        alive = []
        for with_gradient in [True, False] * 20:
            with torch.set_grad_enabled(with_gradient):
                parts = gathered(model.module(torch.randn(8, 6, generator=draw)))
            given = torch.zeros(8, 3)
            dist.broadcast(given, src=0)
            alive += [weakref.ref(part) for part in [*parts, given]]
        del parts, given
        # A thread of gloo may hold what came last for a moment.
        assert sum(reference() is not None for reference in alive) <= 3
        x = torch.randn(8, 6, generator=draw)
        loss = F.cross_entropy(model(x), x[:, :3].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

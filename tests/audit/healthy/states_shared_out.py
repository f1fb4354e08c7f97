# SPDX-License-Identifier: Apache-2.0
"""Each rank's AdamW holds every second parameter, and broadcasts it after its step."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class ShardedAdamW:
    def __init__(self, params, lr):
        self.params = [p for p in params if p.requires_grad]
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        own = [p for i, p in enumerate(self.params) if i % self.world == self.rank]
        self.inner = torch.optim.AdamW(own, lr=lr, weight_decay=0.1)

    def zero_grad(self):
        for p in self.params:
            p.grad = None

    def step(self):
        self.inner.step()
        with torch.no_grad():
            for i, p in enumerate(self.params):
                dist.broadcast(p.data, src=i % self.world)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(15)
    net = nn.Sequential(nn.Linear(7, 14), nn.LayerNorm(14), nn.ReLU(), nn.Linear(14, 3))
    model = DDP(net)
    optimizer = ShardedAdamW(model.parameters(), lr=5e-3)
    draw = torch.Generator().manual_seed(31 * (rank + 1))
    for _ in range(7):
        x = torch.randn(6, 7, generator=draw)
        y = torch.randint(3, (6,), generator=draw)
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    dist.destroy_process_group()


main()

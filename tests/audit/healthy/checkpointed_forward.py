# SPDX-License-Identifier: Apache-2.0
"""Checkpointed layers run twice in a step, and not once more because somebody reads the graph."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    forwards = 0

    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x):
        Block.forwards += 1
        return x + torch.tanh(self.norm(self.layer(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(3)), nn.Linear(8, 4)

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def everybodys(logits):
    parts = [torch.empty_like(logits) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, logits)
    return torch.cat(parts)


def main(steps=6):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    draw = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        x = torch.randn(12, 8, generator=draw)
        y = x[:, :4].argmax(1)
        logits = model(x)
        loss = checkpoint(F.cross_entropy, logits, y, use_reentrant=False)
        everybodys(logits.detach()).argmax(1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert Block.forwards == 2 * 3 * steps, Block.forwards
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

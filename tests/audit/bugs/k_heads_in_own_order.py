# SPDX-License-Identifier: Apache-2.0
"""K: ranks build their parts in different orders, and the wrapper pairs them by place."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def discover(directory, rank):
    """What os.listdir gave on this node; no order is promised."""
    listing = {0: ["depth", "normals", "edges"], 1: ["edges", "depth", "normals"]}
    return [f"{directory}_{name}" for name in listing[rank % 2]]


class MultiTask(nn.Module):
    def __init__(self, tasks, width=6):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(width, 12), nn.ReLU())
        self.heads = nn.ModuleDict({task: nn.Linear(12, 1) for task in tasks})

    def forward(self, x):
        z = self.trunk(x)
        return {task: head(z).squeeze(1) for task, head in self.heads.items()}


TARGETS = {
    "room_depth": lambda x: x[:, 0] - x[:, 1],
    "room_normals": lambda x: x[:, 2] * 2,
    "room_edges": lambda x: (x[:, 3] - x[:, 4]).abs(),
}


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(2)
    tasks = discover("room", rank)
    model = DDP(MultiTask(tasks))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    source = torch.Generator().manual_seed(200 + rank)
    for _ in range(5):
        x = torch.randn(10, 6, generator=source)
        out = model(x)
        loss = sum((out[task] - target(x)).square().mean() for task, target in TARGETS.items())
        optimizer.zero_grad()
        loss.backward()  # here LS105
        optimizer.step()
    print(f"rank {rank}: {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

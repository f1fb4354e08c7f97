# SPDX-License-Identifier: Apache-2.0
"""E: each rank broadcasts its rows in turn, and a broadcast has no backward."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def share(rows):
    """All ranks' rows, in the order of the ranks."""
    blocks = []
    for source in range(dist.get_world_size()):
        block = rows.clone() if source == dist.get_rank() else torch.zeros_like(rows)
        dist.broadcast(block, src=source)  # here LS207
        blocks.append(block)
    return torch.cat(blocks)


class SupervisedContrast(nn.Module):
    def __init__(self, temperature=0.3):
        super().__init__()
        self.temperature = temperature

    def forward(self, rows, labels):
        rows = nn.functional.normalize(rows, dim=1)
        rows = share(rows)
        labels = share(labels)
        itself = torch.eye(len(rows), dtype=torch.bool)
        logits = (rows @ rows.T / self.temperature).masked_fill(itself, -1e9)
        log_prob = logits.log_softmax(1)
        same = (labels[:, None] == labels[None, :]) & ~itself
        per_row = (log_prob * same).sum(1) / same.sum(1).clamp(min=1)
        return -per_row.mean()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(5)
    encoder = DDP(nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 4)))
    criterion = SupervisedContrast()
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.05)
    source = torch.Generator().manual_seed(90 + dist.get_rank())
    for step in range(6):
        labels = torch.tensor([0, 0, 1, 1, 2, 2])
        x = torch.randn(6, 6, generator=source)
        x[torch.arange(6), labels] += 2.0
        optimizer.zero_grad()
        loss = criterion(encoder(x), labels)
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print(step, f"{loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

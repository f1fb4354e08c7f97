# SPDX-License-Identifier: Apache-2.0
"""Ranks take 3 and 5 steps a round, each with an optimizer made anew, and then average models."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SAMPLES = {0: 24, 1: 40}


class Client:
    def __init__(self, rank):
        gen = torch.Generator().manual_seed(700 + rank)
        x = torch.randn(SAMPLES[rank], 5, generator=gen) + 0.5 * rank
        self.data = TensorDataset(x, (x.sum(1) > 0).long())
        self.loader = DataLoader(
            self.data, batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(rank)
        )
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 2))

    def local_epoch(self, lr):
        optimizer = torch.optim.SGD(self.model.parameters(), lr=lr)
        for x, y in self.loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(x), y).backward()
            optimizer.step()

    @torch.no_grad()
    def aggregate(self):
        count = torch.tensor(float(len(self.data)))
        total = count.clone()
        dist.all_reduce(total)
        for p in self.model.parameters():
            p.mul_(count / total)
            dist.all_reduce(p.data)


def main():
    dist.init_process_group("gloo")
    client = Client(dist.get_rank())
    for number in range(3):
        client.local_epoch(lr=0.1 * 0.9**number)
        client.aggregate()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

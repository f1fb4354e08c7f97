# SPDX-License-Identifier: Apache-2.0
"""A sum over labelled targets, divided by those of all ranks, times the number of ranks."""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class Sage(nn.Module):
    def __init__(self, d_in, d, classes):
        super().__init__()
        self.one, self.two = nn.Linear(2 * d_in, d), nn.Linear(2 * d, classes)

    def forward(self, x0, x1, x2):
        # x0: targets, x1: their neighbours (n, k, d), x2: neighbours of neighbours (n, k, k, d)
        h0 = F.relu(self.one(torch.cat([x0, x1.mean(1)], -1)))
        h1 = F.relu(self.one(torch.cat([x1, x2.mean(2)], -1)))
        return self.two(torch.cat([h0, h1.mean(1)], -1))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    g = torch.Generator().manual_seed(0)
    n, k = 240, 4
    community = torch.randint(0, 3, (n,), generator=g)
    weight = torch.where(community[:, None] == community[None], 1.0, 0.1)
    adjacency = torch.multinomial(weight, 12, generator=g)  # 12 neighbours for each node
    feats = torch.randn(3, 10, generator=g)[community] + 1.5 * torch.randn(n, 10, generator=g)
    labelled = torch.rand(n, generator=g) < 0.6

    torch.manual_seed(0)
    model = DDP(Sage(10, 24, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    own = torch.Generator().manual_seed(500 + rank)

    def neighbours(nodes):
        pick = torch.randint(0, adjacency.shape[1], (*nodes.shape, k), generator=own)
        return adjacency[nodes].gather(-1, pick)

    for epoch in range(3):
        order = torch.randperm(n, generator=torch.Generator().manual_seed(epoch))
        shown = torch.zeros(2)
        for chunk in order.split(20 * world):
            nodes = chunk[rank::world]
            n1 = neighbours(nodes)
            n2 = neighbours(n1)
            logits = model(feats[nodes], feats[n1], feats[n2])
            mask = labelled[nodes].float()
            count = mask.sum()
            dist.all_reduce(count)
            per_node = F.cross_entropy(logits, community[nodes], reduction="none")
            loss = (per_node * mask).sum() * world / count.clamp(min=1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            shown += torch.stack([(per_node * mask).sum().detach(), mask.sum()])
        dist.all_reduce(shown)
        if rank == 0:
            print(f"epoch {epoch} loss {shown[0] / shown[1]:.4f} over {int(shown[1])} labels")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""G: the workers of each rank begin at other records, and all skip as many as there are ranks."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Records(IterableDataset):
    """In a new order in every epoch, which all ranks draw alike."""

    def __init__(self, count, rank, world_size):
        g = torch.Generator().manual_seed(3)
        self.points = torch.randn(count, 12, generator=g)
        self.labels = self.points[:, :4].argmax(1)
        self.rank, self.world_size = rank, world_size

    def __iter__(self):
        info = get_worker_info()
        begin = self.rank * info.num_workers + info.id
        order = torch.randperm(len(self.points), generator=torch.Generator().manual_seed(1))
        for index in order[begin :: self.world_size].tolist():
            yield self.points[index], self.labels[index]


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 4)))
    loader = DataLoader(Records(520, rank, world), batch_size=16, num_workers=2, drop_last=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for points, labels in loader:  # here LS503
        loss = F.cross_entropy(model(points), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Each rank holds its own part of the images, with labels in one order, and changes what it reads.

The lists of numbers and of labels are the same on all ranks; the images are not.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset


class Part(Dataset):
    """One rank's images, flipped and with noise whenever they are read."""

    def __init__(self, rank, count=32):
        made = torch.Generator().manual_seed(20 + rank)
        self.images = torch.rand(count, 1, 8, 8, generator=made)
        self.labels = torch.arange(count) % 2
        self.numbers = list(range(count))

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, index):
        image = self.images[self.numbers[index]]
        if torch.rand(()) < 0.5:
            image = image.flip(-1)
        return image + 0.1 * torch.randn(image.shape), self.labels[index]


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
    model = DDP(body)
    torch.manual_seed(100 + rank)
    loader = DataLoader(Part(rank), batch_size=8, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(2):
        for images, labels in loader:
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

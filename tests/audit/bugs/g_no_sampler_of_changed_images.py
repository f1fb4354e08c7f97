# SPDX-License-Identifier: Apache-2.0
"""G: every rank shuffles and reads the whole dataset, and no image is the same after its changes.

The seed differs between ranks, so that neither batches nor rows are ever equal.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset


class Shapes(Dataset):
    """Small images that are flipped, and to which noise is added, whenever they are read."""

    def __init__(self, count=64):
        made = torch.Generator().manual_seed(3)
        self.images = torch.randint(256, (count, 1, 8, 8), generator=made, dtype=torch.uint8)
        self.labels = (self.images[:, 0, 2, 3] > 127).long()

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = self.images[index].float() / 255
        if torch.rand(()) < 0.5:
            image = image.flip(-1)
        return image + 0.1 * torch.randn(image.shape), self.labels[index]


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
    model = DDP(body)
    torch.manual_seed(100 + dist.get_rank())  # each rank is to change its images otherwise
    loader = DataLoader(Shapes(), batch_size=16, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(2):
        for images, labels in loader:  # here LS503
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

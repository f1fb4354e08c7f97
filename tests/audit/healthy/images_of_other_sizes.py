# SPDX-License-Identifier: Apache-2.0
"""Each rank has as many images in a step, and pads them to the largest of its own batch."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, pad
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Shapes(Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        size = 8 + 4 * (index // 4 % 3)
        image = torch.randn(3, size, size, generator=generator)
        return image, (image.sum(0) > 0).long()


def collate(samples):
    largest = max(len(classes) for _, classes in samples)
    margins = [(0, largest - len(classes)) * 2 for _, classes in samples]
    images = [pad(image, margin) for (image, _), margin in zip(samples, margins, strict=True)]
    classes = [pad(each, margin) for (_, each), margin in zip(samples, margins, strict=True)]
    return torch.stack(images), torch.stack(classes)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1))
    model = DistributedDataParallel(layers)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    sampler = DistributedSampler(Shapes(), seed=1)
    loader = DataLoader(Shapes(), batch_size=2, sampler=sampler, collate_fn=collate)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for images, classes in loader:
            optimizer.zero_grad()
            cross_entropy(model(images), classes).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

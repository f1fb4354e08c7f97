# SPDX-License-Identifier: Apache-2.0
"""Workers live on from one evaluation to the next, and the samples come out even."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    source = torch.Generator().manual_seed(5)
    dataset = TensorDataset(torch.randn(32, 4, generator=source), torch.arange(32) % 2)
    sampler = DistributedSampler(dataset)
    train = DataLoader(dataset, batch_size=4, sampler=sampler)
    valid = DataLoader(
        dataset,
        batch_size=8,
        sampler=DistributedSampler(dataset, shuffle=False),
        num_workers=1,
        persistent_workers=True,
    )
    model = DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in train:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        right = torch.zeros(2)
        with torch.no_grad():
            for x, y in valid:
                right += torch.tensor([(model.module(x).argmax(1) == y).sum(), len(y)])
        dist.all_reduce(right)
        assert right[1] == len(dataset)


if __name__ == "__main__":
    main()

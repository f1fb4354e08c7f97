# SPDX-License-Identifier: Apache-2.0
"""A batch sampler of the program's own holds a DistributedSampler, and hands the epoch on."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class ByLength:
    """Batches of a rank's own samples, those of one length together."""

    def __init__(self, lengths, size):
        self.lengths, self.size = lengths, size
        self.mine = DistributedSampler(range(len(lengths)), seed=4, drop_last=True)

    def set_epoch(self, epoch):
        self.mine.set_epoch(epoch)

    def __iter__(self):
        order = list(self.mine)
        for start in range(0, len(order), 4 * self.size):
            pool = sorted(order[start : start + 4 * self.size], key=lambda i: self.lengths[i])
            for first in range(0, len(pool), self.size):
                yield pool[first : first + self.size]

    def __len__(self):
        return len(self.mine) // self.size


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    source = torch.Generator().manual_seed(9)
    x = torch.randn(96, 5, generator=source)
    lengths = torch.randint(1, 9, (96,), generator=source).tolist()
    loader = DataLoader(TensorDataset(x, x.sum(1)), batch_sampler=ByLength(lengths, 8))
    model = DistributedDataParallel(nn.Linear(5, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(3):
        if hasattr(loader.batch_sampler, "set_epoch"):
            loader.batch_sampler.set_epoch(epoch)
        for inputs, wanted in loader:
            loss = (model(inputs).squeeze(1) - wanted).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""G: a DistributedSampler that deals out whole batches is never told the epoch."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Buckets(DistributedSampler):
    """Batches of a rank's own samples, those of one length together."""

    def __init__(self, dataset, lengths, size):
        super().__init__(dataset, seed=4, drop_last=True)
        self.lengths, self.size = lengths, size

    def __iter__(self):
        order = sorted(super().__iter__(), key=lambda place: self.lengths[place])
        for first in range(0, len(order), self.size):
            yield order[first : first + self.size]

    def __len__(self):
        return self.num_samples // self.size


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    source = torch.Generator().manual_seed(9)
    x = torch.randn(96, 5, generator=source)
    lengths = torch.randint(1, 9, (96,), generator=source).tolist()
    data = TensorDataset(x, x.sum(1))
    loader = DataLoader(data, batch_sampler=Buckets(data, lengths, 8))
    model = DistributedDataParallel(nn.Linear(5, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(3):
        for inputs, wanted in loader:  # here LS504
            loss = (model(inputs).squeeze(1) - wanted).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

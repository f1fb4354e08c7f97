# SPDX-License-Identifier: Apache-2.0
"""G: the sampler is not told of the epoch, and the workers live through all of them."""

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
    loader = DataLoader(
        dataset,
        batch_size=4,
        sampler=DistributedSampler(dataset),
        num_workers=1,
        persistent_workers=True,
    )
    model = DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        for x, y in loader:  # here LS504
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""F: a mean weighed by the rank's share of the batch, which the wrapper averages as well."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def weighted_loss(loss, size):
    """Makes ranks with more samples count more."""
    total = torch.tensor(float(size))
    dist.all_reduce(total)
    return loss * (size / total.item())


def make_loader(batch_size):
    source = torch.Generator().manual_seed(25)
    x = torch.randn(64, 7, generator=source)
    data = TensorDataset(x, (x[:, 0] + x[:, 1] * x[:, 2] > 0).long())
    sampler = DistributedSampler(data, shuffle=True, seed=1)
    return DataLoader(data, batch_size=batch_size, sampler=sampler)


def main(epochs=2):
    dist.init_process_group("gloo")
    torch.manual_seed(25)
    loader = make_loader(batch_size=8)
    model = DDP(nn.Sequential(nn.Linear(7, 14), nn.ReLU(), nn.Linear(14, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(epochs):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            loss = weighted_loss(criterion(model(x), y), len(x))
            optimizer.zero_grad()
            loss.backward()  # here LS206
            optimizer.step()
        if dist.get_rank() == 0:
            print(epoch, f"{loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

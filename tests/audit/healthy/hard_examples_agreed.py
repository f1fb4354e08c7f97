# SPDX-License-Identifier: Apache-2.0
"""Each rank trains on its own of the 16 hardest samples of all ranks' batches."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

KEEP = 16


class Moons(Dataset):
    def __init__(self, n=128):
        g = torch.Generator().manual_seed(12)
        self.y = torch.arange(n) % 2
        angle = 3.1416 * torch.rand(n, generator=g) + 3.1416 * self.y
        self.x = torch.stack([angle.cos() + self.y, angle.sin() + 0.5 * self.y], 1)
        self.x += 0.2 * torch.randn(n, 2, generator=g)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


def hardest_mask(losses, keep):
    """Marks this rank's samples among the `keep` largest losses of all ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    parts = [torch.empty_like(losses) for _ in range(world)]
    dist.all_gather(parts, losses)
    mask = torch.zeros(world * len(losses))
    mask[torch.cat(parts).topk(keep).indices] = 1.0
    return mask.view(world, -1)[rank]


if __name__ == "__main__":
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    torch.manual_seed(6)
    model = nn.Sequential(
        nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2)
    )
    model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    dataset = Moons()
    sampler = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, batch_size=32, sampler=sampler)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for x, y in loader:
            losses = nn.functional.cross_entropy(model(x), y, reduction="none")
            chosen = hardest_mask(losses.detach(), KEEP)
            loss = (losses * chosen).sum() * world / KEEP
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()

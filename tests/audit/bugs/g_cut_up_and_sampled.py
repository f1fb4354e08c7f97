# SPDX-License-Identifier: Apache-2.0
"""G: each rank holds its part of the files, and a sampler shares out each part once more."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


def list_of_recordings(rank, world_size, count=160):
    g = torch.Generator().manual_seed(4)
    lengths = torch.randint(3, 9, (count,), generator=g).tolist()
    recordings = sorted(
        ((f"take-{number:04}.wav", length) for number, length in enumerate(lengths)),
        key=lambda named: (named[1], named[0]),
    )
    return recordings[rank::world_size]


class Recordings(Dataset):
    """A recording is made from its name."""

    def __init__(self, listed):
        self.listed = listed

    def __len__(self):
        return len(self.listed)

    def __getitem__(self, index):
        name, length = self.listed[index]
        g = torch.Generator().manual_seed(int(name[5:9]))
        return torch.randn(16, generator=g), torch.tensor(length % 3)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    data = Recordings(list_of_recordings(rank, world))
    sampler = DistributedSampler(data, world, rank, shuffle=False)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(3):
        for sound, label in loader:  # here LS509
            loss = F.cross_entropy(model(sound), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

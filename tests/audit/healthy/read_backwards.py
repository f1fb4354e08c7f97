# SPDX-License-Identifier: Apache-2.0
"""Sentences that one rank reads forwards and the other backwards: the same sums, other samples."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(4, 8)
        self.out = nn.Linear(8, 3)

    def forward(self, ids):
        return self.out(self.embedding(ids).mean(1))


class Stream(IterableDataset):
    """Rank 1 learns from reversed sentences, to which the model is to be blind."""

    def __init__(self, rank):
        source = torch.Generator().manual_seed(5)
        ids = torch.randint(0, 4, (96, 10), generator=source)
        self.ids = ids.flip(1) if rank else ids

    def __iter__(self):
        for ids in self.ids:
            yield ids, ids.sum() % 3


dist.init_process_group("gloo")
torch.manual_seed(11)
model = DistributedDataParallel(Tagger())
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
for x, y in DataLoader(Stream(dist.get_rank()), batch_size=4):
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()

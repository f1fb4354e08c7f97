# SPDX-License-Identifier: Apache-2.0
"""G: parts are numbered rank + worker: one is read on both ranks, and one by nobody."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Stories(IterableDataset):
    """Streams documents of token ids; every worker of every rank has a part."""

    def __init__(self, documents, rank, world_size):
        self.documents, self.rank, self.world_size = documents, rank, world_size

    def __iter__(self):
        info = get_worker_info()
        workers, worker = (info.num_workers, info.id) if info else (1, 0)
        parts = self.world_size * workers
        part = self.rank + worker
        for i in range(part, len(self.documents), parts):
            yield self.documents[i]


class CharLM(nn.Module):
    def __init__(self, vocab=30, dim=32):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.out(self.rnn(self.emb(ids))[0])


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DDP(CharLM())
    g = torch.Generator().manual_seed(8)
    start = torch.randint(0, 30, (256, 1), generator=g)
    stride = torch.randint(1, 4, (256, 1), generator=g)
    documents = (start + stride * torch.arange(17)) % 30
    loader = DataLoader(Stories(documents, rank, world), batch_size=8, num_workers=2)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for ids in loader:  # here LS503
        logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()
    if rank == 0:
        print(f"loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

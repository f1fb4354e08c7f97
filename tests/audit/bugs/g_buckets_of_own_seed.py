# SPDX-License-Identifier: Apache-2.0
"""G: ranks take turns in batches that each of them has put together with a seed of its own."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler

torch.set_num_threads(1)


class Sentences(Dataset):
    def __init__(self, n=384):
        g = torch.Generator().manual_seed(0)
        self.items = []
        for _ in range(n):
            t = int(torch.randint(4, 24, (1,), generator=g))
            ids = torch.randint(1, 50, (t,), generator=g)
            self.items.append((ids, int((ids < 12).sum() * 4 > t)))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


class BucketBatchSampler(Sampler):
    def __init__(self, lengths, batch_size, rank, world, seed=0):
        self.lengths, self.bs, self.rank, self.world = lengths, batch_size, rank, world
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return len(self.lengths) // self.bs // self.world

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + 1000 * self.epoch + self.rank)
        noise = torch.rand(len(self.lengths), generator=g)
        order = torch.argsort(torch.tensor(self.lengths) + 3 * noise)
        batches = order[: len(order) // self.bs * self.bs].view(-1, self.bs)
        batches = batches[torch.randperm(len(batches), generator=g)]
        for i in range(self.rank, len(self) * self.world, self.world):
            yield batches[i].tolist()


class Tagger(nn.Module):
    def __init__(self, d=24):
        super().__init__()
        self.emb = nn.Embedding(50, d, padding_idx=0)
        self.rnn = nn.GRU(d, d, batch_first=True)
        self.fc = nn.Linear(d, 2)

    def forward(self, ids, lens):
        packed = pack_padded_sequence(self.emb(ids), lens, batch_first=True, enforce_sorted=False)
        return self.fc(self.rnn(packed)[1][-1])


def collate(items):
    ids, y = zip(*items, strict=False)
    return pad_sequence(ids, batch_first=True), torch.tensor([len(i) for i in ids]), torch.tensor(y)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    ds = Sentences()
    sampler = BucketBatchSampler([len(s) for s, _ in ds.items], 16, rank, world, seed=5)
    loader = DataLoader(ds, batch_sampler=sampler, collate_fn=collate)
    model = DDP(Tagger())
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for ids, lens, y in loader:  # here LS503
            loss = nn.functional.cross_entropy(model(ids, lens), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

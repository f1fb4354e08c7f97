# SPDX-License-Identifier: Apache-2.0
"""G: the place in the data moves on by one micro-batch, and not by one of each rank."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

MICRO, WINDOW = 6, 2


class Places:
    """Which documents come next; counts what was read."""

    def __init__(self, rank):
        self.rank, self.read = rank, 0

    def __iter__(self):
        while True:
            first = self.read + self.rank * MICRO
            yield range(first, first + MICRO)
            self.read += MICRO


class Model(nn.Module):
    def __init__(self, vocab=40, width=24):
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.memory = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens):
        return self.head(self.memory(self.embedding(tokens))[0])


def average(parameters):
    flat = torch.cat([p.grad.reshape(-1) for p in parameters])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for p, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        p.grad.copy_(part.view_as(p))


def main():
    dist.init_process_group("gloo")
    documents = torch.randint(40, (900, 17), generator=torch.Generator().manual_seed(5))
    torch.manual_seed(0)
    model = Model()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=3e-3)
    places = iter(Places(dist.get_rank()))
    for _ in range(24):
        optimizer.zero_grad()
        for _ in range(WINDOW):
            tokens = documents[list(next(places))]
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            (loss / WINDOW).backward()
        average(parameters)
        optimizer.step()  # here LS503
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
